"""docs/reference/support.md alone says what has run on what; other pages agree with it, or say nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from putget.group.domains import PROVIDERS
from tests.project.checkout import ROOT

SUPPORT = ROOT / "docs" / "reference" / "support.md"
OTHERS = [path for path in (ROOT / "docs").rglob("*.md") if path != SUPPORT and "transfer" not in str(path)]
OTHERS += [ROOT / "README.md"]
# Statements on where something has run. Numbers of GPUs that nobody had are said beside the tables of results.
STATED = re.compile(r"\b(not tested|(?<!which )that has run|tested over|tested with NICs)\b")
LINKED = re.compile(r"\[[^\]]*support\s+matrix\]|\(\S*support\.md")


def table(title: str) -> dict[str, list[str]]:
    """Rows of a section's table, by their first cell."""
    section = SUPPORT.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def statements(text: str) -> list[str]:
    """Those of a page that do not point to the matrix in the same paragraph."""
    return [part for part in text.split("\n\n") if STATED.search(" ".join(part.split())) and not LINKED.search(part)]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_other_pages_state_nothing_of_their_own(path: Path) -> None:
    assert statements(path.read_text()) == []


def test_a_statement_elsewhere_is_found() -> None:
    assert statements("It is fast.\n\nOver EFA it is not\ntested.") == ["Over EFA it is not\ntested."]
    assert not statements("Over EFA it is not tested; see the [support matrix](x.md).")


def test_each_provider_has_a_row_and_the_guide_has_the_same() -> None:
    assert set(table("Networks between domains")) == set(PROVIDERS)
    guide = (ROOT / "docs" / "guides" / "virtual_domains.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| (?:all|ranks of|processes)", guide, re.MULTILINE)) == set(PROVIDERS)


def test_gpus_of_the_reports_are_in_the_matrix() -> None:
    """A report of N GPUs of a kind is a run on them."""
    machines = table("Machines")
    reports = [path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    runs = {found.groups() for name in reports if (found := re.search(r"_(\d)x(h\d+)_", name))}
    assert len(runs) > 2
    for count, kind in runs:
        (said,) = [row[1] for name, row in machines.items() if name == f"NVIDIA {kind.upper()}"]
        assert count in re.findall(r"\d+", said.split(";")[0]), f"{count} x {kind}: {said}"


def test_networks_across_hosts_are_no_broken_promise() -> None:
    """Both pages spoke of them, and one said that there are none."""
    promises = (ROOT / "docs" / "concepts" / "promises.md").read_text()
    assert "The ranks are in one domain" not in promises
    assert "(../guides/virtual_domains.md)" in promises.split("## Not promised")[1]
