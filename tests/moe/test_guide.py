"""The guide's code runs, on the CPU and with small sizes."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

import putget
from putget.moe.grouped_fp8 import quantise_rows
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense, relative_error
from tests.moe.layers import FP8_TOLERANCE, options_of
from tests.project.checkout import ROOT

GUIDE = ROOT / "docs" / "guides" / "moe_layer.md"
# Large numbers of the guide, and what stands in their place.
SMALL = (("7168", "256"), ("2048", "128"), ("num_experts=256", "num_experts=16"), ('"cuda"', '"cpu"'))
DENSE = Dense(hidden=256, intermediate=128, num_experts=16, groups=(8, 4), shared=128)


def run_blocks(rank: Rank) -> tuple[int, ...]:
    """A body: the blocks one after the other; the shape of what came out."""
    prefix = "model.layers.3.mlp."
    names: dict[str, Any] = {
        "comm": rank.comm,
        "sizes": options_of(DENSE, device=rank.device),
        "state": {prefix + name: tensor for name, tensor in DENSE.state().items()},
        "x": DENSE.tokens(rank.rank, 5),
    }
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    blocks = [block for block in blocks if "Communicator.local" not in block]  # tests/docs runs whole programs
    for block in blocks:
        for large, small in SMALL:
            block = block.replace(large, small)
        exec(block.replace("layer.close()", ""), names)
    names["second"](names["first"](names["x"]))
    for name in ("second", "first", "layer"):
        names[name].close()
    return tuple(names["y"].shape)


def test_blocks_run() -> None:
    for shape in run_ranks(2, run_blocks):
        assert shape == (5, 256)


def run_kernels_block(rank: Rank) -> list[Any]:
    """A body: the block of docs/guides/around_the_experts.md; what came out, and what went in."""
    text = (ROOT / "docs" / "guides" / "around_the_experts.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    hidden, between, experts = 256, 128, 4
    row, scale = putget.Payload((hidden,), torch.float8_e4m3fn), putget.Payload((hidden // 128,), torch.float32)
    # Ranks are processes that other tests have used: their generators are where those left them.
    weights_of_all = torch.Generator().manual_seed(0)
    up = torch.randn(2 * between, hidden, generator=weights_of_all) * 0.1
    down = torch.randn(hidden, between, generator=weights_of_all) * 0.1

    def my_grouped_gemm(rows: Tensor, scales: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        assert offsets.tolist()[-1] % 128 == 0
        values = rows.float() * scales.repeat_interleave(128, 1)
        return (values @ weight.T).bfloat16()

    with putget.AllToAll(
        rank.comm,
        num_experts=experts,
        top_k=2,
        max_tokens_per_rank=8,
        payloads=[row, scale],
        output=putget.Payload((hidden,), torch.bfloat16),
        device="cpu",
    ) as a2a:
        x = torch.randn(5 * rank.rank, hidden).bfloat16()
        codes, scales = quantise_rows(x)
        ids = torch.randint(0, experts, (len(x), 2), dtype=torch.int32)
        weights = torch.rand(len(x), 2)
        names: dict[str, Any] = {
            "putget": putget,
            "a2a": a2a,
            "my_grouped_gemm": my_grouped_gemm,
            "w13": up,
            "w2": down,
            "topk_ids": ids,
            "topk_weights": weights,
            "hidden": codes,
            "scales": scales,
        }
        exec(block, names)
        both = (codes.float() * scales.repeat_interleave(128, 1)) @ up.T
        exact = (torch.nn.functional.silu(both[:, :between]) * both[:, between:]) @ down.T
        return [names["out"].float(), exact * weights.sum(1, keepdim=True)]


def test_block_of_the_kernels_runs() -> None:
    for got, want in run_ranks(2, run_kernels_block):
        assert got.shape == want.shape
        assert len(want) == 0 or relative_error(got, want) < FP8_TOLERANCE
