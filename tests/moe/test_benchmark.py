"""The benchmark's own checks pass on CPU, and fail where a result is wrong."""

from __future__ import annotations

import subprocess

from tests.harness import warm
from tests.project.checkout import ROOT

SCRIPT = ROOT / "benchmarks" / "moe_kernels.py"


def test_results_are_checked_without_a_gpu() -> None:
    command = [warm.python(), str(SCRIPT), "--device", "cpu", "--tokens", "2", "--ep_sizes", "8", "--alignment", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "correct\n"), done.stderr


def test_a_wrong_result_ends_the_benchmark() -> None:
    program = (
        "import sys, runpy, torch\n"
        "from putget.core.expert_major import Grouper\n"
        "Grouper.finalize = lambda self, rows, layout, out=None: None\n"
        "sys.argv = ['x', '--device', 'cpu', '--tokens', '2', '--ep_sizes', '4']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([warm.python(), "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "wrong: finalized rows" in done.stderr
