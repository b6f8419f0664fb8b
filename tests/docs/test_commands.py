"""Commands that pages and messages tell a reader to type can work: what they install, build and run is there."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from tests.project.checkout import ROOT, pyproject

PLACES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "examples", "python", "transfer", ".github")
SUFFIXES = (".md", ".py", ".pyi", ".rs", ".ipynb", ".h", ".yml", ".cuda", ".cpu")
# Neither package is on PyPI: a checkout's folders are what there is to install.
INSTALL = re.compile(r"pip install (?P<words>[^\n`|\")]+)")
OURS = re.compile(r"putget(_transfer)?\b")
MAKE = re.compile(r"(?:`|\$ )make (?P<target>[a-z][a-z-]*)")
PUTGET = re.compile(r"(?:`|\$ )putget (?P<command>[a-z]+(?:-[a-z]+)*)\b")


def texts() -> Iterator[tuple[str, str]]:
    for place in PLACES:
        root = ROOT / place
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            named = path.suffix in SUFFIXES or path.name == "Dockerfile"
            if path.is_file() and named and not {"target", "__pycache__"} & set(path.parts):
                yield str(path.relative_to(ROOT)), path.read_text(errors="replace")


def wrong_installs(text: str) -> Iterator[str]:
    """Commands that would look for putget on PyPI, or ask for an extra that there is not."""
    extras = set(pyproject()["project"]["optional-dependencies"])
    for found in INSTALL.finditer(re.sub(r"\s*\n\s*", " ", text)):
        command = re.split(r"[;:,.](?=\s|$)|  +#| # | \$ ", found["words"])[0]
        for word in command.split():
            folder, _, names = word.strip("'\"").partition("[")
            unknown = set(re.findall(r"[\w-]+", names)) - extras
            if OURS.match(folder) or (folder.startswith(".") and (unknown or not (ROOT / folder).exists())):
                yield f"pip install {command}"


def test_what_is_installed_is_there() -> None:
    wrong = [f"{name}: {command}" for name, text in texts() for command in wrong_installs(text)]
    assert not wrong, "\n".join(wrong)


def test_targets_of_make_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = {f"{name}: make {t}" for name, text in texts() for t in MAKE.findall(text) if t not in targets}
    assert not wrong, "\n".join(sorted(wrong))


def test_commands_of_putget_are_there() -> None:
    source = (ROOT / "python" / "putget_bench" / "parser.py").read_text()
    commands = set(re.findall(r'add_parser\(\s*"([\w-]+)"', source))
    assert "doctor" in commands
    wrong = {f"{name}: putget {c}" for name, text in texts() for c in PUTGET.findall(text) if c not in commands}
    assert not wrong, "\n".join(sorted(wrong))


def test_what_cannot_work_is_found() -> None:
    for command in (
        "pip install putget",
        "pip install 'putget[bench]'",
        "pip install '.[network]'",
        "pip install ./kv",
    ):
        assert list(wrong_installs(f"Run `{command}` first.")), command
    for command in ("pip install '.[bench]'", "pip install ./transfer", "pip install pytest", "pip install ."):
        assert not list(wrong_installs(f"In a checkout of putget: `{command}`")), command


def test_the_version_has_a_dated_entry() -> None:
    version = pyproject()["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE)


def test_pages_of_wheels_speak_of_files_that_are_installed() -> None:
    installed = (ROOT / "CMakeLists.txt").read_text()
    for header in re.findall(r"putget\w*\.h", (ROOT / "docs/start/install.md").read_text()):
        assert header in installed
    assert Path(ROOT / "transfer/python/putget_transfer/include/putget_transfer.h").is_file()


CONTINUE = "The blocks of this page continue one another"


def missing_names(code: str) -> set[str]:
    """Names that a block reads and does not make."""
    nodes = list(ast.walk(ast.parse(code)))
    made = set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            made.add(node.name or "")
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    made |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - made


def alone(text: str) -> list[int]:
    """Lines of Python blocks that run as tests and need an earlier block."""
    blocks = re.finditer(r"((?:<!--.*?-->\n)*)```python *\n(.*?)```", text, re.DOTALL)
    run = [block for block in blocks if not re.search(r"<!-- (skip|tested):", block[1])]
    return [text[: block.start()].count("\n") + 1 for block in run if missing_names(block[2])]


def test_blocks_run_when_copied_alone_or_the_page_says_that_they_do_not() -> None:
    pages = {path: path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    assert {str(path): lines for path, text in pages.items() if CONTINUE not in text and (lines := alone(text))} == {}
    assert all(alone(text) for text in pages.values() if CONTINUE in text)
    assert alone("```python\nimport os\nprint(os.sep, x)\n```\n") == [1]
