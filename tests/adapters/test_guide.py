"""The guide's code: every block is Python, and every name that it imports from putget is there."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from tests.project.checkout import ROOT

GUIDE = (ROOT / "docs" / "guide" / "adapters.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_names_are_there(block: str) -> None:
    imports = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom | ast.Import)]
    for node in imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
            continue
        assert node.module is not None
        for alias in node.names:
            module = importlib.import_module(node.module)
            assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


def test_versions_are_the_pinned_ones() -> None:
    pins = (ROOT / "tests" / "adapters" / "upstream.toml").read_text()
    for version in re.findall(r"== ?\"?([0-9.]+?)(?:\.post\d+)?\"", pins):
        assert f"| {version} |" in GUIDE, version


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert (ROOT / "docs" / "guide" / target).exists(), target
