"""The benchmark of a balancer's part of a step, with small sizes on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.run import only_with_engines, output_of, start
from tests.engines.test_transformers_step import SMALL

pytestmark = only_with_engines
RANKS = {1: (), 2: ("-m", "torch.distributed.run", "--nproc_per_node", 2)}


def report_of(ranks: int, folder: Path) -> Any:
    """The report of a run whose experts come over in a few steps."""
    report = folder / "layer.json"
    given = {**SMALL, "turns": 12, "most_bytes": 1 << 16, "output_file": report}
    options = [part for name, value in given.items() for part in (f"--{name}", value)]
    program = start("transformers", *RANKS[ranks], "benchmarks/transformers_layer.py", "--device", "cpu", *options)
    output = output_of(program, 300)
    assert report.exists(), output[-6000:]
    return json.loads(report.read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_way_is_timed_beside_the_one_without_a_balancer(ranks: int, tmp_path: Path) -> None:
    """The program itself compares outputs and moved experts, and ends without a report where they differ."""
    found = report_of(ranks, tmp_path)
    assert found["ranks"] == ranks
    assert set(found["requests"]) == {"1", "3"}
    moving = ["moving"] if ranks > 1 else []  # an expert moves to another rank only
    for line in found["requests"].values():
        assert list(line) == ["without", "idle", *moving, "fp8_back"]
        assert all(way["us"] > 0 for way in line.values())
        assert all(line[way]["experts_moved"] > 0 for way in moving)
