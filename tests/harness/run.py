"""Runs one body on all ranks of a group, in processes that are kept for the next test or in threads of this one."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

import putget
from putget.moe import networks
from tests.harness.processes import RankError, RankProcesses
from tests.harness.rank import Rank

_pools: dict[tuple[int, str], RankProcesses] = {}
_FEWEST_UNITS = networks.FEWEST_UNITS


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    mode: str = "process",
    device: str = "cpu",
    timeout: float = 120.0,
    network: putget.Network | None = None,
) -> list[Any]:
    """Runs `body(rank, *args)` on every rank.

    Args:
        size: number of ranks.
        body: a module-level function; its first argument is a `Rank`. In process mode arguments and result are pickled.
        mode: "process" or "thread". On CUDA with fewer GPUs than ranks, all ranks are threads on one GPU.
        device: "cpu" or "cuda".
        timeout: seconds until the ranks count as stuck.
        network: what divides the ranks into domains; processes make a communicator over it for this call.

    Returns:
        The results in rank order.

    Raises:
        RankError: if a rank raised or was stuck, with the traceback of every such rank.
    """
    if device == "cuda" and torch.cuda.device_count() < size:
        mode = "thread"
    if mode == "thread":
        return _run_threads(size, body, args, device, timeout, network)
    call = (body, *args) if network is None else (on_network, network, body, *args)
    pool = kept_ranks(size, device)
    results = pool.call(*call, timeout=timeout)
    attempts = pool.call(last_attempt)
    if len(set(attempts.values())) > 1:
        pool.broken = True
        raise AssertionError(
            f"{body.__name__} leaves ranks at attempts {attempts}: it needs fresh_ranks, others share these"
        )
    return [results[rank] for rank in range(size)]


def kept_ranks(size: int, device: str = "cpu") -> RankProcesses:
    """Rank processes that all tests share, without what the last test left; new ones once a command failed on them."""
    pool = _pools.get((size, device))
    if pool is None or pool.broken:
        if pool is not None:
            pool.close()
        pool = _pools[size, device] = RankProcesses(size, device)
    pool.call(forget)
    return pool


@contextlib.contextmanager
def fresh_ranks(size: int, device: str = "cpu") -> Iterator[RankProcesses]:
    """Rank processes of this test's own, which it may kill."""
    with RankProcesses(size, device) as ranks:
        yield ranks


def close_pools() -> None:
    """Ends the kept processes."""
    while _pools:
        _pools.popitem()[1].close()


def forget(rank: Rank) -> None:
    """A body: ends what the last test left. A fault that the test wanted has been seen, or does not matter any more."""
    if rank.device.type == "cuda":
        torch.cuda.current_stream(rank.device).synchronize()
    for a2a in rank.state.pop("objects", []):
        with contextlib.suppress(putget.PutgetError):
            a2a.close()
    rank.state.clear()
    reset_units()


def reset_units() -> None:
    """Sets back what tests.moe.layers changes for the layers of a test: for this process and all its ranks."""
    networks.FEWEST_UNITS = _FEWEST_UNITS


def last_attempt(rank: Rank) -> int:
    """A body: how many attempts the rank has begun. Where ranks differ, whatever they make together next fails."""
    return 0 if rank._comm is None else rank._comm._mesh.number


def on_network(rank: Rank, network: putget.Network, body: Callable[..., Any], *args: Any) -> Any:
    """A body: runs another one over a network."""
    with putget.Communicator(network=network) as comm:
        return body(Rank(rank.rank, rank.size, rank.device, _comm=comm), *args)


def fill_allocator(place: torch.device) -> None:
    """Leaves free blocks of all sizes with the current stream's allocator, so that small tensors need no cudaMalloc."""
    blocks = [torch.empty(1 << 19, dtype=torch.uint8, device=place) for _ in range(32)]
    blocks += [torch.empty(5 << 20, dtype=torch.uint8, device=place) for _ in range(16)]


def _run_threads(
    size: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    timeout: float,
    network: putget.Network | None,
) -> list[Any]:
    comms = putget.Communicator.local(size, network=network)
    results: list[Any] = [None] * size
    failures: dict[int, str] = {}
    failed = threading.Event()
    barrier = threading.Barrier(size) if device == "cuda" else None
    if device == "cuda":
        # The collector may free memory of earlier tests while a kernel waits for a rank. The rank that frees it then
        # stands still until the deadline.
        gc.collect()

    def run(rank: int) -> None:
        place = torch.device("cpu") if device == "cpu" else torch.device("cuda", 0)
        try:
            with contextlib.ExitStack() as stack:
                if place.type == "cuda":
                    # A default stream shared by the ranks would let one rank's waiting kernel block the others' puts.
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(place)))
                    fill_allocator(place)
                me = Rank(rank, size, place, _comm=comms[rank], _barrier=barrier)
                me.meet()
                results[rank] = body(me, *args)
        except BaseException:
            failures[rank] = traceback.format_exc()
            failed.set()
            if barrier is not None:
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.2 if not failed.is_set() else 0.02)
            if failed.is_set():
                deadline = min(deadline, time.monotonic() + 5)
    frames = sys._current_frames()
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            stack = traceback.format_stack(frames[thread.ident]) if thread.ident in frames else []
            failures[rank] = "no answer in time\n" + "".join(stack)
    if failures:
        raise RankError.of(failures)
    for comm in comms:
        comm.close()
    return results
