"""The reference pages are complete: public names, errors, environment variables, commands, engines' versions."""

from __future__ import annotations

import re

import pytest

import putget.balancer
from putget import config, errors
from putget_bench import cli
from tests.project.checkout import BENCH, NATIVE, PACKAGE, ROOT, pyproject

REFERENCE = ROOT / "docs" / "reference"


def page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


@pytest.mark.parametrize("name", [name for name in putget.__all__ if not name.startswith("__")])
def test_public_names_are_on_a_page(name: str) -> None:
    if hasattr(errors, name):
        assert f"| `{name}` |" in page("errors") or name == "PutgetError"
    else:
        assert f"::: putget.{name}\n" in page("python")


def test_every_error_of_the_package_is_on_the_page() -> None:
    """Also one whose class has no public name: a traceback shows it."""
    defined = re.compile(r"^class ([A-Z]\w+)\((?:\w+Error|PeerTimeout|Exception)\b", re.MULTILINE)
    names = {name for path in PACKAGE.rglob("*.py") for name in defined.findall(path.read_text())}
    assert {"Disagreement", "PeerLeft", "BackendUnavailable"} <= names
    assert not [name for name in names - {"PutgetError"} if f"| `{name}` |" not in page("errors")]


@pytest.mark.parametrize("name", putget.balancer.__all__)
def test_public_names_of_the_balancer_are_on_the_page(name: str) -> None:
    assert f"::: putget.balancer.{name}\n" in page("python_balancer")


def test_environment_variables_are_on_the_page() -> None:
    text = (PACKAGE / "config.py").read_text()
    names = set(re.findall(r'"([A-Z][A-Z_]+)"', text))
    assert {"PUTGET_LIBRARY", "PUTGET_COMMIT", "LOCAL_RANK"} <= names
    assert config.library_override.__doc__
    assert not [name for name in names if f"`{name}`" not in page("environment")]


def test_commands_are_on_the_page() -> None:
    source = (BENCH / "parser.py").read_text()
    commands = re.findall(r'add_parser\(\s*"(\w+)"', source)
    assert cli.main
    assert len(commands) >= 5
    assert not [name for name in commands if f"[`putget {name}`](#{name})" not in page("command_line")]


def test_functions_of_the_c_interface_are_on_the_page() -> None:
    """All that a caller needs for a round: the page's table names functions that there are."""
    header = (NATIVE / "include" / "putget.h").read_text()
    named = set(re.findall(r"`(putget_\w+)(?:\(\))?`", page("putget_h")))
    assert len(named) >= 12
    assert not [name for name in named if f"{name}(" not in header]


def test_functions_around_a_round_are_on_the_page() -> None:
    header = (NATIVE / "include" / "putget_moe.h").read_text()
    named = set(re.findall(r"`(putget_\w+)`", page("putget_moe_h")))
    assert named == set(re.findall(r"^PUTGET_API \w+ (putget_\w+)\(", header, re.MULTILINE))


def test_functions_of_the_balancers_c_interface_are_on_the_page() -> None:
    header = (NATIVE / "include" / "putget_balancer.h").read_text()
    named = set(re.findall(r"`(putget_\w+)`", page("putget_balancer_h")))
    assert named == set(re.findall(r"^PUTGET_API \w+ (putget_\w+)\(", header, re.MULTILINE))


def test_functions_of_rounds_across_domains_are_on_the_page() -> None:
    header = (NATIVE / "include" / "putget_domains.h").read_text()
    named = set(re.findall(r"`(putget_(?:network|domains)_\w+)`", page("putget_domains_h")))
    assert named == set(re.findall(r"^PUTGET_API \w+ (putget_\w+)\(", header, re.MULTILINE))


def test_support_matrix_names_the_pinned_versions() -> None:
    text = page("support")
    pins = (ROOT / "tests" / "adapters" / "upstream.toml").read_text()
    for version in re.findall(r"== ?\"?([0-9.]+?)(?:\.post\d+)?\"", pins):
        assert version in text, version
    project = pyproject()["project"]
    assert f"{project['requires-python'].removeprefix('>=')} and later" in text
    (torch,) = (need for need in project["dependencies"] if need.startswith("torch"))
    assert f"{torch.removeprefix('torch>=')} and later" in text
