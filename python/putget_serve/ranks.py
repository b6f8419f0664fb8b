"""The processes of ``putget serve``: starts them, says when they answer, and what has become of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from putget import PutgetError
from putget_serve.settings import Settings

_END_S = 15.0  # requests that are under way end meanwhile


def serve(settings: Settings) -> int:
    """Runs the ranks until SIGINT or SIGTERM.

    Returns:
        0; 1 if a rank ended by itself.

    Raises:
        ValueError: The settings are wrong; no process has started.
        PutgetError: A rank did not come to answer.
    """
    settings.check()
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: ended.append(number))
    with tempfile.TemporaryDirectory(prefix="putget_serve_") as folder:
        context = multiprocessing.get_context("spawn")
        ranks: list[tuple[BaseProcess, Any]] = []
        for rank in range(settings.ep_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run, args=(settings, rank, f"{folder}/store", theirs), name=f"rank {rank}", daemon=False
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            _wait_until_ready(settings, ranks, ended)
            if not ended:
                print(
                    f"putget serve: {settings.ep_size} ranks answer on http://{settings.host}:{settings.port}",
                    flush=True,
                )
            return _watch(settings, ranks, ended)
        finally:
            _end([process for process, _ in ranks])


def _run(settings: Settings, rank: int, store: str, ready: Connection) -> None:
    from putget_serve.server import run_rank

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process ends the others
    turn = threading.Lock()

    def say_to_parent(said: Any) -> None:
        with turn, contextlib.suppress(OSError):
            ready.send(said)

    try:
        run_rank(settings, rank, store, lambda: say_to_parent(None), say_to_parent)
    except Exception as error:
        say_to_parent(f"{type(error).__name__}: {error}")
        raise
    sys.stdout.flush()
    os._exit(0)  # threads of a request that hangs do not hold the end up


def _wait_until_ready(settings: Settings, ranks: list[tuple[BaseProcess, Any]], ended: list[int]) -> None:
    deadline = time.monotonic() + settings.setup_timeout_s
    waits = {ours: rank for rank, (_, ours) in enumerate(ranks)}
    while waits and not ended:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PutgetError(f"rank(s) {sorted(waits.values())} do not answer after {settings.setup_timeout_s:g} s")
        for ours in wait(list(waits), timeout=min(left, 0.5)):
            assert isinstance(ours, Connection)
            rank = waits.pop(ours)
            try:
                said = ours.recv()
            except EOFError:
                said = f"its process ended (exit code {ranks[rank][0].exitcode})"
            if said is not None:
                raise PutgetError(f"rank {rank}: {said}")


def _watch(settings: Settings, ranks: list[tuple[BaseProcess, Any]], ended: list[int]) -> int:
    """Until a signal comes. A rank that ends is named once; a rank that the others have left out is ended."""
    fate = "its experts are gone, so the other ranks answer 503: start the server again"
    if settings.num_slots is not None or settings.balance != "off":
        fate = "the other ranks take over its experts, if they have room"
    named: set[int] = set()
    members: tuple[int, ...] = tuple(range(len(ranks)))
    pipes = {pipe for _, pipe in ranks}
    while not ended and len(named) < len(ranks):
        waits = [process.sentinel for rank, (process, _) in enumerate(ranks) if rank not in named]
        for pipe in pipes.intersection(wait([*waits, *pipes], timeout=0.5)):
            try:
                said = pipe.recv()
            except (EOFError, OSError):
                pipes.discard(pipe)
                continue
            if isinstance(said, tuple) and said != members:
                members = said
                print(f"putget serve: ranks {', '.join(map(str, members))} go on", file=sys.stderr, flush=True)
                for rank in set(range(len(ranks))).difference(members):
                    ranks[rank][0].kill()  # it may stand still, and go on alone later
        for rank, (process, _) in enumerate(ranks):
            if process.exitcode is not None and rank not in named and not ended:
                named.add(rank)
                print(
                    f"putget serve: rank {rank} has ended (exit code {process.exitcode}); {fate}",
                    file=sys.stderr,
                    flush=True,
                )
    return 1 if named else 0


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _END_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
