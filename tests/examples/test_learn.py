"""The loop that learns, in short: the reward rises while weights go from the trainer into the rollout."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from tests.harness import warm
from tests.project.checkout import ROOT

STEPS = 40


def test_the_reward_rises() -> None:
    path = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [warm.python(), "examples/learn.py", str(STEPS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = [float(share) for share in re.findall(r"version +\d+: +([\d.]+)% of the digits are right", result.stdout)]
    assert len(found) == 5, result.stdout
    assert found[-1] > found[0] + 10, result.stdout
    assert f"{STEPS} updates of" in result.stdout
