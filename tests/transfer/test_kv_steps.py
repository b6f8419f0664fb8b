"""The steps that the connector for vLLM reports: on a CPU, with an imitated driver, and in graphs of torch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.project.checkout import ROOT

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer.adapters.vllm.steps import Steps
from tests.transfer.kv_steps import COUNT, LAYERS, NAMES, PAGE, TOKENS, Engine, Ranks
from tests.transfer.test_kv_words import gpu, run_with

INDEX = {name: layer for layer, name in enumerate(NAMES)}


class Recorder:
    """A prefiller that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.breaks = False

    def begin_step(self, step: int, work: list[Any], stream: object) -> None:
        self.calls.append(("begin", step, len(work), stream))
        if ("wrong", 1, [[0]]) in work:
            raise ValueError("it is wrong")

    def layer_done(self, layer: int, stream: object) -> None:
        self.calls.append(("layer", layer, stream))
        if self.breaks:
            raise RuntimeError("the device is lost")

    def fail(self, name: str, reason: str) -> None:
        self.calls.append(("failed", name))
        if name == "ended":
            raise ValueError("it has ended before")

    def end_step(self, stream: object) -> None:
        self.calls.append(("over", stream))

    def taken(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.mark.parametrize("stream", [None, 64])
def test_a_layer_is_one_call_on_the_current_stream(stream: int | None) -> None:
    recorder, captures = Recorder(), False
    steps = Steps(
        recorder,  # type: ignore[arg-type]
        INDEX,
        stream=lambda: stream,
        captures=lambda: captures,
    )
    # No step is under way: nothing is reported, but into a graph.
    steps.layer_done(NAMES[0])
    steps.end()
    assert (steps.reports(), recorder.taken()) == (False, [])
    captures = True
    assert steps.reports()
    steps.layer_done(NAMES[0])
    assert recorder.taken() == [("layer", 0, stream)]
    captures = False
    steps.begin([("r", 1, [[0]])])
    assert steps.reports()
    steps.layer_done(NAMES[1])
    steps.layer_done("a layer without a cache")
    steps.end()
    assert recorder.taken() == [("begin", 1, 1, stream), ("layer", 1, stream), ("layer", LAYERS - 1, stream)]
    assert not steps.reports()


def test_a_refused_step_leaves_by_one_request_after_the_other() -> None:
    recorder = Recorder()
    steps = Steps(recorder, INDEX, stream=lambda: 64)  # type: ignore[arg-type]
    steps.begin([("a", 1, [[0]]), ("wrong", 1, [[0]]), ("b", 1, [[1]])])
    steps.end()
    last = ("layer", LAYERS - 1, 64)
    begun = [("begin", step, 1, 64) for step in (2, 3, 4)]
    assert recorder.taken() == [("begin", 1, 3, 64), last, begun[0], last, begun[1], begun[2], last]
    steps.begin([("c", 1, [[0]])])
    steps.end()
    assert recorder.taken() == [("begin", 5, 1, 64), last]


@pytest.mark.parametrize("breaks", [False, True], ids=["its forward pass raised", "its end raised"])
def test_nothing_of_a_refused_step_that_never_ended_leaves_with_the_next(breaks: bool) -> None:
    recorder = Recorder()
    steps = Steps(recorder, INDEX, stream=lambda: 64)  # type: ignore[arg-type]
    steps.begin([("a", 1, [[0]]), ("wrong", 1, [[0]])])
    if breaks:
        recorder.breaks = True
        with pytest.raises(RuntimeError, match="the device is lost"):
            steps.end()
        recorder.breaks = False
    recorder.taken()
    # Its requests fail: the next step's word would say that they are computed.
    steps.begin([("b", 1, [[0]])])
    failed = [("failed", "a"), ("failed", "wrong"), ("over", 64)]
    assert recorder.taken() == [*failed, ("begin", 2, 1, 64)]
    steps.end()
    assert recorder.taken() == [("layer", LAYERS - 1, 64)]


def test_a_pass_without_prefills_reports_nothing_of_a_step_that_never_ended() -> None:
    recorder = Recorder()
    steps = Steps(recorder, INDEX, stream=lambda: 64)  # type: ignore[arg-type]
    steps.begin([("a", 1, [[0]]), ("ended", 1, [[0]])])
    recorder.taken()
    for _ in range(2):
        steps.begin_without()
        assert not steps.reports()
        steps.layer_done(NAMES[0])
        steps.end()
    # A graph's kernels that run from now on belong to no step.
    assert recorder.taken() == [("failed", "a"), ("failed", "ended"), ("over", 64)]


def test_halves_of_a_batch_are_reported_when_the_step_is_over() -> None:
    recorder = Recorder()
    steps = Steps(recorder, INDEX, stream=lambda: 64, captures=lambda: True, by_layer=False)  # type: ignore[arg-type]
    assert not steps.reports()
    steps.begin([("r", 1, [[0]])])
    steps.layer_done(NAMES[0])
    assert not steps.reports()
    steps.end()
    assert recorder.taken() == [("begin", 1, 1, 64), ("layer", LAYERS - 1, 64)]


def test_an_imitated_graph_lets_pages_leave_by_layer(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = ROOT / "transfer/engine/tests/imitation/cuda.c"
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-lpthread"], check=True)
    run_with(tmp_path, "tests.transfer.kv_steps")


@pytest.mark.gpu
@gpu
def test_a_graph_of_the_driver_lets_pages_leave_by_layer() -> None:
    run_with(None, "tests.transfer.kv_steps")


def nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Return how many nodes a graph has."""
    count = ctypes.c_size_t()
    code = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    assert code == 0
    return count.value


@pytest.mark.gpu
@gpu
def test_a_graph_of_torch_lets_pages_leave_by_layer() -> None:
    memory = torch.zeros(LAYERS, 2 * COUNT, TOKENS, PAGE // TOKENS, dtype=torch.uint8, pin_memory=True)
    values = torch.zeros(COUNT, TOKENS, PAGE // TOKENS, dtype=torch.uint8, device="cuda")
    ranks = Ranks(memory.numpy())
    captures, current = torch.cuda.is_current_stream_capturing, torch.cuda.current_stream
    steps = Steps(ranks.prefiller, INDEX, stream=current, captures=captures)

    def compute(layer: int) -> None:
        torch.cuda._sleep(20_000_000)  # about 10 ms
        memory[layer, :COUNT].copy_(values, non_blocking=True)

    engine = Engine(ranks, steps, compute, lambda value: values.fill_(value))

    def captured(reports: bool) -> torch.cuda.CUDAGraph:
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)
        steps.by_layer = reports
        with torch.cuda.graph(graph, stream=side):
            engine.forward()
        steps.by_layer = True
        return graph

    plain, graph = captured(reports=False), captured(reports=True)
    # A layer is one kernel more.
    assert nodes(graph) == nodes(plain) + LAYERS
    graph.instantiate()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        engine.all_held(graph.replay, torch.cuda.synchronize)
    ranks.close()
