"""Running a program in an engine's own environment, which `make test-engines` builds under build/engines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import putget
from tests.harness import warm

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "build" / "engines"

HAS_TRANSFER = any((ROOT / "transfer" / "python" / "putget_transfer").glob("_native*.so"))
needs_transfer = pytest.mark.skipif(not HAS_TRANSFER, reason="putget_transfer is not built: see `make transfer`")
PRELOADS = {name: f"tests.engines.preload_{name}" for name in ("transformers", "vllm")}
"""To import an engine takes long: once for all its tests."""
LIMIT_S = 1200  # two idle cores take a tenth of it
only_with_engines = [
    pytest.mark.skipif(
        "PUTGET_TEST_ENGINES" not in os.environ, reason="runs the engines themselves: make test-engines"
    ),
    pytest.mark.timeout(LIMIT_S + 60),
]


def python_of(engine: str) -> Path:
    """The engine's Python; the test skips, with the reason, if its packages could not be had."""
    absent = ENGINES / f"{engine}.absent"
    if absent.exists():
        pytest.skip(f"{engine} could not be installed: {absent.read_text().strip()[-300:]}")
    return ENGINES / engine / "bin" / "python"


def start(engine: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """The engine's Python with these arguments, in a session of its own."""
    paths = (ROOT, ROOT / "python", ROOT / "transfer" / "python", ROOT / "tests" / "engines" / "stubs" / engine)
    settings = {
        **os.environ,
        "PYTHONPATH": ":".join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PUTGET_ENGINE_TIMEOUT_S": "120",  # beside other work a rank may get no core for long
        **environment,
    }
    python = str(python_of(engine))
    if engine in PRELOADS:
        python = warm.python(python, PRELOADS[engine], **settings)
    return subprocess.Popen(
        [python, *map(str, arguments)],
        cwd=ROOT,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output_of(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The output until the end; then its whole session is ended, so that no worker stays."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{process.args} did not end in {timeout_s} s:\n{output[-6000:]}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return output


def run(engine: str, *arguments: object, timeout_s: float = LIMIT_S, **environment: str) -> str:
    """The output of the engine's Python for these arguments; it must succeed."""
    process = start(engine, *arguments, **environment)
    output = output_of(process, timeout_s)
    assert process.returncode == 0, f"{output.splitlines()[-1:]} at the end of:\n{output[-8000:]}"
    return output


@dataclass
class Outcome:
    """The output of a case, on one rank or on several, and the log of its processes."""

    files: list[Path]
    log: str

    def tokens(self) -> dict[str, list[int]]:
        """The tokens of each request, of all ranks together."""
        found: dict[str, list[int]] = {}
        for file in self.files:
            found.update(json.loads(file.read_text())["tokens"])
        return found

    def said(self) -> str:
        """The lines of putget's logger."""
        return "\n".join(line for line in self.log.splitlines() if "mixture-of-experts layers" in line)

    def carried(self, num_experts: int, num_ranks: int, where: str = "") -> bool:
        """Whether each rank said once that putget carries its layers; `where` behind the number of ranks."""
        lines = self.said().splitlines()
        told = f"putget {putget.__version__} carries dispatch and combine of the mixture-of-experts layers"
        told += f": {num_experts} experts on {num_ranks} ranks{where}, on cpu"
        return len(lines) == num_ranks and all(told in line for line in lines)


def run_cases(engine: str, folder: Path, cases: Sequence[str], environment: dict[str, str]) -> dict[str, Outcome]:
    """Runs an engine's program for these cases, one after the other."""
    log = run(
        engine,
        "-m",
        f"tests.engines.generate_{engine}",
        folder,
        *cases,
        timeout_s=LIMIT_S,
        PUTGET_ENGINES="1",
        **environment,
    )
    (folder / "log").write_text(log)
    names = "|".join(re.escape(case) for case in cases)
    _, *parts = re.split(rf"^=== ({names})", log, flags=re.MULTILINE)
    return {
        case: Outcome(sorted(folder.glob(f"{case}*")), said) for case, said in zip(parts[::2], parts[1::2], strict=True)
    }
