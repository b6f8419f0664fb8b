"""The rule of launches, native/choose.cpp: at the ends of what its arguments may be, and as its page shows it."""

from __future__ import annotations

from pathlib import Path

from tests.protocol import paths
from tests.protocol.stress_job import StressJob


def test_the_rule_of_launches_holds_at_its_limits(tmp_path: Path) -> None:
    done = StressJob("address,undefined", tmp_path, source="choose_limits.cpp")()
    assert done.returncode == 0, done.stdout + done.stderr


def test_segments_that_never_fit_are_caught(tmp_path: Path) -> None:
    mistake = ("choose.cpp", "launch.segment_bytes < longest_row(shape)", "true")
    done = StressJob("undefined", tmp_path, mistake, "choose_limits.cpp")()
    assert done.returncode != 0, "nothing checks it"


def test_the_page_has_the_table_of_the_rule() -> None:
    assert paths.documented() == paths.generated(), "python -m tests.protocol.paths writes it again"
