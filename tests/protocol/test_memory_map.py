"""docs/protocol.md shows the workspace as native/protocol/round/layout.h lays it out."""

from __future__ import annotations

import itertools
import re

from tests.protocol import memory_map, tags


def test_the_document_shows_the_layout_of_the_code() -> None:
    assert memory_map.documented() == memory_map.generated(), "run: python -m tests.protocol.memory_map"


def test_regions_follow_each_other_without_overlap() -> None:
    rows = re.findall(r"^\| `.*\| (\d+) \| \d+ \| (\d+) \|$", memory_map.generated(), re.MULTILINE)
    assert len(rows) > 5
    spans = [(int(first), int(first) + int(size)) for first, size in rows]
    for (_, end), (first, _) in itertools.pairwise(spans):
        assert end <= first


def test_the_document_says_who_writes_each_region() -> None:
    regions = re.findall(r"^\| `(\w+)", memory_map.generated(), re.MULTILINE)
    writers = tags.DOCUMENT.read_text().partition("## Who may write what")[2].partition("\n## ")[0]
    assert {region for region in regions if f"`{region}" not in writers} == set()
