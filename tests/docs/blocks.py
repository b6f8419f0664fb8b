"""The code blocks of the documentation's pages, as tests run them.

A page's blocks run in their order, in one namespace and one empty folder:

- ``python``: runs. With ``title="layer.py"`` it becomes that file instead, for a later ``console`` block.
- ``text title="Output"`` behind a ``python`` block: what that block prints.
- ``console``: a line that begins with "$ " is a command and must succeed; each other line must be among its output.
  "..." stands for any text, in both kinds of output.

A comment in front of a block changes that: ``<!-- needs: gpu -->`` (or a module's name) skips it where that is not
here, ``<!-- skip: reason -->`` always, and ``<!-- tested: tests/x.py -->`` names the test that runs it instead.
``<!-- setup ... -->`` holds Python that runs and is not shown. A file that a page includes (``--8<--``) is part of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from markdown_it import MarkdownIt

from tests.harness import warm
from tests.project.checkout import ROOT

DOCS = ROOT / "docs"
_MARK = re.compile(r"<!--\s*(needs|skip|tested):\s*(.*?)\s*-->")
_SETUP = re.compile(r"<!-- setup\n(.*?)-->", re.DOTALL)
_SNIPPET = re.compile(r'^--8<-- "(.*)"$', re.MULTILINE)
_RUN = ("python", "console")


@dataclass(frozen=True)
class Block:
    """One block: its language, its text and where it stands; what is to be printed; what stands in front of it."""

    language: str
    text: str
    line: int
    title: str = ""
    output: str | None = None
    marks: tuple[tuple[str, str], ...] = ()

    def why_not(self) -> str | None:
        """The reason why it does not run here."""
        for kind, words in self.marks:
            if kind == "skip":
                return words
            if kind == "tested":
                return f"{words} runs it"
            if words == "gpu":
                if not torch.cuda.is_available():
                    return "needs a CUDA GPU"
            elif importlib.util.find_spec(words) is None:
                return f"needs {words}"
        if self.language == "console":
            for command in self.commands():
                if command[0] != "python" and shutil.which(command[0], path=_environment()["PATH"]) is None:
                    return f"needs the command {command[0]}"
        return None

    def commands(self) -> list[list[str]]:
        """The commands of a console block."""
        return [shlex.split(line[2:], comments=True) for line in self.text.splitlines() if line.startswith("$ ")]


def with_includes(text: str) -> str:
    """A page's text with the files that it includes."""
    return _SNIPPET.sub(lambda found: (ROOT / found[1]).read_text().rstrip(), text)


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page that run, in its order. Their lines count those of the files that it includes."""
    found: list[Block] = []
    marks: list[tuple[str, str]] = []
    for token in MarkdownIt().parse(with_includes(text)):
        if token.type == "html_block":
            marks += _MARK.findall(token.content)
            found += [Block("python", code, token.map[0] + 1) for code in _SETUP.findall(token.content) if token.map]
        if token.type != "fence" or token.map is None:
            continue
        language = token.info.split(" ")[0]
        title = "".join(re.findall(r'title="(.*?)"', token.info))
        if language == "text" and title == "Output":
            last = found.pop()
            found.append(Block(last.language, last.text, last.line, last.title, token.content, last.marks))
        elif language in _RUN:
            found.append(Block(language, token.content, token.map[0] + 1, title, None, tuple(marks)))
        marks = []
    return found


def _environment() -> dict[str, str]:
    """Environment of commands: this Python's first, this checkout's package, no network but the own host's."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    paths = os.pathsep.join(filter(None, (str(ROOT / "python"), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PATH": path, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _warm(command: list[str]) -> list[str]:
    """The command, by a Python that has imported torch."""
    modules = {"putget": "putget", "torchrun": "torch.distributed.run"}
    if command[0] in modules:
        return [warm.python(), "-m", modules[command[0]], *command[1:]]
    return [warm.python() if word == "python" else word for word in command]


def _pattern(line: str) -> str:
    """A line of a page, in which "..." stands for any text and blanks for blanks."""
    words = [r"\s+".join(map(re.escape, part.split(" "))) for part in line.strip().split("...")]
    return ".*".join(words)


def require_lines(wanted: str, printed: str) -> None:
    """Each line that the page shows is one that was printed. Ranks print in any order.

    Raises:
        AssertionError: One is not.
    """
    lines = [line.strip() for line in printed.splitlines()]
    for line in filter(str.strip, wanted.splitlines()):
        assert any(re.fullmatch(_pattern(line), one) for one in lines), f"not printed: {line!r}; printed:\n{printed}"


@dataclass
class Page:
    """A page whose blocks run one after the other; asked for one, it runs those before it too, once."""

    path: Path
    folder: Path
    blocks: list[Block]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__docs__"})
    done: int = 0

    def run(self, index: int) -> None:
        """Runs the blocks up to this one, but for those that cannot run here."""
        while self.done <= index:
            block = self.blocks[self.done]
            self.done += 1
            if block.why_not() is None:
                self._run(block)

    def _run(self, block: Block) -> None:
        if block.language == "console":
            self._run_commands(block)
            return
        if block.title:
            (self.folder / block.title).write_text(block.text)
            return
        code = compile("\n" * block.line + block.text, str(self.path), "exec", dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, self.names)
        if block.output is not None:
            require_lines(block.output, printed.getvalue())

    def _run_program(self, name: str, *arguments: str) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", [name, *arguments]):
            runpy.run_path(str(self.folder / name), run_name="__main__")
        return printed.getvalue()

    def _run_commands(self, block: Block) -> None:
        printed = []
        for command in block.commands():
            if command[0] == "python" and command[1].endswith(".py"):  # here: to import torch takes seconds
                printed.append(self._run_program(*command[1:]))
                continue
            result = subprocess.run(
                _warm(command),
                cwd=self.folder,
                env=_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=200,
                check=False,
            )
            assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout}"
            printed.append(result.stdout)
        wanted = "\n".join(line for line in block.text.splitlines() if not line.startswith("$ "))
        require_lines(wanted, "\n".join(printed))
