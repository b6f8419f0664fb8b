"""The threads of a CPU rank (native/team.h), as they are and under ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.protocol.tags import ROOT


@pytest.mark.parametrize("options", [["-O2"], ["-O1", "-g", "-fsanitize=thread"]], ids=["plain", "tsan"])
def test_every_block_runs_once_in_each_call(options: list[str], tmp_path: Path) -> None:
    program, source = tmp_path / "team", ROOT / "tests" / "native" / "team.cpp"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", *options, "-pthread"]
    command += [f"-I{ROOT / 'native'}", f"-I{ROOT / 'native' / 'include'}"]
    subprocess.run([*command, "-o", str(program), str(source)], check=True, timeout=400)
    done = subprocess.run([str(program), "2000"], capture_output=True, text=True, timeout=400, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr[-4000:]
