"""Times operations that all ranks do together: aligned starts, the slowest rank of every iteration, medians.

On CUDA a whole series is one graph: for each iteration a barrier between the ranks, an event, the operation, an event.
Nothing on the host lies between an operation and its events. On the CPU the same series runs with perf_counter, which
is one clock for all processes of a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

Action = Callable[[], object]
Readings = dict[str, list[float]]
"""Microseconds of this rank, one per iteration, by the name of the step."""

FLUSHES = ("none", "overwrite")
_LEADING = 2  # untimed iterations at the start of every series
_MAX_SERIES = 50  # timed iterations of one series: bounds the size of a graph, however many rounds are asked for
_L2_FLUSHES = 2  # flushed bytes, in units of the L2 cache


@dataclass(frozen=True)
class Step:
    """One part of an iteration.

    Attributes:
        run: what to do.
        name: what its time is called, or None if it is not timed.
        flush: whether it starts with a cold cache, where the timer flushes at all.
    """

    run: Action
    name: str | None = None
    flush: bool = False


class Series(Protocol):
    """A repeatable run of some iterations."""

    def __call__(self) -> Readings:
        """Runs once and returns this rank's readings."""


class Timer(Protocol):
    """Makes series. `align` starts all ranks together, in the order of the device's work."""

    def steps(self, steps: Sequence[Step], iters: int) -> Series:
        """A series of iterations of all steps; the ranks are aligned before each timed step."""

    def back_to_back(self, name: str, run: Action, repeats: int) -> Series:
        """One reading: the time of `repeats` runs with nothing in between, divided by their number."""


def series_length(iters: int) -> tuple[int, int]:
    """Iterations in one series, and the number of series, for at least so many iterations."""
    num_series = max(-(-iters // _MAX_SERIES), min(iters, 4))
    return -(-iters // num_series), num_series


def make_flush(kind: str) -> Action | None:
    """Empties the L2 cache of the current GPU. The returned action keeps its memory.

    Args:
        kind: "none", or "overwrite", which writes more than the cache holds.

    Returns:
        What enqueues it, or None.
    """
    if kind == "none":
        return None
    num_bytes = _L2_FLUSHES * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return scratch.zero_


@dataclass(frozen=True)
class CpuTimer:
    """Times with perf_counter. It flushes nothing.

    Attributes:
        align: a barrier between the ranks.
    """

    align: Action

    def steps(self, steps: Sequence[Step], iters: int) -> Series:
        """See `Timer.steps`."""

        def run() -> Readings:
            readings: Readings = {step.name: [] for step in steps if step.name is not None}
            for _ in range(iters):
                for step in steps:
                    if step.name is None:
                        step.run()
                        continue
                    self.align()
                    start = time.perf_counter()
                    step.run()
                    readings[step.name].append((time.perf_counter() - start) * 1e6)
            return readings

        return run

    def back_to_back(self, name: str, run: Action, repeats: int) -> Series:
        """See `Timer.back_to_back`."""

        def series() -> Readings:
            self.align()
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            return {name: [(time.perf_counter() - start) * 1e6 / repeats]}

        return series


@dataclass(frozen=True)
class CudaTimer:
    """Times with CUDA events, inside of one graph per series.

    Attributes:
        align: enqueues a barrier between the ranks.
        use_graph: capture every series; otherwise it is launched step by step, and launch time shows.
        flush: enqueues what empties the caches before a step that asks for it, or None.
    """

    align: Action
    use_graph: bool
    flush: Action | None

    def steps(self, steps: Sequence[Step], iters: int) -> Series:
        """See `Timer.steps`."""
        pairs = {step.name: [(self._event(), self._event()) for _ in range(iters)] for step in steps if step.name}

        def enqueue() -> None:
            for iteration in range(-_LEADING, iters):
                for step in steps:
                    if step.flush and self.flush is not None:
                        self.flush()
                    if step.name is None:
                        step.run()
                        continue
                    self.align()
                    if iteration >= 0:
                        pairs[step.name][iteration][0].record()
                    step.run()
                    if iteration >= 0:
                        pairs[step.name][iteration][1].record()

        return self._series(enqueue, pairs, 1)

    def back_to_back(self, name: str, run: Action, repeats: int) -> Series:
        """See `Timer.back_to_back`."""
        start, end = self._event(), self._event()

        def enqueue() -> None:
            for _ in range(_LEADING):
                run()
            self.align()
            start.record()
            for _ in range(repeats):
                run()
            end.record()

        return self._series(enqueue, {name: [(start, end)]}, repeats)

    def _series(
        self, enqueue: Action, pairs: Mapping[str, Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]], repeats: int
    ) -> Series:
        replay = capture(enqueue) if self.use_graph else enqueue

        def run() -> Readings:
            dist.barrier()
            replay()
            torch.cuda.synchronize()
            return {
                name: [start.elapsed_time(end) * 1e3 / repeats for start, end in events]
                for name, events in pairs.items()
            }

        return run

    def _event(self) -> torch.cuda.Event:
        # External: recorded as a node of the graph, so that every replay records it anew.
        if not self.use_graph:
            return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        try:
            return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
        except TypeError as error:
            version = torch.__version__
            raise RuntimeError(f"torch {version} cannot time CUDA graphs: update it, or use --no_cuda_graph") from error


def capture(enqueue: Action) -> Action:
    """Captures what enqueue launches into a CUDA graph and returns its replay. Run it eagerly once before.

    The replay keeps `enqueue` alive, and with it every tensor whose address the graph has.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Thread-local: the watchdog thread of NCCL queries events at any time, which would spoil a global capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        enqueue()
    torch.cuda.synchronize()

    def replay() -> object:
        graph.replay()
        return enqueue

    return replay


def slowest(readings: Sequence[Readings]) -> dict[str, torch.Tensor]:
    """The slowest rank of every iteration. Collective over the default group.

    Args:
        readings: of all series, in order; the same names and counts on every rank.

    Returns:
        [iterations] float64 microseconds by name, the same on every rank.
    """
    merged = {}
    for name in readings[0]:
        mine = torch.tensor([value for series in readings for value in series[name]], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        merged[name] = mine
    return merged


def median(values: torch.Tensor) -> float:
    """The middle of a series, or between the middle two."""
    return float(values.quantile(0.5))


def percentiles(values: torch.Tensor) -> dict[str, float]:
    """Minimum, percentiles, maximum and mean of a series."""
    marks = (1, 5, 10, 25, 50, 75, 90, 95, 99)
    found = values.quantile(torch.tensor(marks, dtype=values.dtype) / 100).tolist()
    return {
        "min": values.min().item(),
        **{f"p{mark:02d}": value for mark, value in zip(marks, found, strict=True)},
        "max": values.max().item(),
        "mean": values.mean().item(),
    }
