"""Tests of a text that has not changed are skipped (tests/harness/proofs.py), and run again once it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import proofs
from tests.protocol.stress_job import SOURCES
from tests.protocol.tags import ROOT

HARNESS = Path(proofs.__file__).parent
CONFTEST = """
import sys
from pathlib import Path

sys.path.insert(0, "@HARNESS@")  # the module alone: the package imports torch
import proofs

HERE = Path(__file__).parent

def pytest_addoption(parser):
    parser.addoption("--prove", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "proved: of a text")
    if config.option.prove:
        config.pluginmanager.register(proofs.Recorder(HERE / "proofs.json"))

def pytest_collection_modifyitems(config, items):
    proofs.heed(items, config.option.prove, HERE / "proofs.json", HERE)
"""
TESTS = """
from pathlib import Path
import pytest
from proofs import proved_by

TEXT = Path(__file__).with_name("text")

@proved_by("text")
@pytest.mark.parametrize("line", [0, 1])
def test_lines(line):
    assert TEXT.read_text().split()[line] == "right"

@proved_by("text")
def test_the_first():
    assert TEXT.read_text().startswith("right")

def test_nothing():
    pass
"""
LUCK = """    assert TEXT.with_name("luck").exists()
"""
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("PYTEST")},
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in (
        ("conftest.py", CONFTEST.replace("@HARNESS@", str(HARNESS))),
        ("test_text.py", TESTS),
        ("text", "right right"),
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


def outcomes(checkout: Path, *options: str) -> dict[str, str]:
    """Runs pytest there; what became of each test, by name."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(checkout), *options]
    done = subprocess.run(command, cwd=checkout, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("test_text.py::")]
    found = {words[0].partition("::")[2]: words[1] for words in lines}
    assert len(found) == 4, done.stdout + done.stderr
    return found


def test_a_test_runs_until_its_text_is_proved_and_again_once_it_has_changed(checkout: Path) -> None:
    proved = ("test_lines[0]", "test_lines[1]", "test_the_first")
    assert {*outcomes(checkout).values()} == {"PASSED"}
    assert {*outcomes(checkout, "--prove").values()} == {"PASSED"}
    assert outcomes(checkout) == {**dict.fromkeys(proved, "SKIPPED"), "test_nothing": "PASSED"}
    assert {*outcomes(checkout, "--prove").values()} == {"PASSED"}, "all run where they are asked for"

    (checkout / "text").write_text("right wrong")
    assert outcomes(checkout, "--prove")["test_lines[1]"] == "FAILED"
    after = outcomes(checkout)
    assert (after["test_lines[0]"], after["test_lines[1]"], after["test_the_first"]) == ("PASSED", "FAILED", "SKIPPED")
    assert set(json.loads((checkout / "proofs.json").read_text())) == {
        "test_text.py::test_lines",
        "test_text.py::test_the_first",
    }

    (checkout / "text").write_text("right right")
    assert outcomes(checkout)["test_lines[1]"] == "SKIPPED", "the text is the proved one again"


def test_some_of_a_functions_tests_prove_nothing(checkout: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--prove", "-k", "test_lines and 0", "--rootdir", str(checkout)]
    subprocess.run(command, cwd=checkout, env=ENVIRONMENT, check=True, timeout=120)
    assert json.loads((checkout / "proofs.json").read_text()) == {}


def test_a_proof_that_fails_with_the_same_text_is_none_any_more(checkout: Path) -> None:
    luck = checkout / "luck"
    (checkout / "test_text.py").write_text(
        TESTS.replace("    assert TEXT.read_text().startswith", LUCK + "    assert TEXT.read_text().startswith")
    )
    luck.touch()
    outcomes(checkout, "--prove")
    luck.unlink()
    assert outcomes(checkout, "--prove")["test_the_first"] == "FAILED"
    after = outcomes(checkout)
    assert (after["test_lines[0]"], after["test_the_first"]) == ("SKIPPED", "FAILED")


def test_the_test_itself_is_a_part_of_its_text(checkout: Path) -> None:
    outcomes(checkout, "--prove")
    (checkout / "test_text.py").write_text(TESTS.replace("[0, 1]", "[1, 0]"))
    assert {*outcomes(checkout).values()} == {"PASSED"}


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="native/gone is not there"):
        proofs.digest_of(("native/gone",), tmp_path)


@pytest.mark.parametrize("ctas", [False, True])
def test_the_text_of_the_protocol_has_all_that_its_jobs_include(ctas: bool) -> None:
    compiler = os.environ.get("CXX", "c++")
    folders = (SOURCES / "emulated", SOURCES, ROOT / "native", ROOT / "native" / "include")
    names = (
        ("stress", "ctas", "choice") if ctas else ("stress", "halves", "routing", "domains_rounds", "domains_threads")
    )
    command = [compiler, "-std=c++17", "-MM", "-DPUTGET_STRESS", *(["-DPUTGET_STRESS_CTAS"] if ctas else [])]
    command += [*(f"-I{folder}" for folder in folders), *(str(SOURCES / f"{name}.cpp") for name in names)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    files = {Path(word).resolve() for word in done.stdout.split() if word.startswith("/")}
    known = [ROOT / path for path in proofs.PROTOCOL_TEXT]
    assert {file for file in files if not any(file.is_relative_to(place) for place in known)} == set()
    assert len(files) > 30, done.stdout
