"""Updates of all replicas: each commits as a whole, or keeps its version."""

from __future__ import annotations

import json
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from putget_transfer.weights._model import UpdateFailed
from putget_transfer.weights._offer import read_offer


@dataclass
class Update:
    """The outcome of an update.

    Attributes:
        version: The version.
        seconds: From the first call to the last commit.
        committed: Replicas that have the version.
        failed: Replicas that do not have it, and why.
        trainers: The trainers' reports, by rank, as they were returned.
    """

    version: int
    seconds: float = 0.0
    committed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    trainers: dict[int, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as JSON."""
        reports = {rank: json.loads(report.to_json()) for rank, report in self.trainers.items()}
        return json.dumps({**asdict(self), "trainers": reports})


class Controller:
    """Updates replicas of rollout ranks from trainer ranks.

    It needs the methods of `Trainer` (`address`, `publish`) and `Rollout` (`expect`, `ready`, `commit`, `abort`), in
    this process or by whatever reaches the ranks: Ray, HTTP, a pipe. Calls of different ranks run at the same time.
    """

    def __init__(self, trainers: Sequence[Any], replicas: Mapping[str, Sequence[Any]]) -> None:
        """Take trainer ranks in their order, and the rollout ranks of each replica by its name."""
        self.trainers = list(trainers)
        self.replicas = {name: list(ranks) for name, ranks in replicas.items()}
        self.version = 0
        self._joined: set[str] = set()
        """Replicas that have come since that version."""
        self._busy = threading.Lock()
        self._late: dict[Future[Any], Any] = {}
        """Calls of updates before that have not ended, and their ranks."""

    def join(self, name: str, ranks: Sequence[Any]) -> None:
        """Add a replica, or one that was out: it gets the next version whole.

        Raises:
            ValueError: A replica of this name takes part already, or an update is running.
        """
        self._between("join")
        try:
            if name in self.replicas:
                raise ValueError(f"name: {name!r} came; that replica takes part already")
            self.replicas[name] = list(ranks)
            self._joined.add(name)
        finally:
            self._busy.release()

    def leave(self, name: str) -> None:
        """Take a replica out.

        Raises:
            ValueError: No replica of this name takes part, or an update is running.
        """
        self._between("leave")
        try:
            if self.replicas.pop(name, None) is None:
                raise ValueError(f"name: {name!r} came; {sorted(self.replicas)} take part")
            self._joined.discard(name)
        finally:
            self._busy.release()

    def _between(self, what: str) -> None:
        if not self._busy.acquire(blocking=False):
            raise ValueError(f"{what}: it came while an update is running")

    def update(self, version: int, deadline_s: float, since: int | None = None) -> Update:
        """Bring a version from the trainers to all replicas.

        A replica of which a rank fails is out, by name: the others commit, and it joins again with `join`. So is one
        with a rank that a trainer could not write to (`Report.failed`), as soon as the trainer's report says so.

        An interrupt (`KeyboardInterrupt`) gives the version up in all ranks. Once they commit, it waits for that: then
        the version is in force. A second interrupt does not wait; what is under way ends in the background.

        Args:
            version: The version. The one in force begins nothing. Replicas that have joined since without it are in
                `failed`; they take part, and get the next one.
            deadline_s: Time until what has not come counts as failed.
            since: The version before, of which only changes go (`Trainer.publish`).

        Raises:
            ValueError: An older version, an update is running, or two rollout ranks have the same number.
            UpdateFailed: No replica has the version: trainers failed, or all replicas. They are named.
        """
        version = operator.index(version)  # reports and offers have Python's own integers
        self._between(f"version {version}")
        running = None
        try:
            if version < self.version:
                raise ValueError(f"version: {version} came; {self.version} is in force")
            if version == self.version:
                late = dict.fromkeys(self._without(version), "it has joined since, and gets the next one")
                return Update(version, committed=sorted(self.replicas.keys() - late), failed=late)
            running = _Running(self, version, deadline_s, since)
            return running.run()
        finally:
            if running is None:
                self._busy.release()
            else:  # after a second interrupt it goes on for a while
                running.outcome.add_done_callback(lambda _: self._busy.release())

    def _without(self, version: int) -> list[str]:
        """Return the replicas that have joined since a version came into force, and do not have it."""
        return [
            name
            for name in sorted(self._joined)
            if not all(getattr(rank, "version", None) == version for rank in self.replicas[name])
        ]


GRACE_S = 10.0
"""How long after the deadline all ranks of a stage may take to answer: the engine's own `grace` lies in it."""
ABORT_S = 2.0
"""How long ranks of replicas that are out may take to give a version up, before an update goes on without them."""
GIVE_UP = "its replica is out"
"""The reason that ranks of such replicas are told."""


class _GivenUp(BaseException):
    """The caller of an update was interrupted."""


class _Running:
    """One update. It runs in a thread of its own, so that an interrupt of its caller ends it between two steps."""

    def __init__(self, owner: Controller, version: int, deadline_s: float, since: int | None) -> None:
        self.owner = owner
        num_ranks = len(owner.trainers) + sum(map(len, owner.replicas.values()))
        self.pool = ThreadPoolExecutor(1 + 2 * num_ranks)  # a rank may be told to give up while a call is under way
        self.outcome: Future[Update] = Future()
        self.stopped: Future[None] = Future()
        """Done as soon as the caller was interrupted, unless ranks commit already."""
        self.commits = False
        self.gate = threading.Lock()
        """Taken to stop, and to begin with commits: only one of the two happens."""
        self.options = {} if since is None else {"since": since}
        self.begin = time.monotonic()
        self.end = self.begin + deadline_s
        self.update = Update(version)
        self.blamed: list[str] = []
        self.places: dict[int, tuple[str, int]] = {}
        """Replica and number in it, by the rank of offers, which counts over all replicas."""
        self.aborts: dict[str, list[Future[Any]]] = {}
        self.calls: dict[Future[Any], Any] = {}
        """All calls, and their ranks."""

    def left(self) -> float:
        return max(self.end - time.monotonic(), 0.0)

    def _until(self) -> float:
        """Return the time until which a stage that begins now waits for answers."""
        return max(self.end, time.monotonic()) + GRACE_S

    def _answer(self, future: Future[Any], until: float) -> Any:
        """Return what a rank has answered."""
        wait([future, self.stopped], max(until - time.monotonic(), 0.0), FIRST_COMPLETED)
        if self.stopped.done():
            raise _GivenUp
        if not future.done():
            raise UpdateFailed("no answer came by the deadline")
        return future.result()

    def _out(self, name: str, reason: str) -> None:
        self.update.failed.setdefault(name, reason)

    def _in(self) -> dict[str, list[Any]]:
        return {name: ranks for name, ranks in self.owner.replicas.items() if name not in self.update.failed}

    def _call(self, call: Callable[..., Any], rank: Any, *arguments: Any, **named: Any) -> Future[Any]:
        future = self.pool.submit(call, rank, *arguments, **named)
        self.calls[future] = rank
        return future

    def _all(self, call: Callable[[Any], Any], ranks: Iterable[Any]) -> list[Future[Any]]:
        return [self._call(call, rank) for rank in ranks]

    def _alone(self, rank: Any) -> None:
        """Wait until calls of updates before have ended in a rank: one of them might give up what begins now."""
        wait([call for call, of in self.owner._late.items() if of is rank], self.left())

    def _of_replicas(self, call: Callable[[str, Any], Any]) -> dict[str, list[Any]]:
        """Call all ranks of the replicas that take part; a replica with a rank that raises is out."""
        calls = {name: self._all(partial(call, name), ranks) for name, ranks in self._in().items()}
        results: dict[str, list[Any]] = {}
        until = self._until()
        for name, futures in calls.items():
            for rank, future in enumerate(futures):
                try:
                    results.setdefault(name, []).append(self._answer(future, until))
                except Exception as error:
                    self._out(name, f"rank {rank}: {error}")
                    self.blamed += [blamed for blamed in getattr(error, "missing", []) if blamed not in self.blamed]
        return {name: found for name, found in results.items() if name not in self.update.failed}

    def _addresses(self) -> dict[int, bytes]:
        """Return how rollout ranks know each trainer rank. Nothing begins if one does not answer."""
        calls = self._all(lambda trainer: trainer.address(), self.owner.trainers)
        addresses: dict[int, bytes] = {}
        failed: dict[str, str] = {}
        until = self._until()
        for number, call in enumerate(calls):
            try:
                addresses[number] = self._answer(call, until)
            except Exception as error:
                failed[f"trainer rank {number}"] = str(error)
        if failed:
            text = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise UpdateFailed(f"version {self.update.version} has not begun: {text}", failed)
        return addresses

    def _expect(self, addresses: Mapping[int, bytes]) -> list[dict[int, bytes]]:
        """Have all replicas expect the version; return the offers of each of their ranks."""
        found: list[dict[int, bytes]] = []
        version = self.update.version

        def expect(name: str, rank: Any) -> Any:
            self._alone(rank)
            try:
                return rank.expect(version, addresses, self.left())
            finally:
                if name in self.aborts:  # it was told to give up before it had begun
                    rank.abort(GIVE_UP)

        expected = self._of_replicas(expect)
        for name, replica in expected.items():
            try:
                ranks = [read_offer(next(iter(offers.values())))["rank"] if offers else None for offers in replica]
            except ValueError as error:
                self._out(name, str(error))
                continue
            self._place(name, ranks)
            found += replica
        return found

    def _place(self, name: str, ranks: Sequence[int | None]) -> None:
        """Note where each rollout rank is. Two with one number would get only one's bytes."""
        for number, rank in enumerate(ranks):
            if rank is None:
                continue
            other, at = self.places.setdefault(rank, (name, number))
            if (other, at) != (name, number):
                raise ValueError(
                    f"replicas: rollout rank {rank} came twice, as {at} of {other!r} and as {number} of {name!r}; the "
                    "`rank` of `Rollout` counts over all replicas, and `plan(..., replicas=)` says how many there are"
                )

    def _publish(self, addresses: Mapping[int, bytes]) -> dict[str, str]:
        """Have all trainers write; return those that failed."""
        offers = self._expect(addresses)
        if not any(offers):
            return {}  # each has the version already, or nobody takes part

        def publish(trainer: Any, offers: list[bytes]) -> Any:
            self._alone(trainer)
            return trainer.publish(self.update.version, self.left(), offers=offers, **self.options)

        calls = {
            self._call(publish, trainer, [one[number] for one in offers if number in one]): number
            for number, trainer in enumerate(self.owner.trainers)
        }
        failed: dict[int, str] = {}
        reports: dict[int, Any] = {}
        until = self._until()
        waiting = set(calls)
        while waiting:
            wait([*waiting, self.stopped], max(until - time.monotonic(), 0.0), FIRST_COMPLETED)
            done = {call for call in waiting if call.done()} or waiting  # none by the deadline: all have failed
            waiting = waiting - done
            for call in done:
                number = calls[call]
                try:
                    reports[number] = self._answer(call, until)
                    self._unwritten(number, reports[number].failed)
                except Exception as error:
                    failed[number] = str(error)
        self.update.trainers = dict(sorted(reports.items()))
        return {f"trainer rank {number}": failed[number] for number in sorted(failed)}

    def _unwritten(self, trainer: int, failed: Mapping[int, str]) -> None:
        """Take replicas out that a trainer could not write to: their ranks do not become complete any more."""
        for rank, reason in failed.items():
            name, number = self.places[rank]
            self._out(name, f"rank {number}: trainer rank {trainer} could not write to it: {reason}")
        self._abort()  # other trainers need not go on writing to their ranks

    def _abort(self) -> None:
        """Have ranks of replicas that are out give the version up."""
        for name in self.update.failed:
            if name not in self.aborts:
                self.aborts[name] = []  # calls that end from now on know it
                self.aborts[name] += self._all(lambda rank: rank.abort(GIVE_UP), self.owner.replicas[name])

    def run(self) -> Update:
        """Run it, and return its outcome; an interrupt leaves no replica between two versions."""
        try:
            self.pool.submit(self._runs)
            return self.outcome.result()
        except BaseException:
            if not self.outcome.cancel():  # else it has not begun, and does not begin any more
                self._stop()
                wait([self.outcome])
            raise

    def _stop(self) -> None:
        with self.gate:
            if not self.commits:
                self.stopped.set_result(None)

    def _begin_commits(self) -> None:
        with self.gate:
            if self.stopped.done():
                raise _GivenUp
            self.commits = True

    def _runs(self) -> None:
        """Run it, and tell the caller, whatever happens."""
        try:
            if self.outcome.set_running_or_notify_cancel():
                self.outcome.set_result(self._ended())
        except BaseException as error:
            self.outcome.set_exception(error)
        finally:
            self.pool.shutdown(wait=False)  # a call that does not come back is not waited for

    def _ended(self) -> Update:
        try:
            return self._run()
        except UpdateFailed:
            raise
        except BaseException:
            self._interrupted()
            raise
        finally:  # calls that have not ended are left to the next update
            calls = {**self.owner._late, **self.calls}
            self.owner._late = {call: rank for call, rank in calls.items() if not call.done()}

    def _interrupted(self) -> None:
        """Have all ranks give the version up: trainers end as soon as rollout ranks have shut them out."""
        if self.commits:
            wait(self.calls, self._until() - time.monotonic())
        for name in self._in():
            self._out(name, "the update was interrupted")
        self._abort()
        wait(self.calls, ABORT_S)

    def _run(self) -> Update:
        version = self.update.version
        failed = self._publish(self._addresses())

        def ready(_name: str, rank: Any) -> None:
            if getattr(rank, "version", None) == version:
                return
            # Where trainers have failed, what is missing does not come any more.
            if not rank.ready(0.0 if failed else self.left()):
                raise UpdateFailed(f"not complete: {'; '.join(failed.values()) or 'the deadline came'}")

        self._of_replicas(ready)
        self._begin_commits()
        self._of_replicas(lambda _name, rank: rank.commit(version))
        self.update.committed = sorted(self._in())
        self.update.seconds = time.monotonic() - self.begin
        self._abort()
        wait([call for calls in self.aborts.values() for call in calls], ABORT_S)
        if not self.update.committed:
            names = [*failed, *self.blamed] or sorted(self.update.failed)
            words = {**failed, **self.update.failed}
            text = "; ".join(f"{name}: {reason}" for name, reason in words.items())
            raise UpdateFailed(f"version {version} is in force nowhere: {text}", dict.fromkeys(names))
        for name in self.update.failed:
            self.owner.replicas.pop(name, None)
        self.owner.version = version
        self.owner._joined.clear()
        return self.update
