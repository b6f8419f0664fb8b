"""Every Python and console block of the documentation runs, and prints what the page says."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

import pytest

pytest.importorskip("markdown_it", reason="needs markdown-it-py")

from tests.docs.blocks import DOCS, ROOT, Page, blocks_of, require_lines, with_includes

# Its code runs in tests of its own, and its words are for other readers.
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.name != "protocol.md"]
BLOCKS = [
    pytest.param(
        path,
        index,
        id=f"{path.relative_to(DOCS)}:{block.line}",
        marks=[pytest.mark.gpu] if ("needs", "gpu") in block.marks else [],
    )
    for path in PAGES
    for index, block in enumerate(blocks_of(path.read_text()))
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    return {path: Page(path, tmp_path_factory.mktemp("page"), blocks_of(path.read_text())) for path in PAGES}


@pytest.mark.parametrize(("path", "index"), BLOCKS)
def test_block_runs(pages: dict[Path, Page], path: Path, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pages[path]
    reason = page.blocks[index].why_not()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.chdir(page.folder)
    page.run(index)


def names_of(code: str) -> tuple[set[str], set[str]]:
    """The names that a block binds anywhere, and those that it reads."""
    bound: set[str] = set()
    read: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound, read


def unexplained(text: str) -> list[str]:
    """Names that a page's blocks read, that no block before has made, and that the words before do not mention."""
    known, found, lines = set(dir(builtins)), [], with_includes(text).splitlines()
    for block in blocks_of(text):
        if block.language != "python":
            continue
        bound, read = names_of(block.text)
        before = "\n".join(lines[: block.line])
        found += sorted(name for name in read - bound - known if f"`{name}`" not in before)
        known |= set() if block.title else bound
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_block_that_is_copied_runs_or_the_page_says_what_it_needs(path: Path) -> None:
    assert unexplained(path.read_text()) == []


def test_a_name_from_nowhere_is_found() -> None:
    page = "Here `x` is a row.\n```python\ny = layer(x)\n```\n```python\nprint(y, [z for z in y])\n```\n"
    assert unexplained(page) == ["layer"]


def test_tests_that_are_named_are_there() -> None:
    for path in PAGES:
        for block in blocks_of(path.read_text()):
            for kind, name in block.marks:
                assert kind != "tested" or (ROOT / name).is_file(), f"{path}: {name}"


WRONG = """
```python
x = {value}
print("x is", x)
```

```text title="Output"
x is ...2
```
"""


@pytest.mark.parametrize(("value", "right"), [("12", True), ("13", False), ("1 / 0", False)])
def test_a_wrong_block_fails(tmp_path: Path, value: str, right: bool) -> None:
    page = Page(tmp_path / "page.md", tmp_path, blocks_of(WRONG.format(value=value)))
    if right:
        page.run(0)
        return
    with pytest.raises((AssertionError, ZeroDivisionError)):
        page.run(0)


def test_a_command_that_fails_fails(tmp_path: Path) -> None:
    blocks = blocks_of("```console\n$ python -c 'import no_such_module'\n```\n")
    with pytest.raises(AssertionError, match="no_such_module"):
        Page(tmp_path / "page.md", tmp_path, blocks).run(0)


def test_lines_may_come_in_any_order_and_must_come() -> None:
    require_lines("a 1\nb ...", "b  2\na 1\n")
    with pytest.raises(AssertionError, match="not printed: 'a 1'"):
        require_lines("a 1", "a 12")


def test_marks_are_read() -> None:
    (first, second) = blocks_of("<!-- needs: gpu -->\n```python\n1\n```\ntext\n```python\n2\n```\n")
    assert first.marks == (("needs", "gpu"),)
    assert second.marks == ()
