"""The rule of launches, native/cuda/grid.cpp, at the ends of what its arguments may be. By tests/native/grid.cpp."""

from __future__ import annotations

from pathlib import Path

from tests.protocol.stress_job import StressJob


def test_the_rule_of_launches_holds_at_its_limits(tmp_path: Path) -> None:
    done = StressJob("address,undefined", tmp_path, source="grid.cpp")()
    assert done.returncode == 0, done.stdout + done.stderr


def test_segments_that_never_fit_are_caught(tmp_path: Path) -> None:
    mistake = ("cuda/grid.cpp", "launch.segment_bytes < longest_row(shape)", "true")
    done = StressJob("undefined", tmp_path, mistake, "grid.cpp")()
    assert done.returncode != 0, "nothing checks it"
