"""The page of traces names files that there are, and only such."""

from __future__ import annotations

import re

from tests.project.checkout import ROOT

PAGE = ROOT / "docs" / "structure.md"
PARTS = ("python/", "native/", "transfer/")


def test_every_file_of_a_trace_exists() -> None:
    named = [name for name in re.findall(r"`([\w./]+)`", PAGE.read_text()) if name.startswith(PARTS)]
    assert len(named) >= 60
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_there_are_five_traces() -> None:
    traces = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(traces) == 5
    assert all(trace.count("\n| `") >= 8 for trace in traces)
