"""One word for one thing: names of files, classes and commands use the words of the glossary.

Words that they replace are listed here.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator

import pytest

from putget_bench.parser import build_parser
from tests.project.checkout import ROOT, python_files

GLOSSARY = (ROOT / "docs" / "concepts" / "glossary.md").read_text()
# A word that is not used, and the glossary's word for the thing.
INSTEAD_OF = {"node": "domain", "nodes": "domain", "shm": "host"}
# Hosts of the planner, whose name is DeepSeek's.
ALLOWED = {
    "native/balancer/node.cpp",
    "native/balancer/node.h",
}


def words(name: str) -> list[str]:
    """`NodesPlan`, `run_nodes.py` and `--num-nodes` as lists of small words."""
    return re.findall(r"[a-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


def wrong(names: Iterator[str] | list[str]) -> list[str]:
    return [name for name in names if set(words(name)) & INSTEAD_OF.keys()]


def commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Names of commands, and the choices of their positional arguments."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield name
                yield from commands(below)
        elif action.choices is not None:
            yield from map(str, action.choices)


def test_files_have_the_glossarys_words() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    paths = [path for path in listed.stdout.split() if not path.startswith(("lab/", "benchmarks/results/"))]
    assert sorted(wrong(paths)) == sorted(ALLOWED)


def test_classes_and_commands_have_them() -> None:
    classes = [
        node.name
        for folder in ("python", "transfer/python", "benchmarks")
        for path in python_files(ROOT / folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) > 100
    assert wrong(classes) == []
    found = list(commands(build_parser()))
    assert "simulate" in found
    assert "host" in found
    assert wrong(found) == []


def test_the_glossary_has_the_words() -> None:
    terms = {
        term.strip(" `") for row in re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE) for term in row.split(",")
    }
    assert terms >= {*INSTEAD_OF.values(), "return inbox", "backend", "landing area", "chunk"}


def test_a_wrong_name_is_found() -> None:
    assert wrong(["NodesPlan", "python/run_nodes.py", "--num-nodes", "shm"]) == [
        "NodesPlan",
        "python/run_nodes.py",
        "--num-nodes",
        "shm",
    ]
    assert wrong(["Domains", "anode", "cathodes"]) == []
