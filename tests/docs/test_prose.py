"""The pages keep the voice that CONTRIBUTING asks for, as far as a program can see it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("markdown_it", reason="needs markdown-it-py")

from markdown_it import MarkdownIt

from tests.project.checkout import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NEW = [*PAGES, ROOT / "README.md", ROOT / "SECURITY.md"]
HISTORY = re.compile(r"\b(no longer|used to be|step \d+|steps \d+|at commit|(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7})\b")
MOST_WORDS = 25
LONGEST_LINE = 100


def sentences(text: str) -> Iterator[str]:
    """Sentences of paragraphs and items; tables and code apart."""
    tokens = MarkdownIt().enable("table").parse(text)
    in_table = False
    for token in tokens:
        in_table = token.type == "table_open" or (in_table and token.type != "table_close")
        if token.type == "inline" and not in_table:
            words = re.sub(r"`[^`]*`", "code", token.content).replace("\n", " ")
            words = re.sub(r"\]\([^)]*\)", "]", words)
            yield from re.split(r"(?<=[.:;?!])\*{0,2} ", words)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", NEW, ids=name)
def test_lines_are_short(path: Path) -> None:
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        is_code ^= line.startswith("```")
        if not is_code and not line.startswith(("|", "!", "```")):
            assert len(line) <= LONGEST_LINE, f"line {number} has {len(line)} characters"


@pytest.mark.parametrize("path", NEW, ids=name)
def test_sentences_are_short(path: Path) -> None:
    long = [one for one in sentences(path.read_text()) if len(one.split()) > MOST_WORDS]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_there_is_no_history(path: Path) -> None:
    told = re.sub(r"```.*?```|\]\([^)]*\)", "", path.read_text(), flags=re.DOTALL)
    assert not HISTORY.findall(told)


def test_what_is_looked_for_is_found() -> None:
    assert len(list(sentences("One two. Three four: five.\n\n| a | b |\n|---|---|\n| c. d | e |\n"))) == 3
    assert HISTORY.search("as it is since 487fd9c")
    assert HISTORY.search("see step 29")
    assert not HISTORY.search("1048576 bytes, effaced")
