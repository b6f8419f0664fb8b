"""Rollout ranks in processes of their own that are killed at each stage of an update."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

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


def test_a_rollout_rank_that_is_killed_is_out_and_joins_again(started: Callable[[], Remote]) -> None:
    # Those that take the places of killed ones start now, at the same time as all others.
    trainer, *rollouts = [started() for _ in range(3 + len(STAGES))]
    trainer.call("make", "host", 0, 1, "")
    params = trainer.describe()

    def begin(rollout: Remote, rank: int) -> None:
        rollout.call("make", "host")
        slots = rollout.record(params)
        digest = rollout.call("start", params, slots, 2, rank)
        if rank == 0:
            assert trainer.start(params, [slots], 2) == digest

    serving, lost, *others = rollouts
    begin(serving, 0)
    begin(lost, 1)
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
        begin(other, 1)
        controller.join(NAMES[1], [other])
        lost = other
        version += 1
        trainer.set(version)
        assert controller.update(version, WAIT_S).committed == list(NAMES)
        assert serving.versions(range(version + 1)) == lost.versions(range(version + 1)) == [version]
        version += 1
