"""Starts the ranks of a run, or joins those that a launcher has started, and ends all of them when one dies."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, start_processes

from putget import config

Event = dict[str, Any]
Emit = Callable[[Event], None]

_GROUP_TIMEOUT = timedelta(minutes=2)
_GRACE_S = 5.0
_POLL_S = 0.05
_JOIN_PATIENCE_S = 25.0  # torch waits 30 s for ranks to end before it kills them
# Fresh processes, from a server that has imported torch once for all of them: ranks start in a fraction of the time.
_START_METHOD = "forkserver"
_CONTEXT = get_context(_START_METHOD)
_PRELOAD = ["putget_bench.measure", "putget_bench.demo_layer"]
_CRASHES = tuple(-sig for sig in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL))


@dataclass(frozen=True)
class RankContext:
    """One rank of a run. torch.distributed is set up (gloo) while its work runs.

    Attributes:
        rank: this rank.
        size: number of ranks.
        device: what this rank works on.
    """

    rank: int
    size: int
    device: torch.device


Work = Callable[[RankContext, Any, Emit], int]
"""`work(context, settings, emit)` runs on every rank and returns an exit code, the same on all. Rank 0 emits events."""


class RankFailedError(RuntimeError):
    """A rank died or raised; the message names it and says how."""


def world_size() -> int | None:
    """Ranks that a launcher (torchrun, srun) has started, or None."""
    launched = config.launcher()
    return None if launched is None else launched[1]


def is_reporter() -> bool:
    """Whether this process is the one that talks to the user."""
    launched = config.launcher()
    return launched is None or launched[0] == 0


def run(work: Work, settings: Any, ep_size: int, device: str, on_event: Emit) -> int:
    """Runs the work on every rank.

    Args:
        work: a function at module level (ranks are fresh processes).
        settings: passed on; must be picklable.
        ep_size: number of ranks.
        device: "cuda" or "cpu".
        on_event: called in this process with what rank 0 emits.

    Returns:
        The exit code of the work.

    Raises:
        RankFailedError: if a rank died or raised; all others are ended first.
    """
    launched = config.launcher()
    if launched is not None:
        return _join(work, settings, device, on_event, *launched)
    if device == "cpu":
        # torch's threads would spin for milliseconds behind each operation, on the cores of ranks that are timed.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # the event is told below
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    ranks: ProcessContext | None = start_processes(  # type: ignore[no-untyped-call]
        _spawned, (work, settings, ep_size, device, store.port, sender), ep_size, join=False, start_method=_START_METHOD
    )
    sender.close()
    assert ranks is not None
    exit_code: int | None = None

    def drain(wait_s: float) -> None:
        nonlocal exit_code
        while receiver.poll(wait_s):
            try:
                event = receiver.recv()
            except EOFError:
                return
            if event["kind"] == "exit":
                exit_code = event["code"]
            else:
                on_event(event)
            wait_s = 0

    try:
        while True:
            looked = time.monotonic()
            if ranks.join(timeout=0):
                break
            drain(_POLL_S)
        drain(0)
    except ProcessRaisedException as error:
        drain(0)
        # A rank that was killed makes others raise: name the cause, not the first that complained. One that join itself
        # had to kill, because it did not end when asked, is no cause.
        join_killed = time.monotonic() - looked > _JOIN_PATIENCE_S
        for rank, process in enumerate(ranks.processes):
            if process.exitcode in _CRASHES and not join_killed:
                raise RankFailedError(_obituary(rank, signal.Signals(-process.exitcode).name)) from None
        raise RankFailedError(f"rank {error.error_index} failed: {_last_line(str(error))}\n{error}") from None
    except ProcessExitedException as error:
        drain(0)
        raise RankFailedError(
            _obituary(error.error_index, error.signal_name or f"exit code {error.exit_code}")
        ) from None
    finally:
        _end(ranks)
    if exit_code is None:
        raise RankFailedError("rank 0 ended without a result")
    return exit_code


def _end(ranks: ProcessContext) -> None:
    """Ends what still runs (after an error or Ctrl-C): asks first, then insists."""
    for process in ranks.processes:
        if process.is_alive():
            process.terminate()
    for process in ranks.processes:
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _obituary(rank: int, how: str) -> str:
    return f"rank {rank} died ({how}); the other ranks were ended"


def _last_line(traceback: str) -> str:
    return traceback.strip().splitlines()[-1]


def _spawned(rank: int, work: Work, settings: Any, ep_size: int, device: str, port: int, sender: Connection) -> None:
    # Ctrl-C reaches every process of the terminal: go quietly, also from native code. Never outlive the parent.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ep_size, timeout=_GROUP_TIMEOUT)
    emit: Emit = sender.send if rank == 0 else _discard
    code = _work(work, settings, RankContext(rank, ep_size, _device(device, rank)), emit)
    emit({"kind": "exit", "code": code})


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _join(work: Work, settings: Any, device: str, on_event: Emit, rank: int, size: int, local_rank: int) -> int:
    try:
        dist.init_process_group(
            "gloo", init_method=config.rendezvous(), rank=rank, world_size=size, timeout=_GROUP_TIMEOUT
        )
    except ValueError as error:
        raise RankFailedError(f"rank {rank} cannot find the others: {error}") from error
    emit = on_event if rank == 0 else _discard
    try:
        return _work(work, settings, RankContext(rank, size, _device(device, local_rank)), emit)
    except Exception as error:
        # The launcher ends the other ranks; they may be waiting for this one.
        raise RankFailedError(f"rank {rank} failed: {type(error).__name__}: {error}") from error


def _work(work: Work, settings: Any, context: RankContext, emit: Emit) -> int:
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // context.size))
    with torch.no_grad():
        code = work(context, settings, emit)
    dist.barrier()
    dist.destroy_process_group()
    return code


def _device(device: str, local_rank: int) -> torch.device:
    if device != "cuda":
        return torch.device("cpu")
    # A launcher may show each rank its own GPU only; emulated ranks share GPUs.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _discard(event: Event) -> None:
    pass
