"""The litmus program: built once, run on one GPU and on more; no ordering that the protocol relies on is violated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).with_name("litmus")
# GPUs, and ranks on them: more ranks than GPUs share one. The last fleet is all that this machine has.
ALL = max(torch.cuda.device_count(), 2)
FLEETS = sorted({(1, 2), (2, 2), (2, 4), (ALL, ALL)})


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program; PUTGET_LITMUS names one that is there already."""
    ready = os.environ.get("PUTGET_LITMUS")
    if ready is not None:
        return Path(ready)
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs CMake")
    build = tmp_path_factory.mktemp("litmus")
    for command in ([cmake, "-S", str(SOURCE), "-B", str(build)], [cmake, "--build", str(build), "-j"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "litmus"


def run(program: Path, gpus: int, ranks: int) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [str(program), "--gpus", str(gpus), "--ranks", str(ranks)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["test"]: line for line in lines}


@pytest.mark.parametrize(("gpus", "ranks"), FLEETS, ids=lambda number: str(number))
def test_no_ordering_is_violated(program: Path, gpus: int, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    lines = run(program, gpus, ranks)
    assert len(lines) > 10
    with capsys.disabled():
        broken = ", ".join(
            f"{name} {line['violations']}" for name, line in lines.items() if line["expect_violations"] != "none"
        )
        print(f"\nviolations of the deliberately broken variants, {gpus} GPUs, {ranks} ranks: {broken}")
    for name, line in lines.items():
        if line["expect_violations"] == "none":
            assert (line["violations"], line["timeouts"]) == (0, 0), line
        # A flag that precedes its rows must show, or the checks see nothing.
        if line["expect_violations"] == "some":
            assert line["violations"] > 0, f"{name}: the checks are blind: {line}"
