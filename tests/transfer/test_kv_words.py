"""The word that kernels store to: with an imitated driver, with the real one, with torch, and where there is none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.project.checkout import ROOT

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer import kv
from tests.transfer.kv_words import LAYERS, WAIT_S, Pair, settled

NVLINK = ROOT / "transfer/engine/src/providers/nvlink"
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run_with(libraries: Path | None, module: str = "tests.transfer.kv_words") -> None:
    """Run a module in a process of its own, because a process keeps the driver that it has found."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    if libraries:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    command = [sys.executable, "-m", module]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=5 * WAIT_S, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "all held\n"), ran.stderr


def test_an_imitated_graph_reports_each_step_that_replays_it(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = ROOT / "transfer/engine/tests/imitation/cuda.c"
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-lpthread"], check=True)
    run_with(tmp_path)


@pytest.mark.gpu
@gpu
def test_a_graph_reports_each_step_that_replays_it() -> None:
    run_with(None)


@pytest.mark.gpu
@gpu
def test_a_graph_of_torch_reports_each_step() -> None:
    pair, side = Pair(), torch.cuda.Stream()
    hidden = torch.ones(256, 256, device="cuda")

    def forward() -> None:
        for layer in range(LAYERS):
            hidden.copy_(hidden @ hidden / 256)
            pair.prefiller.layer_done(layer, torch.cuda.current_stream())

    with torch.cuda.stream(side):
        forward()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        forward()
    graph.replay()
    torch.cuda.synchronize()
    assert pair.word() == 0
    for step in (3, 4):
        receive = pair.ask(f"r{step}", step)
        settled(receive)
        # The default stream, whose handle is 0.
        pair.prefiller.begin_step(step, pair.work(f"r{step}", step, step), torch.cuda.current_stream())
        graph.replay()
        receive.wait(WAIT_S)
        torch.cuda.synchronize()
        assert pair.word() == step << 16 | LAYERS
        assert (pair.memory[1][:, step] == step).all()
    pair.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_stream_without_a_driver_is_refused_before_any_effect() -> None:
    pair = Pair()
    calls = (
        lambda stream: pair.prefiller.begin_step(1, pair.work("r", 1, 1), stream),
        lambda stream: pair.prefiller.layer_done(0, stream),
        pair.prefiller.end_step,
    )
    for call in calls:
        for stream, words in ((64, "CUDA"), ("a stream", "a stream came"), (-1, "-1 came")):
            with pytest.raises(ValueError, match=f"stream: .*{words}"):
                call(stream)
    assert pair.word() == 0
    # The refused step has not begun; without a stream it does.
    receive = pair.ask("r", 1)
    pair.prefiller.begin_step(1, pair.work("r", 1, 5))
    pair.prefiller.layer_done(LAYERS - 1, None)
    receive.wait(WAIT_S)
    assert isinstance(receive, kv.Receive)
    pair.close()


def instructions(text: str) -> list[str]:
    """Return the lines of PTX that are neither comments, blank, nor the version."""
    lines = (line.split("//")[0].split() for line in text.splitlines())
    return [" ".join(line) for line in lines if line and line[0] != ".version"]


@pytest.mark.parametrize("name", ["pages", "quantise", "words"])
def test_ptx_is_what_the_source_compiles_to(name: str, tmp_path: Path) -> None:
    find = subprocess.run(
        [sys.executable, ROOT / "cmake/find_nvcc.py"], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    nvcc = find.stdout.strip() or shutil.which("nvcc")
    if not nvcc:
        pytest.skip("there is no nvcc")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=WAIT_S).stdout
    if not re.search(r"release 13\.0\b", version):
        pytest.skip("another version of nvcc writes other PTX")
    made = tmp_path / "made.ptx"
    command = [nvcc, "-ptx", "-arch=compute_75", "-O3", NVLINK / f"{name}.cu", "-o", made]
    subprocess.run(command, check=True, timeout=5 * WAIT_S)
    assert instructions(made.read_text()) == instructions((NVLINK / f"{name}.ptx").read_text())
