"""The benchmark of the layer runs, on the CPU: it checks every way to move rows before it times it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import warm
from tests.project.checkout import ROOT

SMALL = "--hidden_size 256 --intermediate_size 128 --num_experts 16 --top_k 4 --groups 4 2 -b 3 -e 6 -f 2"


def report_of(options: str, folder: Path) -> dict[str, Any]:
    """Runs the benchmark with small sizes on two CPU ranks."""
    report = folder / "report.json"
    command = f"benchmarks/moe_layer.py --ep_size 2 --device cpu {SMALL} --iters 2 --warmup 1 {options}"
    result = subprocess.run(
        [warm.python(), *command.split(), "--output_file", str(report)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_benchmark_on_the_cpu(tmp_path: Path) -> None:
    written = report_of("--peers nccl,flashinfer", tmp_path)
    assert written["skipped"] == ["flashinfer is left out: it needs GPUs"]
    assert [size["batch_size"] for size in written["sizes"]] == [3, 6]
    for size in written["sizes"]:
        assert size["checked"]
        names = [contender["name"] for contender in size["contenders"]]
        assert names == [
            "putget",
            "putget, one after the other",
            "gloo all-gather + reduce-scatter",
        ]
        assert all(contender["latency_us"] > 0 for contender in size["contenders"])


def test_from_ids_with_ranks_that_differ(tmp_path: Path) -> None:
    sizes = report_of("--peers= --zipf --no_shared --few_ranks 1 --tell", tmp_path)["sizes"]
    assert [[contender["name"] for contender in size["contenders"]] for size in sizes] == [["putget"]] * 2


def test_a_timeline_is_drawn() -> None:
    """The newest report of four GPUs as a picture: a panel for each of its sizes, each kernel inside of its panel."""
    namespace = runpy.run_path(str(ROOT / "benchmarks/moe_layer_plot.py"))
    report = json.loads((ROOT / "benchmarks/results/2026-11-28_4xh200_moe_layer.json").read_text())
    figure = namespace["make_figure"](report, 4.8e6, 1490e6)
    assert len(figure.axes) == len(report["sizes"])
    for axes, size in zip(figure.axes, report["sizes"], strict=True):
        timeline = size["contenders"][0]["timeline"]
        assert len(axes.patches) == len(timeline)
        assert axes.get_xlim()[1] >= max(kernel["end_us"] for kernel in timeline)
    floor = namespace["floor_us"](report["settings"]["shape"], report["sizes"][0], 4.8e6, 1490e6)
    assert floor == pytest.approx(8 * 3 * 7168 * 2048 / 4.8e6)
