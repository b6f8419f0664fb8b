"""Comments and docstrings name their subject: none begins with "Of", "What", "Who", "Whoever", "Whom" or "Whose"."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.checkout import ROOT

FOLDERS = ("native", "transfer", "python", "tests", "benchmarks", "examples", "scripts")
SKIPPED = frozenset({"target", "__pycache__", "build"})
# A bare relative clause as the subject. Its reader has to guess the thing that it stands for.
BEGINS = re.compile(r"(Of|(?i:what|who|whoever|whom|whose))\b")
MARK = re.compile(r"\s*(?://[/!]?|/\*+)\s*")
BEHIND = re.compile(r"[;,{})]\s+(?://[/!<]?|/\*+<?)\s*")


def of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and first words of each block of comments, each comment behind code and each docstring."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            is_behind_code = bool(token.line[: token.start[1]].strip())
            if is_behind_code or token.start[0] != last + 1:
                yield token.start[0], token.string.lstrip("# ")
            if not is_behind_code:
                last = token.start[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said:
                yield getattr(node, "lineno", 1), said


def of_braces(text: str) -> Iterator[tuple[int, str]]:
    """The same for C, C++, CUDA and Rust."""
    last = -1
    for number, line in enumerate(text.splitlines(), 1):
        mark = MARK.match(line)
        if mark is None:
            behind = BEHIND.search(line)
            if behind is not None:
                yield number, line[behind.end() :]
            continue
        if number != last + 1:
            yield number, line[mark.end() :]
        last = number


def found_in(path: Path) -> list[str]:
    text = path.read_text()
    blocks = of_python(text) if path.suffix in (".py", ".pyi") else of_braces(text)
    return [f"{path}:{number}: {said[:60]}" for number, said in blocks if BEGINS.match(said)]


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            is_source = path.suffix in (".py", ".pyi", ".rs", ".c", ".h", ".cpp", ".cu", ".cuh")
            if is_source and SKIPPED.isdisjoint(path.relative_to(ROOT).parts):
                yield path


def test_comments_name_their_subject() -> None:
    paths = list(sources())
    assert len(paths) > 400
    found = [line for path in paths for line in found_in(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Of a thing."""\n'),
        ("a.py", "x = 1\n# Whoever comes.\n"),
        ("a.py", "x = 1  # Whose number.\n"),
        ("a.py", 'class A:\n    """What it has."""\n'),
        ("a.h", "int x;  // What it has.\n"),
        ("a.pyi", 'def f() -> None:\n    """What it does."""\n'),
        ("a.py", 'def f():\n    """Who has it."""\n'),
        ("a.h", "// Of one rank.\nint x;\n"),
        ("a.rs", "/// Who may come in.\nfn f() {}\n"),
        ("a.c", "/* Of a word. */\n"),
    ],
)
def test_a_comment_without_a_subject_is_found(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert len(found_in(path)) == 1
    path.write_text(BEGINS.sub("Bytes of", text))
    assert found_in(path) == []
