"""The host's cost of an eager call, counted: times depend on the machine, the number of calls does not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.harness import warm

ROOT = Path(__file__).resolve().parents[2]
# Python functions and calls into C of one pair, a few above what was counted: 48 and 14, 117 and 40, 140 and 44; with
# the caller's quantisation 55 and 34, 123 and 62.
BOUNDS = {
    "alltoall": (52, 18),
    "flashinfer_class": (125, 46),
    "flashinfer_class_flat": (150, 50),
    "alltoall_fp8": (59, 38),
    "flashinfer_class_fp8": (131, 68),
}


def test_an_eager_pair_makes_few_calls(tmp_path: Path) -> None:
    output = tmp_path / "host_time.json"
    words = ["--device", "cpu", "--tokens", "2", "--callers", ",".join(BOUNDS), "--steps", "5"]
    program = [warm.python(), str(ROOT / "benchmarks" / "host_time.py"), *words, "--output_file", str(output)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert report["schema"] == "putget.host_time/1"
    assert [line["caller"] for line in report["lines"]] == list(BOUNDS)
    for line in report["lines"]:
        most_python, most_c = BOUNDS[line["caller"]]
        assert 0 < line["python_calls"] <= most_python, line
        assert 0 < line["c_calls"] <= most_c, line
        assert line["queue_empty"]["pair"] > 0
        assert len(line["steps"]) == 5
