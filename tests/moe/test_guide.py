"""The guide's code runs, on the CPU and with small sizes."""

from __future__ import annotations

import re
from typing import Any

from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense
from tests.moe.layers import options_of
from tests.project.checkout import ROOT

GUIDE = ROOT / "docs" / "guide" / "moe_layer.md"
# Large numbers of the guide, and what stands in their place.
SMALL = (("7168", "256"), ("2048", "128"), ("num_experts=256", "num_experts=16"), ('"cuda"', '"cpu"'))
DENSE = Dense(hidden=256, intermediate=128, num_experts=16, groups=(8, 4), shared=128)


def run_blocks(rank: Rank) -> list[tuple[int, ...]]:
    """A body: the blocks one after the other; the shapes of what came out."""
    prefix = "model.layers.3.mlp."
    names: dict[str, Any] = {
        "comm": rank.comm,
        "sizes": options_of(DENSE, device=rank.device),
        "state": {prefix + name: tensor for name, tensor in DENSE.state().items()},
        "x": DENSE.tokens(rank.rank, 5),
        "x1": DENSE.tokens(rank.rank, 3),
        "x2": DENSE.tokens(rank.rank, 2),
    }
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    for block in blocks:
        for large, small in SMALL:
            block = block.replace(large, small)
        exec(block.replace("layer.close()", ""), names)
    names["second"](names["first"](names["x"]))
    for name in ("second", "first", "layer"):
        names[name].close()
    return [tuple(names[name].shape) for name in ("y", "y1", "y2")]


def test_blocks_run() -> None:
    for shapes in run_ranks(2, run_blocks):
        assert shapes == [(5, 256), (3, 256), (2, 256)]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text()):
        assert (GUIDE.parent / target).exists(), target
