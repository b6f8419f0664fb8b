"""Rollout ranks in processes of their own that are killed at each stage of an update, or stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer import weights
from tests.transfer.weights_rank import Remote

LONG = int(os.environ.get("PUTGET_WEIGHTS_ROUNDS", "0")) > 3
STAGES = ["while bytes land"]
if LONG:
    STAGES = ["before it expects", "when it expects", "while bytes land", "when it is complete", "while it commits"]
DEADLINE_S, WAIT_S = 20.0, 60.0
LONG_S = 120.0
"""A deadline that nobody waits for."""
NAMES = ("replica 0", "replica 1")


@pytest.fixture
def started() -> Iterator[Callable[[], Remote]]:
    all_of_them: list[Remote] = []

    def start() -> Remote:
        all_of_them.append(Remote())
        return all_of_them[-1]

    yield start
    for remote in all_of_them:
        remote.end()


def serve(trainer: Remote, rollout: Remote, rank: int, params: list[Any]) -> None:
    """Have a process take a rank's place. The trainer starts with the first one."""
    rollout.call("make", "host")
    slots = rollout.record(params)
    digest = rollout.call("start", params, slots, len(NAMES), rank)
    if rank == 0:
        assert trainer.start(params, [slots], len(NAMES)) == digest


def test_a_rollout_rank_that_is_killed_is_out_and_joins_again(started: Callable[[], Remote]) -> None:
    # Those that take the places of killed ones start now, at the same time as all others.
    trainer, *rollouts = [started() for _ in range(3 + len(STAGES))]
    trainer.call("make", "host", 0, 1, "")
    params = trainer.describe()
    serving, lost, *others = rollouts
    serve(trainer, serving, 0, params)
    serve(trainer, lost, 1, params)
    controller = weights.Controller([trainer], {NAMES[0]: [serving], NAMES[1]: [lost]})
    version = 1
    for stage, other in zip(STAGES, others, strict=True):
        trainer.set(version)
        assert controller.update(version, WAIT_S).committed == list(NAMES), stage
        lost.die_at(stage)
        version += 1
        trainer.set(version)
        begun = time.monotonic()
        update = controller.update(version, DEADLINE_S)
        assert time.monotonic() - begun < DEADLINE_S + WAIT_S
        assert (update.committed, list(update.failed)) == ([NAMES[0]], [NAMES[1]]), stage
        assert serving.versions(range(version + 1)) == [version]
        serve(trainer, other, 1, params)
        controller.join(NAMES[1], [other])
        lost = other
        version += 1
        trainer.set(version)
        assert controller.update(version, WAIT_S).committed == list(NAMES)
        assert serving.versions(range(version + 1)) == lost.versions(range(version + 1)) == [version]
        version += 1


def test_a_rollout_rank_that_misses_heartbeats_is_out_at_once_and_joins_again(started: Callable[[], Remote]) -> None:
    """Its trainer cannot write to it: others do not wait for the deadline, and the report's reason is told."""
    trainer, serving, still = [started() for _ in range(3)]
    trainer.call("make", "host", 0, 1, "")
    params = trainer.describe()
    serve(trainer, serving, 0, params)
    serve(trainer, still, 1, params)
    controller = weights.Controller([trainer], {NAMES[0]: [serving], NAMES[1]: [still]})
    trainer.set(1)
    assert controller.update(1, WAIT_S).committed == list(NAMES)
    trainer.lose(still.pid)
    trainer.set(2)
    begun = time.monotonic()
    update = controller.update(2, LONG_S)
    assert time.monotonic() - begun < LONG_S / 4
    assert (update.committed, list(update.failed)) == ([NAMES[0]], [NAMES[1]])
    reason = update.trainers[0].failed[1]
    assert update.failed[NAMES[1]] == f"rank 0: trainer rank 0 could not write to it: {reason}"
    assert serving.versions(range(4)) == [2]
    # The same process goes on. Nobody starts anew.
    still.signal(signal.SIGCONT)
    assert still.versions(range(4)) == [1]
    controller.join(NAMES[1], [still])
    trainer.set(3)
    update = controller.update(3, WAIT_S)
    assert (update.committed, update.failed) == (list(NAMES), {})
    assert serving.versions(range(4)) == still.versions(range(4)) == [3]
    # With no replica left, the error comes as soon.
    controller.leave(NAMES[0])
    trainer.lose(still.pid)
    trainer.set(4)
    begun = time.monotonic()
    with pytest.raises(weights.UpdateFailed, match=f"{NAMES[1]}: rank 0: trainer rank 0 could not write") as failed:
        controller.update(4, LONG_S)
    assert time.monotonic() - begun < LONG_S / 4
    assert failed.value.missing == [NAMES[1]]
