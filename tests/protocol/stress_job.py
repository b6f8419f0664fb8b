"""Builds a program of tests/native with a sanitizer and runs it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.protocol.tags import ROOT

SOURCES = ROOT / "tests" / "native"
# Exit statuses: a wrong byte, a deadline or misuse, threads that a GPU would hang with, the sanitizer's.
MISMATCH, FAULT, STUCK, REPORT = 3, 4, 5, 66
OPTIONS = dict.fromkeys(("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS"), f"halt_on_error=1 exitcode={REPORT}")


class StressJob:
    """The stress job under one sanitizer; skips the test where the machine cannot build or run it.

    Args:
        sanitizer: For the compiler's -fsanitize.
        folder: An empty one to build in.
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
        self._sanitizer = sanitizer
        self._defines = ["-DPUTGET_STRESS"]
        self._defines += ["-DPUTGET_STRESS_CTAS"] if ctas else []
        self._defines += ["-DPUTGET_STRESS_WHOLE_CHUNKS"] if whole_chunks else []
        # A mistake takes less time to run than to compile.
        self._optimise = "-O1" if mistake is None else "-O0"
        # What is emulated stands in for what only a GPU's compiler takes, so it is looked for first.
        self._folders = [SOURCES / "emulated", SOURCES]
        self._native = ROOT / "native"
        if mistake is not None:
            self._native = folder / "native"
            shutil.copytree(ROOT / "native", self._native)
            name, right, wrong = mistake
            text = (self._native / name).read_text()
            assert text.count(right) == 1, f"{name} does not say once: {right}"
            (self._native / name).write_text(text.replace(right, wrong))
        probe = folder / "probe.cpp"
        probe.write_text("int main() { return 0; }\n")
        built = self._build(folder / "probe", probe)
        if built.returncode != 0:
            pytest.skip(f"the C++ compiler cannot build with -fsanitize={sanitizer}: {built.stderr[-200:]}")
        self._prefix = self._working_prefix(folder / "probe")
        self._program = folder / "stress"
        built = self._build(self._program, SOURCES / source)
        assert built.returncode == 0, built.stderr

    def _build(self, target: Path, source: Path) -> subprocess.CompletedProcess[str]:
        compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
        options = ["-std=c++17", self._optimise, "-g", "-pthread", *self._defines]
        options += [f"-I{folder}" for folder in (*self._folders, self._native, self._native / "include")]
        sanitize = [f"-fsanitize={self._sanitizer}", "-fno-sanitize-recover=all"]
        return subprocess.run(
            [compiler, *options, *sanitize, "-o", str(target), str(source)], capture_output=True, text=True, timeout=120
        )

    @staticmethod
    def _working_prefix(program: Path) -> list[str]:
        """How such programs start here: some kernels randomise addresses more than a sanitizer can bear."""
        for prefix in ([], ["setarch", platform.machine(), "-R"]):
            if prefix and shutil.which(prefix[0]) is None:
                continue
            if subprocess.run([*prefix, program], capture_output=True, timeout=60).returncode == 0:
                return prefix
        pytest.skip("programs with this sanitizer do not run on this kernel")

    def __call__(self, *options: object) -> subprocess.CompletedProcess[str]:
        """Runs it to its end."""
        return subprocess.run(
            [*self._prefix, str(self._program), *map(str, options)],
            env={**os.environ, **OPTIONS},
            capture_output=True,
            text=True,
            timeout=120,
        )
