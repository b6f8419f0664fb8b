"""The choice of replicas by CTAs of several warps, without a GPU: the same slots as one thread's, and no race.

By tests/native/choice.cpp, on emulated CTAs (tests/native/emulated) under ThreadSanitizer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.proofs import PROTOCOL_TEXT, proved_by
from tests.protocol.stress_job import MISMATCH, REPORT, StressJob

CASES = 24


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_ctas_choose_as_one_thread_does(sanitizer: str, tmp_path: Path) -> None:
    done = StressJob(sanitizer, tmp_path, source="choice.cpp", ctas=True)(CASES)
    assert done.returncode == 0, done.stdout + done.stderr


SHARES, TABLES = "balancer/shares.h", "balancer/tables.cpp"
MISTAKES = {
    "a wave that begins before the last one has ended": (
        SHARES,
        "      exec.sync();\n    }\n    return exec",
        "    }\n    return exec",
    ),
    "counts that are written while lanes read them": (
        SHARES,
        "      exec.sync_warp();\n      if (expert != kNoExpert && same.before == 0)",
        "      if (expert != kNoExpert && same.before == 0)",
    ),
    "experts of one wave that share a rank": (TABLES, "taken[wave][rank] = true;", "taken[wave][rank] = false;"),
    "lanes that take the same part of the rest": (SHARES, "earlier + lanes.before;", "earlier;"),
}


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, tmp_path: Path) -> None:
    done = StressJob("thread", tmp_path, MISTAKES[mistake], "choice.cpp", ctas=True)(CASES)
    assert done.returncode in {MISMATCH, REPORT}, f"{mistake}: nothing checks it: {done.returncode} {done.stderr}"
