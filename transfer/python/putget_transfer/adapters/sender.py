"""A trainer rank whose versions go to workers of an engine: all of them take a version, or none does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import putget_transfer as pt
from putget_transfer import weights
from putget_transfer.adapters.rendezvous import (
    Rendezvous,
    bytes_in,
    bytes_out,
    forget,
    params_in,
    params_out,
    planned_slots,
    trainers,
    workers,
)
from putget_transfer.weights import Report, UpdateFailed

GRACE_S = 15.0
"""How long after the deadline workers may take to say that they have failed."""


class Sender:
    """Sends versions of a model, and decides on rank 0 whether they come into force.

    Attributes:
        begun: It has planned with all others (`begin`).
    """

    def __init__(
        self,
        name: str,
        rank: int,
        num_trainers: int,
        num_workers: int,
        rendezvous: Rendezvous,
        engine: pt.Engine,
        *,
        deltas: bool = False,
    ) -> None:
        """Say where this rank is.

        Args:
            name: The engine's name, for errors.
            rank: This rank.
            num_trainers: Trainer ranks.
            num_workers: Workers of all replicas.
            rendezvous: Where trainers and workers meet.
            engine: The engine that writes. It is closed with this object.
            deltas: Send changes where they are less.
        """
        self.name, self.rank, self.num_trainers, self.num_workers = name, rank, num_trainers, num_workers
        self.rendezvous, self.engine, self.deltas = rendezvous, engine, deltas
        self.trainer: weights.Trainer
        self.begun = False
        self.sent: int | None = None
        self.told: list[int] = []
        """Versions for which workers may have spoken: since the last but one that is in force."""
        rendezvous.put(f"trainer/{rank}", bytes_out(engine.main_address().to_bytes()))

    def begin(
        self,
        model: Any,
        end: float,
        *,
        unused: Sequence[str] = (),
        told: Callable[[], None] = lambda: None,
        watch: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        """Plan with all workers and trainer ranks.

        Args:
            model: What is sent.
            end: When (of `time.monotonic`) what is missing counts as failed.
            unused: Names that no worker needs.
            told: Called on rank 0 when the parameters of all ranks are known: workers can begin.
            watch: Called while it waits; it raises to end that.
            options: Those of `putget_transfer.weights.Trainer`.
        """
        self.rendezvous.put(f"described/{self.rank}", params_out(weights.describe(model, rank=self.rank)))
        found = self.rendezvous.take(trainers("described", self.num_trainers), end, watch)
        params = weights.merge([params_in(one) for one in found])
        if self.rank == 0:
            self.rendezvous.put("params", params_out(params))
            told()
        slots = planned_slots(self.rendezvous, self.num_workers, end, watch, self.name)
        schedule = weights.plan(params, slots, unused=list(unused))
        self.trainer = weights.Trainer(self.engine, schedule, self.rank, model, deltas=self.deltas, **options)
        self.begun = True

    def send(
        self,
        version: int,
        end: float,
        commit: Callable[[], None] = lambda: None,
        announce: Callable[[], None] = lambda: None,
        watch: Callable[[], None] = lambda: None,
    ) -> Report:
        """Send a version. All trainer ranks do so at the same time.

        Args:
            version: Its number.
            end: When (of `time.monotonic`) it has failed.
            commit: Called on rank 0 when the version has landed in all workers and is decided.
            announce: Called first; where it fails the version does.
            watch: Called while it waits for others, but not while it writes; it raises to end that.

        Raises:
            UpdateFailed: It came into force in no worker, or that is not known. Why is named.
        """
        outcome = ""
        try:
            announce()
            if self.rank == 0:
                forget(self.rendezvous, self.told, version, self.num_workers, self.name)
            report = self._published(version, end, watch)
            if self.rank == 0:
                self._decide(version, end, watch)
                commit()
        except BaseException as error:  # an interrupt, too: others must not take the version for one in force
            outcome = f"trainer rank {self.rank}: {str(error) or type(error).__name__}"
            with contextlib.suppress(UpdateFailed):
                self.rendezvous.put(f"failed/{version}", outcome)
            raise
        finally:
            if self.rank == 0:
                with contextlib.suppress(UpdateFailed):
                    self.rendezvous.put(f"end/{version}", outcome)
        if self.rank:
            (outcome,) = self.rendezvous.take({f"end/{version}": "trainer rank 0"}, end + 2 * GRACE_S, watch)
            if outcome:
                raise UpdateFailed(outcome)
        self.sent = version
        del self.told[:-2]
        return report

    def _published(self, version: int, end: float, own_watch: Callable[[], None]) -> Report:
        """Write to all workers, as soon as they expect the version."""

        def watch() -> None:
            own_watch()
            if self.rendezvous.has(f"failed/{version}"):
                raise UpdateFailed(self.rendezvous.take({f"failed/{version}": "a worker"}, end)[0])

        offers = self.rendezvous.take(workers(f"offers/{version}", self.num_workers, self.name), end, watch)
        own = [bytes_in(one[str(self.rank)]) for one in offers if str(self.rank) in one]
        since = self.sent if self.deltas else None
        report: Report = self.trainer.publish(version, max(end - time.monotonic(), 0.0), offers=own, since=since)
        if report.failed:
            failed = (f"{self.name} worker {rank}: {error}" for rank, error in report.failed.items())
            raise UpdateFailed("; ".join(failed))
        return report

    def _decide(self, version: int, end: float, watch: Callable[[], None]) -> None:
        """Decide for a version that has landed in all workers."""
        votes = self.rendezvous.take(workers(f"vote/{version}", self.num_workers, self.name), end + GRACE_S, watch)
        if any(votes):
            raise UpdateFailed(f"version {version}: {'; '.join(filter(None, votes))}")
        self.rendezvous.put(f"commit/{version}", "")

    def close(self) -> None:
        """Close the engine. Workers keep their weights."""
        self.engine.close()
