"""A worker of an engine that receives versions: each lands in a thread, beside serving, and waits for a decision.

No call waits for another worker. Data-parallel ranks of an engine take a call at different times: one may be in a step
that waits for the other, and would wait for ever if the other one waited in a call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import putget_transfer as pt
from putget_transfer.adapters.rendezvous import (
    Rendezvous,
    bytes_in,
    bytes_out,
    planned_slots,
    slots_out,
    trainers,
)
from putget_transfer.weights import Param, Rollout, Slots, UpdateFailed, plan

SLICE_S = 0.1
"""How often the thread that waits for bytes asks whether the version was given up."""


class Settings(Protocol):
    """Settings that all workers and trainers have agreed on."""

    num_trainers: int
    num_workers: int
    commit: str
    unused: list[str]
    delta_bytes: int


@dataclass
class _Version:
    """A version that lands, in a thread of its own."""

    number: int
    end: float
    given_up: bool = False
    done: Future[None] = field(default_factory=Future)


class Receiver:
    """Receives versions, and says through the rendezvous what they have come to.

    Attributes:
        rollout: The rollout rank; None until the first version.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        rendezvous: Rendezvous,
        engine: pt.Engine,
        params: Sequence[Param],
        slots: Slots,
        settings: Settings,
        *,
        move: Callable[[], None],
        changed: Callable[[bool], None] = lambda _mixed: None,
    ) -> None:
        """Tell all others this worker's slots.

        Args:
            name: The engine's name, for errors.
            rank: This worker, counted over all replicas.
            rendezvous: Where trainers and workers meet.
            engine: The engine that receives. `shutdown` closes it.
            params: The trainers' parameters.
            slots: This worker's slots, with the memory that versions land in.
            settings: What all have agreed on.
            move: Brings a complete version into the model.
            changed: Called with True where the model may be mixed from now on, and with False where it is whole.
        """
        self.name, self.rank, self.rendezvous, self.engine = name, rank, rendezvous, engine
        self.params, self.slots, self.settings, self.move, self.changed = params, slots, settings, move, changed
        self.rollout: Rollout | None = None
        self.version: _Version | None = None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="putget weights")
        rendezvous.put(f"slots/{rank}", slots_out(slots))

    def begin(self, number: int, deadline_s: float) -> None:
        """Let a version land. One before that was not decided is given up."""
        self.give_up("another version came")
        self.version = _Version(number, time.monotonic() + deadline_s)
        self.version.done = self.pool.submit(self._receive, self.version)

    def _receive(self, version: _Version) -> None:
        """Receive a version, and vote."""
        problem = ""
        try:
            self._land(version)
        except Exception as error:
            problem = f"{self.name} worker {self.rank}: {error}"
            if self.rollout is not None:
                self.rollout.abort(problem)
            self._tell()
        with contextlib.suppress(UpdateFailed):  # the trainer is gone, and misses the vote
            if problem:
                self.rendezvous.put(f"failed/{version.number}", problem)
            self.rendezvous.put(f"vote/{version.number}/{self.rank}", problem)

    def _land(self, version: _Version) -> None:
        number, end, settings = version.number, version.end, self.settings

        def watch() -> None:
            if version.given_up:
                raise UpdateFailed("it was given up")
            if self.rendezvous.has(f"failed/{number}"):
                raise UpdateFailed(self.rendezvous.take({f"failed/{number}": "trainers"}, end)[0])

        if self.rollout is None:
            # All slots have been told by now: the trainers have planned with them.
            slots = planned_slots(self.rendezvous, settings.num_workers, end, watch, self.name)
            schedule = plan(self.params, slots, unused=settings.unused)
            commit: Any = settings.commit
            self.rollout = Rollout(
                self.engine,
                self.slots,
                schedule,
                self.rank,
                commit=commit,
                move=self.move,
                delta_bytes=settings.delta_bytes,
            )
        rollout = self.rollout
        found = self.rendezvous.take(trainers("trainer", settings.num_trainers), end, watch)
        addresses = {rank: bytes_in(address) for rank, address in enumerate(found)}
        offers = rollout.expect(number, addresses, max(end - time.monotonic(), 0.0))
        self._tell()
        told = {str(rank): bytes_out(offer) for rank, offer in offers.items()}
        self.rendezvous.put(f"offers/{number}/{self.rank}", told)
        while offers and not rollout.ready(SLICE_S):
            watch()

    def finish(self, decided: int | None = None) -> None:
        """Bring the version that has landed into force, if the trainers have decided so; otherwise give it up.

        Args:
            decided: The version that the caller's word has decided for; None: what the rendezvous says counts.

        Raises:
            UpdateFailed: Another version was decided for than has landed, or the rendezvous does not say: the engine
                must not label the old version as the new one.
        """
        version = self.version
        number = None if version is None else version.number
        if decided is not None and decided != number:
            raise UpdateFailed(f"{self.name} worker {self.rank}: version {decided} was decided; {number} has landed")
        if version is None or number is None:
            return
        try:
            is_decided = decided is not None or self.rendezvous.has(f"commit/{number}")
        except UpdateFailed:
            self.give_up("the trainer is gone")
            raise
        if self.rollout is None or not is_decided:
            self.give_up("the trainer has not decided for it")
            return
        version.done.result()  # it has voted: otherwise the trainer would not have decided
        self.version = None
        self.rollout.commit(number)
        self._tell()

    def give_up(self, reason: str) -> None:
        """End what lands, if anything does. The old version stays."""
        if self.version is not None:
            self.version.given_up = True
            self.version.done.exception()  # it ends at once
            self.version = None
        if self.rollout is not None:
            self.rollout.abort(reason)
            self._tell()

    def _tell(self) -> None:
        """Say whether the model may be mixed."""
        rollout = self.rollout
        if rollout is not None:
            lands_inside = self.settings.commit == "paused" and rollout.state == "filling"
            self.changed(rollout.state == "torn" or lands_inside)

    def shutdown(self) -> None:
        """Give up what is landing, and close the engine. The model keeps its weights."""
        self.give_up("the transfer engine was shut down")
        self.pool.shutdown(wait=False)
        self.engine.close()
