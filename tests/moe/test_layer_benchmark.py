"""The benchmark of the layer runs, on the CPU: it checks every way to move rows before it times it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.project.checkout import ROOT

SMALL = "--hidden_size 256 --intermediate_size 128 --num_experts 16 --top_k 4 --groups 4 2 -b 3 -e 6 -f 2"


def test_benchmark_on_the_cpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = f"benchmarks/moe_layer.py --ep_size 2 --device cpu {SMALL} --iters 2 --warmup 1 --peers nccl,flashinfer"
    result = subprocess.run(
        [sys.executable, *command.split(), "--output_file", str(report)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(report.read_text())
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
