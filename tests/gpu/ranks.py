"""Ranks on GPUs that obey one command at a time: a process per GPU, or threads that share one GPU.

The command interface is that of harness.RankProcesses, so a test is written once. Each command is a barrier between the
ranks, which keeps allocations and captures of one rank away from another's waiting kernels.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

import putget
from tests.harness import Rank, RankError
from tests.harness.run import forget, kept_ranks

Body = Callable[..., Any]


class Ranks(Protocol):
    """The part of RankProcesses and ThreadRanks that tests use."""

    size: int
    broken: bool

    def submit(self, rank: int, body: Body, *args: Any) -> None:
        """Sends a command; its result must be fetched before the next one."""

    def result(self, rank: int, timeout: float = 60.0) -> Any:
        """The result of the command sent to `rank`."""

    def call(self, body: Body, *args: Any, ranks: Iterable[int] | None = None, timeout: float = 60.0) -> dict[int, Any]:
        """Runs one body on several ranks (all by default) and waits for them."""

    def close(self) -> None:
        """Ends the ranks."""


# torch hands out streams from a pool that wraps round, and emulated ranks must never share one: all of them, with
# three streams each, are taken at once.
_MAX_THREADS, _STREAMS_EACH = 8, 3
_streams: list[torch.cuda.Stream] = []


def stream_of(rank: Rank, which: int = 0) -> torch.cuda.Stream:
    """A stream of this rank's own; 0 is the current one of its commands, unless that is the default stream."""
    if not _streams:
        _streams.extend(torch.cuda.Stream(rank.device) for _ in range(_MAX_THREADS * _STREAMS_EACH))
    return _streams[rank.rank * _STREAMS_EACH + which]


class ThreadRanks:
    """Ranks emulated on GPU 0: threads of this process, each with a CUDA stream of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.broken = False
        self._comms = putget.Communicator.local(size)
        self._commands: list[queue.SimpleQueue[tuple[Body, tuple[Any, ...], threading.Barrier | None] | None]] = []
        self._answers: list[queue.SimpleQueue[tuple[Any, str | None]]] = []
        self._threads = []
        for _ in range(size):
            self._commands.append(queue.SimpleQueue())
            self._answers.append(queue.SimpleQueue())
        stream_of(Rank(0, size, torch.device("cuda", 0)))  # before the threads, which would race for the list
        for rank in range(size):
            self._threads.append(threading.Thread(target=self._serve, args=(rank,), daemon=True, name=f"rank {rank}"))
            self._threads[-1].start()

    def _serve(self, rank: int) -> None:
        place = torch.device("cuda", 0)
        me = Rank(rank, self.size, place, _comm=self._comms[rank])
        with torch.cuda.stream(stream_of(me)):
            while (command := self._commands[rank].get()) is not None:
                body, args, me._barrier = command
                try:
                    answer: tuple[Any, str | None] = (body(me, *args), None)
                except BaseException:
                    answer = (None, traceback.format_exc())
                self._answers[rank].put(answer)

    def submit(self, rank: int, body: Body, *args: Any) -> None:
        self._commands[rank].put((body, args, None))

    def result(self, rank: int, timeout: float = 60.0) -> Any:
        return self._results([rank], timeout)[rank]

    def call(self, body: Body, *args: Any, ranks: Iterable[int] | None = None, timeout: float = 60.0) -> dict[int, Any]:
        chosen = list(range(self.size) if ranks is None else ranks)
        meeting = threading.Barrier(len(chosen))
        for rank in chosen:
            self._commands[rank].put((body, args, meeting))
        return self._results(chosen, timeout)

    def _results(self, ranks: Iterable[int], timeout: float) -> dict[int, Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        for rank in ranks:
            # Once one rank has failed, the others may be waiting for it.
            left = deadline - time.monotonic() if not failures else 5.0
            try:
                value, failure = self._answers[rank].get(timeout=max(left, 0.01))
            except queue.Empty:
                value, failure = None, "no answer in time\n"
            if failure is None:
                results[rank] = value
            else:
                failures[rank] = failure
        if failures:
            self.broken = True
            raise RankError("".join(f"\nrank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return results

    def close(self) -> None:
        for commands in self._commands:
            commands.put(None)
        for thread in self._threads:
            thread.join(0.1 if self.broken else 10)
        if not self.broken:
            for comm in self._comms:
                comm.close()


def have_processes(size: int) -> bool:
    """Whether shared_ranks gives processes, which can be killed and stopped."""
    return torch.cuda.device_count() >= size


_emulated: dict[int, ThreadRanks] = {}


def shared_ranks(size: int) -> Ranks:
    """Ranks that are kept from test to test: a process per GPU where there are `size` GPUs, else threads on GPU 0."""
    if have_processes(size):
        return kept_ranks(size, "cuda")
    ranks = _emulated.get(size)
    if ranks is None or ranks.broken:
        if ranks is not None:
            ranks.close()
        ranks = _emulated[size] = ThreadRanks(size)
    ranks.call(forget)
    return ranks


def close_emulated_ranks() -> None:
    while _emulated:
        _emulated.popitem()[1].close()
