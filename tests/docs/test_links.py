"""Links of pages that the site's builder does not see lead somewhere. `make docs` checks those of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.checkout import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "lab").glob("*.md"), ROOT / "transfer" / "README.md"]
# A file of the documentation that code, a test or a page speaks of.
NAMED = re.compile(r"(?<![\w/.-])(?:docs|lab)/[\w/-]+(?:\.[\w-]+)*\.(?:md|png)")
SOURCES = ("native", "python", "tests", "benchmarks", "examples", "transfer", "scripts")
SUFFIXES = (".py", ".h", ".cuh", ".cpp", ".cu", ".rs", ".pml", ".sh", ".txt", ".md")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_pages_that_sources_name_are_there() -> None:
    missing = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            if path.suffix not in SUFFIXES or {"target", "results", "__pycache__"} & set(parts):
                continue
            for name in NAMED.findall(path.read_text(errors="replace")):
                if not (ROOT / name).exists():
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)
