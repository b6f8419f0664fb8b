"""Builds a program of tests/native with a sanitizer and runs it."""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.protocol.tags import ROOT

SOURCES = ROOT / "tests" / "native"
# Exit statuses: a wrong byte, a deadline or misuse, threads that a GPU would hang with, the sanitizer's.
MISMATCH, FAULT, STUCK, REPORT = 3, 4, 5, 66
# A line for each access of a race: "race: payload: read of 4 bytes".
RACE = re.compile(r"^race: (\w+): ", re.MULTILINE)
OPTIONS = dict.fromkeys(("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS"), f"halt_on_error=1 exitcode={REPORT}")

EVERY_KIND = "0123"
LIMIT_S = 400.0  # for a compilation, or a run: both take seconds, but beside other work of a whole check more

# Runs that must be clean have these. A mutation has its own, and tries one after the other.
SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 9)))

# How a job is compiled that must be clean: a report names lines. A mistake takes less time to run than to compile.
CLEAN, MISTAKEN = ("-O1", "-g1"), ("-O0",)


@dataclass(frozen=True)
class Rounds:
    """Runs of the job without a mutation, which must all be clean: whatever the seed, whatever else the machine does.

    Attributes:
        ctas: Kernels are CTAs as on a GPU.
        rounds: Of each run.
        objects: Kinds of objects (tests/native/stress_plan.h), a digit each.
        sizes: Ranks, and blocks of a kernel.
    """

    ctas: bool
    rounds: int
    objects: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]

    def options(self, ranks: int, blocks: int, objects: str, seed: int) -> tuple[object, ...]:
        """Options of one run."""
        sizes = ("--ranks", ranks, "--blocks", blocks, "--rounds", self.rounds)
        return *sizes, "--objects", objects, "--seed", seed


BLOCK_ROUNDS = Rounds(False, 200, ("0", "23", EVERY_KIND), ((1, 1), (2, 1), (3, 1), (5, 1), (1, 3), (3, 2), (2, 4)))
CTA_ROUNDS = Rounds(True, 40, ("0", "1", "2", "3", EVERY_KIND), ((1, 2), (2, 1), (3, 2), (5, 1)))


def compile_job(
    target: Path,
    source: str | Path,
    sanitizer: str,
    ctas: bool = False,
    native: Path = ROOT / "native",
    extra: tuple[str, ...] = CLEAN,
) -> subprocess.CompletedProcess[str]:
    """Compiles a program of tests/native with a sanitizer; see StressJob."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    options = ["-std=c++17", "-pthread", "-DPUTGET_STRESS", *(["-DPUTGET_STRESS_CTAS"] if ctas else []), *extra]
    # Emulated headers stand in for those that only a GPU's compiler takes, so they are looked for first.
    options += [f"-I{folder}" for folder in (SOURCES / "emulated", SOURCES, native, native / "include")]
    sanitize = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    return subprocess.run(
        [compiler, *options, *sanitize, "-o", str(target), str(SOURCES / source)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def objects_of(sources: tuple[Path, ...], folder: Path, sanitizer: str) -> list[Path]:
    """Compiles sources that are linked later, by compiled_program; skips the test where the machine cannot."""
    prefix_of(sanitizer)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: _object_of(source, folder / f"{source.stem}.o", sanitizer), sources))


def _object_of(source: Path, target: Path, sanitizer: str) -> Path:
    built = compile_job(target, source, sanitizer, extra=(*CLEAN, "-c"))
    assert built.returncode == 0, built.stderr
    return target


def compiled_program(parts: list[Path], more: list[Path], folder: Path, sanitizer: str) -> Path:
    """Links objects of objects_of."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    target = folder / "program"
    command = [compiler, "-pthread", f"-fsanitize={sanitizer}", "-o", target, *parts, *more]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    return target


@functools.lru_cache
def prefix_of(sanitizer: str) -> tuple[str, ...]:
    """How programs with a sanitizer start here: some kernels randomise addresses more than it can bear.

    Skips the test where the machine cannot build or run them.
    """
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cpp"
        probe.write_text("int main() { return 0; }\n")
        program = probe.with_suffix("")
        built = compile_job(program, probe, sanitizer)
        if built.returncode != 0:
            pytest.skip(f"the C++ compiler cannot build with -fsanitize={sanitizer}: {built.stderr[-200:]}")
        for prefix in ((), ("setarch", platform.machine(), "-R")):
            if prefix and shutil.which(prefix[0]) is None:
                continue
            if subprocess.run([*prefix, program], capture_output=True, timeout=60).returncode == 0:
                return prefix
    pytest.skip("programs with this sanitizer do not run on this kernel")


def shared_job(factory: pytest.TempPathFactory, sanitizer: str, ctas: bool = False) -> StressJob:
    """The stress job without a mistake, compiled once for all files of tests and all workers of pytest-xdist."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / f"stress_{sanitizer.replace(',', '_')}_{'ctas' if ctas else 'blocks'}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return StressJob(sanitizer, folder, ctas=ctas)


class StressJob:
    """The stress job under one sanitizer; skips the test where the machine cannot build or run it.

    Args:
        sanitizer: For the compiler's -fsanitize.
        folder: To build in. A program that is there already is not built again.
        mistake: (file below native, what stands there, what shall stand there instead), or None.
        source: Which program.
        ctas: Kernels are CTAs as on a GPU (tests/native/emulated), instead of blocks of one thread.
        whole_chunks: A chunk has as many tokens as on a GPU.
    """

    def __init__(
        self,
        sanitizer: str,
        folder: Path,
        mistake: tuple[str, str, str] | None = None,
        source: str = "stress.cpp",
        ctas: bool = False,
        whole_chunks: bool = False,
    ) -> None:
        native = ROOT / "native"
        if mistake is not None:
            native = folder / "native"
            shutil.copytree(ROOT / "native", native)
            name, right, wrong = mistake
            text = (native / name).read_text()
            assert text.count(right) == 1, f"{name} does not say once: {right}"
            (native / name).write_text(text.replace(right, wrong))
        self._prefix = prefix_of(sanitizer)
        self._program = folder / "stress"
        extra = CLEAN if mistake is None else MISTAKEN
        extra += ("-DPUTGET_STRESS_WHOLE_CHUNKS",) if whole_chunks else ()
        if not self._program.exists():
            built = compile_job(self._program, source, sanitizer, ctas=ctas, native=native, extra=extra)
            assert built.returncode == 0, built.stderr

    def __call__(self, *options: object) -> subprocess.CompletedProcess[str]:
        """Runs it to its end."""
        return subprocess.run(
            [*self._prefix, str(self._program), *map(str, options)],
            env={**os.environ, **OPTIONS},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )


def is_caught(done: subprocess.CompletedProcess[str], places: set[str]) -> bool:
    """Whether a run with a mutation fails because of it.

    A wrong byte, a deadline, threads that wait forever and a wild address are the mutation's, since runs without one
    have none. A race counts only at one of `places`, where the mutation breaks an order (tests/native/race_places.h
    names them): any other report would say nothing about the mutation.
    """
    assert done.returncode in {0, MISMATCH, FAULT, STUCK, REPORT}, done.stderr
    if done.returncode == REPORT and "DEADLYSIGNAL" not in done.stderr:
        return bool(places & set(RACE.findall(done.stderr)))
    return done.returncode != 0
