"""The planner and the choice of replicas under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.project.checkout import NATIVE, ROOT


def test_random_cases_touch_nothing_that_is_not_theirs(tmp_path: Path) -> None:
    program = tmp_path / "planner"
    sources = [ROOT / "tests" / "native" / "planner.cpp", *sorted((NATIVE / "balancer").glob("*.cpp"))]
    sources.append(NATIVE / "cpu" / "balancer.cpp")
    options = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-D_GLIBCXX_ASSERTIONS"]
    options += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{NATIVE}", f"-I{NATIVE / 'include'}"]
    command = [os.environ.get("CXX", "c++"), *options, *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True, timeout=200)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "3000 cases\n"), done.stdout + done.stderr
