"""The command itself: its version, its help, and where a wrong flag points."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import putget
from putget_bench import cli
from tests.project.checkout import ROOT


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"putget {putget.__version__}\n"


def test_bare_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert "usage: putget" in printed
    assert "what this machine can do" in printed


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("--wrong", "putget"),
        ("bench --ep_sizes 4", "putget bench"),
        ("balance plan --routing_file x.npz --ep_size 2 --wrong", "putget balance plan"),
        ("bench --quant wrong", "putget bench"),
        ("wrong", "putget"),
    ],
)
def test_a_wrong_flag_points_to_its_commands_help(words: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"{command}: error: ")
    assert words.split()[-1] in said[0] or "--ep_sizes" in said[0]
    assert said[-1] == f"Try '{command} --help'."


BARE = """
import sys
for name in ("rich", "matplotlib", "jsonschema", "yaml"):
    sys.modules[name] = None
from putget_bench import cli
sys.exit(cli.main(["doctor"]))
"""


def test_doctor_in_a_bare_install() -> None:
    """No package of the extra `bench` is there."""
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["area", "what", "status", "found"]
    assert any(line.split()[:3] == ["putget", "version", "ok"] for line in lines)
    assert any(line.startswith("CPU ranks: yes.") for line in lines)


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"]])
def test_output_that_nobody_reads_ends_without_a_traceback(words: list[str]) -> None:
    """`putget doctor | head -1` is such a call."""
    read, write = os.pipe()
    os.close(read)
    code = f"import sys; from putget_bench import cli; sys.exit(cli.main({words!r}))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1
