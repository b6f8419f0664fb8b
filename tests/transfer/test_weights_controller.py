"""Replicas that a trainer could not write to: they are out at once, and the others commit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer import weights
from putget_transfer.weights import _controller
from putget_transfer.weights._offer import make_offer, read_offer
from tests.transfer.weights_cluster import DEADLINE_S, Cluster

LONG_S = 60.0
"""A deadline that nobody waits for."""
REASON = "its heartbeat was missed"


@pytest.fixture
def make() -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def build(**options: Any) -> Cluster:
        made.append(Cluster(**options))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


def refuse(trainer: Any, lost: set[int]) -> None:
    """Have a trainer write nothing to some rollout ranks, and report them."""
    publish = trainer.publish

    def without(*arguments: Any, offers: list[bytes], **named: Any) -> weights.Report:
        kept = [offer for offer in offers if read_offer(offer)["rank"] not in lost]
        report: weights.Report = publish(*arguments, offers=kept, **named)
        report.failed.update(dict.fromkeys(lost, REASON))
        return report

    trainer.publish = without


def test_a_rank_that_a_trainer_could_not_write_to_takes_its_replica_out_at_once(make: Callable[..., Cluster]) -> None:
    cluster = make(replicas=2)
    refuse(cluster.trainer, {3})
    cluster.source.set(1)
    begun = time.monotonic()
    update = cluster.controller.update(1, LONG_S)
    assert time.monotonic() - begun < LONG_S / 4
    assert update.committed == ["replica 0"]
    assert update.failed == {"replica 1": f"rank 1: trainer rank 0 could not write to it: {REASON}"}
    assert cluster.versions() == [[1], [1], [0], [0]]
    # Both ranks of the replica have given the version up, also the one that has all of it.
    assert [rollout.landing for rollout in cluster.rollouts] == [None] * 4
    assert list(cluster.controller.replicas) == ["replica 0"]
    del cluster.trainer.publish
    cluster.controller.join("replica 1", cluster.rollouts[2:])
    cluster.source.set(2)
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0", "replica 1"]
    assert cluster.versions() == [[2]] * 4


def test_without_a_replica_left_the_reasons_are_told_at_once(make: Callable[..., Cluster]) -> None:
    cluster = make(replicas=2)
    refuse(cluster.trainer, {0, 3})
    cluster.source.set(1)
    begun = time.monotonic()
    with pytest.raises(weights.UpdateFailed) as failed:
        cluster.controller.update(1, LONG_S)
    assert time.monotonic() - begun < LONG_S / 4
    assert failed.value.missing == ["replica 0", "replica 1"]
    words = "trainer rank 0 could not write to it"
    reasons = f"replica 0: rank 0: {words}: {REASON}; replica 1: rank 1: {words}: {REASON}"
    assert str(failed.value) == f"version 1 is in force nowhere: {reasons}"
    assert cluster.versions() == [[0]] * 4
    del cluster.trainer.publish
    cluster.source.set(2)
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0", "replica 1"]


def test_two_rollout_ranks_with_one_number_are_named_before_a_trainer_writes(make: Callable[..., Cluster]) -> None:
    cluster = make(replicas=2)
    known = cluster.controller.replicas["replica 1"][1]
    # A replica that counts its ranks from 0 again.
    twin = weights.Rollout(cluster.engine(), known.slots, cluster.schedule, 1)
    cluster.controller.replicas["replica 1"][1] = twin
    cluster.source.set(1)
    cluster.trainer.publish = lambda *_, **__: pytest.fail("a trainer was asked to write")
    with pytest.raises(ValueError, match="rollout rank 1 came twice, as 1 of 'replica 0' and as 1 of 'replica 1'; the"):
        cluster.controller.update(1, LONG_S)
    assert [rollout.landing for rollout in [*cluster.rollouts[:3], twin]] == [None] * 4
    twin.engine.close()
    del cluster.trainer.publish
    cluster.controller.replicas["replica 1"][1] = known
    assert cluster.controller.update(1, DEADLINE_S).committed == ["replica 0", "replica 1"]
    assert cluster.versions() == [[1]] * 4


class Interrupts:
    """Ctrl-C while a rank's call is under way, and what comes of it."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.monkeypatch = cluster, monkeypatch
        self.aborted, self.waiting = threading.Event(), threading.Event()
        self.wanted = self.raised = 0
        waits = _controller.wait
        abort = cluster.rollouts[1].abort

        def wait(*arguments: Any) -> Any:
            if self.raised and threading.current_thread() is threading.main_thread():
                self.waiting.set()
            return waits(*arguments)

        def gives_up(reason: str) -> None:
            abort(reason)
            self.aborted.set()

        monkeypatch.setattr(_controller, "wait", wait)
        monkeypatch.setattr(cluster.rollouts[1], "abort", gives_up)

    def handle(self, *_: Any) -> None:
        if self.raised < self.wanted:
            self.raised += 1
            raise KeyboardInterrupt

    def send(self) -> None:
        """Interrupt the main thread once. The thread misses a signal that comes just before it begins to wait."""
        ident = threading.main_thread().ident
        assert ident is not None
        self.wanted += 1
        end = time.monotonic() + DEADLINE_S
        while self.raised < self.wanted:
            assert time.monotonic() < end
            signal.pthread_kill(ident, signal.SIGINT)
            time.sleep(0.2)

    def during(self, owner: Any, name: str, until: threading.Event) -> None:
        """Interrupt the first call of a method; it goes on after an event."""
        call, calls = getattr(owner, name), []

        def interrupts(*arguments: Any, **named: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                self.send()
                assert until.wait(DEADLINE_S)
            return call(*arguments, **named)

        self.monkeypatch.setattr(owner, name, interrupts)


@pytest.fixture
def interrupts(make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    made = Interrupts(make(replicas=2), monkeypatch)
    before = signal.signal(signal.SIGINT, made.handle)
    yield made
    signal.signal(signal.SIGINT, before)


def interrupted(cluster: Cluster, version: int) -> None:
    """Check that an update is interrupted, after which all ranks have a version, and that the next one arrives."""
    cluster.source.set(1)
    with pytest.raises(KeyboardInterrupt):
        cluster.controller.update(1, LONG_S)
    assert [rollout.landing for rollout in cluster.rollouts] == [None] * 4
    assert [rollout.state for rollout in cluster.rollouts] == ["whole"] * 4
    assert [rollout.version for rollout in cluster.rollouts] == [version] * 4
    assert cluster.versions() == [[version]] * 4
    assert cluster.controller.version == version
    cluster.source.set(2)
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0", "replica 1"]
    assert cluster.versions() == [[2]] * 4


@pytest.mark.parametrize("stage", ["expect", "ready"])
def test_an_update_interrupted_in_a_call_of_a_rollout_rank_is_given_up(interrupts: Interrupts, stage: str) -> None:
    # The rank is told to give up before the call has begun with anything.
    interrupts.during(interrupts.cluster.rollouts[1], stage, interrupts.aborted)
    interrupted(interrupts.cluster, 0)


@pytest.mark.parametrize("call", ["address", "publish", "_task"])
def test_an_update_interrupted_in_a_call_of_a_trainer_is_given_up(interrupts: Interrupts, call: str) -> None:
    until = interrupts.waiting if call == "address" else interrupts.aborted
    interrupts.during(interrupts.cluster.trainer, call, until)
    interrupted(interrupts.cluster, 0)


def test_an_update_interrupted_in_a_commit_is_in_force_in_the_whole_replica(interrupts: Interrupts) -> None:
    cluster = interrupts.cluster
    first, committed = cluster.rollouts[0].commit, threading.Event()
    second = cluster.rollouts[1].commit

    def commits(version: int) -> None:
        first(version)
        committed.set()

    def slowly(version: int) -> None:
        assert committed.wait(DEADLINE_S)
        if version == 1:
            interrupts.send()
            assert interrupts.waiting.wait(DEADLINE_S)
        second(version)

    interrupts.monkeypatch.setattr(cluster.rollouts[0], "commit", commits)
    interrupts.monkeypatch.setattr(cluster.rollouts[1], "commit", slowly)
    interrupted(cluster, 1)
    assert not interrupts.aborted.is_set()


def test_after_a_second_interrupt_the_commits_go_on_and_nothing_else_begins(interrupts: Interrupts) -> None:
    cluster, goes_on = interrupts.cluster, threading.Event()
    commit = cluster.rollouts[1].commit

    def slowly(version: int) -> None:
        if version == 1:
            interrupts.send()
            assert interrupts.waiting.wait(DEADLINE_S)
            interrupts.send()
            assert goes_on.wait(DEADLINE_S)
        commit(version)

    interrupts.monkeypatch.setattr(cluster.rollouts[1], "commit", slowly)
    cluster.source.set(1)
    with pytest.raises(KeyboardInterrupt):
        cluster.controller.update(1, LONG_S)
    with pytest.raises(ValueError, match="an update is running"):
        cluster.controller.update(2, LONG_S)
    goes_on.set()
    assert cluster.controller._busy.acquire(timeout=DEADLINE_S)
    cluster.controller._busy.release()
    assert cluster.controller.version == 1
    assert cluster.versions() == [[1]] * 4
    cluster.source.set(2)
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0", "replica 1"]


def test_the_next_update_waits_for_a_call_that_an_interrupt_has_left(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, goes_on, over = interrupts.cluster, threading.Event(), threading.Event()
    first, second = cluster.rollouts[0].expect, cluster.rollouts[1].expect
    monkeypatch.setattr(_controller, "ABORT_S", 0.0)

    def expects(version: int, *arguments: Any) -> dict[int, bytes]:
        if version == 2:
            goes_on.set()
        return first(version, *arguments)

    def slowly(version: int, *arguments: Any) -> dict[int, bytes]:
        if version == 2:
            assert over.is_set()
            return second(version, *arguments)
        interrupts.send()
        assert goes_on.wait(DEADLINE_S)
        offers = second(version, *arguments)
        over.set()
        return offers

    monkeypatch.setattr(cluster.rollouts[0], "expect", expects)
    monkeypatch.setattr(cluster.rollouts[1], "expect", slowly)
    cluster.source.set(1)
    with pytest.raises(KeyboardInterrupt):
        cluster.controller.update(1, LONG_S)
    assert not over.is_set()
    cluster.source.set(2)
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0", "replica 1"]
    assert cluster.versions() == [[2]] * 4


def test_a_replica_that_has_joined_since_is_not_said_to_have_the_version(make: Callable[..., Cluster]) -> None:
    cluster = make(replicas=2)
    cluster.controller.leave("replica 1")
    cluster.source.set(1)
    assert cluster.controller.update(1, DEADLINE_S).committed == ["replica 0"]
    cluster.controller.join("replica 1", cluster.rollouts[2:])
    again = cluster.controller.update(1, DEADLINE_S)
    assert again.committed == ["replica 0"]
    assert again.failed == {"replica 1": "it has joined since, and gets the next one"}
    assert cluster.versions() == [[1], [1], [0], [0]]
    cluster.source.set(2)
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0", "replica 1"]
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0", "replica 1"]


def test_a_replica_that_joins_with_the_version_in_force_has_it(make: Callable[..., Cluster]) -> None:
    cluster = make(replicas=2)
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    cluster.controller.leave("replica 1")
    cluster.controller.join("replica 1", cluster.rollouts[2:])
    again = cluster.controller.update(1, DEADLINE_S)
    assert (again.committed, again.failed) == (["replica 0", "replica 1"], {})


class Source:
    """A trainer rank without parameters, which reports some ranks, after an event if there is one."""

    def __init__(self, failed: dict[int, str], after: threading.Event | None = None) -> None:
        self.failed, self.after = failed, after

    def address(self) -> bytes:
        return b""

    def publish(self, version: int, _deadline_s: float, *, offers: list[bytes]) -> weights.Report:
        assert offers
        assert self.after is None or self.after.wait(DEADLINE_S)
        return weights.Report(version, 0, failed=self.failed)


class Target:
    """A rollout rank without slots."""

    version = 0

    def __init__(self, rank: int, offer: bytes | None = None) -> None:
        self.offer = make_offer("", 1, rank, b"", 0, b"", b"") if offer is None else offer
        self.aborted = threading.Event()

    def expect(self, _version: int, trainers: dict[int, bytes], _deadline_s: float) -> dict[int, bytes]:
        return dict.fromkeys(trainers, self.offer)

    def ready(self, _timeout_s: float) -> bool:
        return True

    def commit(self, version: int) -> None:
        self.version = version

    def abort(self, _reason: str) -> None:
        self.aborted.set()


def test_a_replica_gives_up_while_other_trainers_still_write() -> None:
    serving, lost = Target(0), Target(1)
    sources = [Source({}, after=lost.aborted), Source({1: REASON})]
    controller = weights.Controller(sources, {"serving": [serving], "lost": [lost]})
    begun = time.monotonic()
    update = controller.update(1, LONG_S)
    assert time.monotonic() - begun < LONG_S / 4
    assert update.failed == {"lost": f"rank 0: trainer rank 1 could not write to it: {REASON}"}
    assert (update.committed, list(update.trainers)) == (["serving"], [0, 1])
    assert (serving.version, lost.version) == (1, 0)


def test_an_update_does_not_wait_for_a_rank_that_gives_up_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    serving, lost, goes_on = Target(0), Target(1), threading.Event()
    monkeypatch.setattr(lost, "abort", lambda _reason: goes_on.wait(LONG_S))
    controller = weights.Controller([Source({1: REASON})], {"serving": [serving], "lost": [lost]})
    begun = time.monotonic()
    try:
        assert controller.update(1, LONG_S).committed == ["serving"]
    finally:
        goes_on.set()
    assert time.monotonic() - begun < LONG_S / 4


def test_a_replica_without_a_sound_offer_is_out() -> None:
    serving, wrong = Target(0), Target(1, offer=b"{}")
    controller = weights.Controller([Source({})], {"serving": [serving], "wrong": [wrong]})
    update = controller.update(1, DEADLINE_S)
    assert update.committed == ["serving"]
    assert "2 bytes came that are no offer" in update.failed["wrong"]
