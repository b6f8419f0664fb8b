"""The benchmark of a step of a transformers model, with small sizes on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines.run import only_with_engines, output_of, start

pytestmark = only_with_engines
SMALL = {
    "batches": "1,3",
    "layers": 3,
    "hidden_size": 128,
    "intermediate_size": 64,
    "heads": 8,
    "num_experts": 8,
    "top_k": 2,
    "vocab_size": 256,
    "context": 16,
}


def test_putget_and_both_ways_of_transformers_give_the_same(tmp_path: Path) -> None:
    """Each way is compared with all experts on one rank before it is timed: a difference ends the program."""
    report = tmp_path / "step.json"
    sizes = [part for name, value in SMALL.items() for part in (f"--{name}", value)]
    ranks = ("-m", "torch.distributed.run", "--nproc_per_node", 2)
    step = start(
        "transformers", *ranks, "benchmarks/transformers_step.py", "--device", "cpu", *sizes, "--output_file", report
    )
    output_of(step, 300)
    found = json.loads(report.read_text())
    assert [line["experts"] for line in found["lines"]] == ["all_to_all", "all_reduce", "putget"]
    for line in found["lines"]:
        assert set(line["us"]) == {"1", "3"}
        assert all(error <= 2.0**-6 for error in line["error"].values())
