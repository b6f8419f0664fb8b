"""The protocol text under ThreadSanitizer: clean as it is, caught once one order is weakened or one wait is skipped.

The job is tests/native/stress.cpp. The mutations come from the tags in native/protocol, so that a new publish or
observe is tried without a line here.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.protocol import tags

MISMATCH, FAULT, RACE = 3, 4, 66
SEEDS = (1, 2, 3)
Job = Callable[..., subprocess.CompletedProcess[str]]


def build(target: Path, source: Path) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    options = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-DPUTGET_STRESS", "-pthread"]
    return subprocess.run(
        [compiler, *options, f"-I{tags.ROOT / 'native'}", "-o", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """How a program with ThreadSanitizer is started here: some kernels randomise addresses more than it can bear."""
    folder = tmp_path_factory.mktemp("probe")
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    built = build(folder / "probe", source)
    if built.returncode != 0:
        pytest.skip(f"the C++ compiler cannot build with -fsanitize=thread: {built.stderr[-200:]}")
    for command in ([], ["setarch", platform.machine(), "-R"]):
        if command and shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, folder / "probe"], capture_output=True, timeout=60).returncode == 0:
            return command
    pytest.skip("programs with ThreadSanitizer do not run on this kernel")


@pytest.fixture(scope="module")
def job(prefix: list[str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Runs the stress job with the given options."""
    program = tmp_path_factory.mktemp("stress") / "stress"
    built = build(program, tags.ROOT / "tests" / "native" / "stress.cpp")
    assert built.returncode == 0, built.stderr

    def run(*options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, str(program), *map(str, options)],
            env={**os.environ, "TSAN_OPTIONS": f"halt_on_error=1 exitcode={RACE}"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("objects", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_protocol_is_clean(job: Job, ranks: int, objects: int, seed: int) -> None:
    done = job("--ranks", ranks, "--rounds", 300, "--objects", objects, "--seed", seed)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tag", tags.enumerators("Tag"))
def test_a_weakened_order_is_caught(job: Job, tag: str) -> None:
    caught = [job("--rounds", 300, "--objects", 2, "--seed", seed, "--weaken", tag).returncode for seed in SEEDS]
    assert set(caught) <= {0, RACE}
    assert RACE in caught, f"{tag} is as good without its order: nothing depends on it, or nothing checks it"


@pytest.mark.parametrize("tag", sorted(tags.observed()))
def test_a_skipped_wait_is_caught(job: Job, tag: str) -> None:
    for seed in SEEDS:
        done = job("--rounds", 300, "--objects", 2, "--seed", seed, "--timeout", 2, "--skip", tag)
        assert done.returncode in {0, MISMATCH, FAULT, RACE}, done.stderr
        if done.returncode != 0:
            return
    pytest.fail(f"{tag} need not be waited for: nothing depends on it, or nothing checks it")


def test_an_unknown_tag_is_refused(job: Job) -> None:
    assert job("--weaken", "Z9").returncode == 2
