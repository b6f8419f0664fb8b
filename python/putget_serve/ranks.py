"""The processes of ``putget serve``: starts them, says when they answer, and what has become of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from putget import PutgetError
from putget_serve.parent import Parent
from putget_serve.settings import APP_MODULES, Settings, claimed

# Imported once for all ranks: it takes seconds of a core. A package that is missing is an error of the rank.
_PRELOADED = (
    "putget_serve.server",
    "transformers",
    *APP_MODULES,
    "fastapi.responses",
    "uvicorn",
    "transformers.modeling_utils",
    "transformers.integrations.hub_kernels",
    "transformers.image_processing_utils",
    "transformers.generation.continuous_batching",
)
_END_S = 15.0  # requests that are under way end meanwhile
_LOOK_S = 0.5
_JOIN_S = 120.0  # until all ranks have said whether they can go on with new processes
_MOST_DELAY_S = 60.0  # before a process that could not join is started again


def serve(settings: Settings) -> int:
    """Runs the ranks until SIGINT or SIGTERM.

    Returns:
        0; 1 if a rank was missing at the end.

    Raises:
        ValueError: The settings are wrong; no process has started.
        BackendUnavailable: transformers is not installed, or not known.
        PutgetError: A rank did not come to answer.
    """
    settings.check()
    with claimed(settings.host, settings.port):
        return _serve(settings)


def _serve(settings: Settings) -> int:
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: ended.append(number))
    with tempfile.TemporaryDirectory(prefix="putget_serve_") as folder:
        ranks = _Ranks(settings, Path(folder))
        try:
            for rank in range(settings.ep_size):
                ranks.start(rank, f"{folder}/store")
            _wait_until_ready(settings, ranks, ended)
            if not ended:
                print(f"putget serve: {settings.ep_size} ranks answer on {ranks.url}", flush=True)
            while not ended and ranks.has_members:
                ranks.look()
            return 0 if ranks.are_whole else 1
        finally:
            ranks.end()


def _run(settings: Settings, rank: int, store: str | None, pipe: Connection) -> None:
    from putget_serve.server import run_rank

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process ends the others
    parent = Parent(pipe)
    try:
        run_rank(settings, rank, store, parent)
    except Exception as error:
        parent.say("error", f"{type(error).__name__}: {error}")
        raise
    sys.stdout.flush()
    os._exit(0)  # threads of a request that hangs do not hold the end up


def _wait_until_ready(settings: Settings, ranks: _Ranks, ended: list[int]) -> None:
    deadline = time.monotonic() + settings.setup_timeout_s
    missing = set(range(settings.ep_size))
    while missing and not ended:
        if time.monotonic() > deadline:
            raise PutgetError(f"rank(s) {sorted(missing)} do not answer after {settings.setup_timeout_s:g} s")
        for rank, (kind, *values) in ranks.words():
            if kind == "error":
                raise PutgetError(f"rank {rank}: {values[0]}")
            missing -= {rank} if kind == "ready" else set()
        for rank in missing:
            if (code := ranks.exit_code(rank)) is not None and not ranks.is_heard(rank):
                raise PutgetError(f"rank {rank}: its process ended (exit code {code})")


@dataclass
class _Rank:
    """A rank's process, the last one of them."""

    process: BaseProcess
    pipe: Any
    is_heard: bool = True  # the pipe has more to say
    is_named: bool = False  # its end has been told
    is_loaded: bool = False  # a new process that waits to meet the others


class _Ranks:
    """All ranks. A rank that the others have left out gets a new process, which joins them once it has its weights."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOADED))
        self._all = set(range(settings.ep_size))
        self._ranks: dict[int, _Rank] = {}
        self._members = set(self._all)
        self._can_lose = settings.num_slots is not None or settings.balance != "off"
        self._attempt = 0
        self._said: dict[int, str | None] | None = None  # while an attempt is under way: whether ranks can go on
        self._deadline = 0.0  # of that
        self._joined: set[int] = set()  # members that do not answer requests yet
        self._failures = dict.fromkeys(self._all, 0)  # since a rank's process last answered
        self._not_before = dict.fromkeys(self._all, 0.0)
        self.url = f"http://{settings.host}:{settings.port}"

    def start(self, rank: int, store: str | None) -> None:
        """A process for a rank; without a file to meet by it waits for one."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_run, args=(self._settings, rank, store, theirs), name=f"rank {rank}", daemon=False
        )
        process.start()
        theirs.close()
        if rank in self._ranks:
            self._ranks[rank].pipe.close()
        self._ranks[rank] = _Rank(process, ours)

    def exit_code(self, rank: int) -> int | None:
        """None while its process runs."""
        return self._ranks[rank].process.exitcode

    def is_heard(self, rank: int) -> bool:
        """Whether its process may have said more than has been taken."""
        return self._ranks[rank].is_heard

    def words(self) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """The next words of ranks, after a while at the latest."""
        by_pipe = {one.pipe: rank for rank, one in self._ranks.items() if one.is_heard}
        ends = [one.process.sentinel for one in self._ranks.values() if not one.is_named]
        for pipe in wait([*by_pipe, *ends], timeout=_LOOK_S):
            if pipe in by_pipe:
                rank = by_pipe[pipe]
                try:
                    yield rank, self._ranks[rank].pipe.recv()
                except (EOFError, OSError):
                    self._ranks[rank].is_heard = False

    @property
    def has_members(self) -> bool:
        """Whether a rank is left that serves."""
        return any(self.exit_code(rank) is None for rank in self._members)

    @property
    def are_whole(self) -> bool:
        """Whether all ranks serve."""
        return self._members == self._all and all(self.exit_code(rank) is None for rank in self._all)

    def look(self) -> None:
        """Takes what ranks say, and does what follows from it."""
        for rank, (kind, *values) in self.words():
            if kind == "members" and rank in self._members:
                self._go_on(set(values[0]))
            elif kind == "loaded":
                self._ranks[rank].is_loaded = True
            elif kind == "can" and self._said is not None and values[0] == self._attempt:
                self._said[rank] = values[1]
            elif kind == "error":
                _tell(f"rank {rank}: {values[0]}")
            elif kind == "ready":
                self._joined.discard(rank)
                self._failures[rank] = 0
                print(f"putget serve: rank {rank} is back on {self.url}", flush=True)
        self._name_the_ended()
        if self._said is not None:
            self._decide(self._said)
        elif self._can_lose:
            self._bring_back()

    def _go_on(self, members: set[int]) -> None:
        if members == self._members:
            return
        self._members = members
        self._joined &= members
        _tell(f"ranks {', '.join(map(str, sorted(members)))} go on")
        for rank in self._all - members:
            self._ranks[rank].process.kill()  # it may stand still, and go on alone later

    def _name_the_ended(self) -> None:
        fate = "its experts are gone, so the other ranks answer 503: start the server again"
        if self._can_lose:
            fate = "the other ranks take over its experts, if they have room"
        for rank, one in self._ranks.items():
            if one.process.exitcode is not None and not one.is_named:
                one.is_named = True
                is_member = rank in self._members
                _tell(f"rank {rank} has ended (exit code {one.process.exitcode})" + (f"; {fate}" if is_member else ""))

    def _bring_back(self) -> None:
        """Starts a new process for each lost rank. Once all have their weights, all ranks meet."""
        lost = self._all - self._members
        for rank in lost:
            if self.exit_code(rank) is not None and time.monotonic() >= self._not_before[rank]:
                self._failures[rank] += 1  # until it answers
                delay = min(_MOST_DELAY_S, 2.0 ** self._failures[rank])
                self._not_before[rank] = time.monotonic() + delay
                self.start(rank, None)
        if lost and not self._joined and all(self._ranks[rank].is_loaded for rank in lost):
            self._attempt += 1
            self._said, self._deadline = {}, time.monotonic() + _JOIN_S
            self._send(self._all, "meet", str(self._folder / f"join{self._attempt}"), self._attempt)

    def _decide(self, said: dict[int, str | None]) -> None:
        """All ranks go on together if all can; otherwise those that served go on as before."""
        lost = self._all - self._members
        why = next((f"rank {rank}: {word}" for rank, word in sorted(said.items()) if word is not None), None)
        ends = [rank for rank in self._all if self.exit_code(rank) is not None]
        if why is None and ends:
            why = f"rank {ends[0]} has ended"
        if why is None and time.monotonic() > self._deadline:
            why = f"rank(s) {sorted(self._all - said.keys())} say nothing"
        if why is not None:
            self._said = None
            self._send(self._members, "go", self._attempt, False)
            for rank in lost:
                self._ranks[rank].process.kill()
            _tell(f"rank(s) {', '.join(map(str, sorted(lost)))} cannot join yet: {why}")
        elif said.keys() == self._all:
            self._said = None
            self._joined, self._members = lost, set(self._all)
            self._send(self._all, "go", self._attempt, True)

    def _send(self, ranks: set[int], *words: Any) -> None:
        for rank in ranks:
            try:
                self._ranks[rank].pipe.send(words)
            except OSError:
                continue  # it has ended, which is heard of

    def end(self) -> None:
        """Ends all processes."""
        processes = [one.process for one in self._ranks.values()]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _END_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _tell(what: str) -> None:
    print(f"putget serve: {what}", file=sys.stderr, flush=True)
