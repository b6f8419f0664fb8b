"""Weights from FSDP2 trainers in processes of their own: whole versions, and trainers that die, stop and go on."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import torch

from putget_transfer import weights
from tests.harness.processes import thread_states
from tests.transfer import weights_models as models
from tests.transfer import weights_rank
from tests.transfer.weights_rank import Remote

WAIT_S = 60.0
ROUNDS = int(os.environ.get("PUTGET_WEIGHTS_ROUNDS", "3"))
"""Rounds of stopped trainers. With more than 3 of them, deaths are tried at each stage and over each network."""
LONG = ROUNDS > 3


@pytest.fixture(params=["tcp", "host"] if LONG else ["host"])
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def trainers(network: str, tmp_path: Path) -> Iterator[Callable[[int], list[Remote]]]:
    started: list[Remote] = []

    def make(ranks: int) -> list[Remote]:
        started.extend(Remote() for _ in range(ranks))
        making = [
            threading.Thread(target=remote.call, args=("make", network, rank, ranks, str(tmp_path / "gloo")))
            for rank, remote in enumerate(started)
        ]
        for thread in making:
            thread.start()
        for thread in making:
            thread.join(WAIT_S)
        return started

    yield make
    for remote in started:
        remote.end()


class Rollouts:
    """Two tensor-parallel rollout ranks in the test's process."""

    def __init__(self, network: str, trainers: list[Remote], commit: Any = "swap") -> None:
        params = [remote.describe() for remote in trainers]
        self.models = [models.Engine(2, rank) for rank in range(2)]
        entries = weights.checkpoint(weights.merge(params))
        slots = [weights.record(model, entries) for model in self.models]
        self.schedule = weights.plan(params, slots, task_bytes=weights_rank.TASK_BYTES)
        for remote in trainers:
            assert remote.start(params, slots, 1) == self.schedule.digest
        self.engines = [weights_rank.engine(network) for _ in range(2)]
        self.ranks = [
            weights.Rollout(engine, own, self.schedule, rank, commit=commit)
            for rank, (engine, own) in enumerate(zip(self.engines, slots, strict=True))
        ]
        self.controller = weights.Controller(trainers, {"replica": self.ranks})

    def versions(self) -> list[list[int]]:
        return [models.version_of(model, range(12)) for model in self.models]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.fixture
def rollouts(network: str) -> Iterator[Callable[..., Rollouts]]:
    made: list[Rollouts] = []

    def make(trainers: list[Remote], commit: str = "swap") -> Rollouts:
        made.append(Rollouts(network, trainers, commit))
        return made[-1]

    yield make
    for one in made:
        one.close()


def set_all(sources: list[Remote], version: int) -> None:
    """Have all trainers take the values of a version, which they divide among them."""
    threads = [threading.Thread(target=source.set, args=(version,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_sharded_trainers_reach_fused_and_sliced_rollouts(
    trainers: Callable[[int], list[Remote]], rollouts: Callable[..., Rollouts]
) -> None:
    sources = trainers(2)
    targets = rollouts(sources)
    # Shards hold what most slots need. Small parameters are brought together.
    assert 0 < targets.schedule.gathered_bytes < targets.schedule.num_bytes / 2
    for version in (1, 2):
        set_all(sources, version)
        update = targets.controller.update(version, WAIT_S)
        assert update.committed == ["replica"]
        assert targets.versions() == [[version], [version]]
        reports = update.trainers
        assert sum(report.num_bytes for report in reports.values()) == targets.schedule.num_bytes
        # The watermark, or a task with a parameter that is brought together: its shards, and all of it in order.
        largest = max(4 * math.prod(shape) for shape in models.shapes().values())
        most = max(2 * weights_rank.TASK_BYTES, weights_rank.TASK_BYTES + 256 + 2 * largest)
        assert all(0 < report.peak_bytes <= most for report in reports.values())


def test_quantised_blocks_that_cross_shards(trainers: Callable[[int], list[Remote]], network: str) -> None:
    sources = trainers(2)
    params = [source.describe() for source in sources]
    merged = weights.merge(params)
    names = [param.name for param in merged if len(param.shape) == 2]
    entries = weights.checkpoint(merged, quantised=names)
    model = {entry.name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype)) for entry in entries}
    slots = weights.record(model, entries)
    schedule = weights.plan(params, [slots], task_bytes=weights_rank.TASK_BYTES)
    for source in sources:
        assert source.start(params, [slots], 1) == schedule.digest
    with weights_rank.engine(network) as engine:
        rank = weights.Rollout(engine, slots, schedule, 0)
        set_all(sources, 3)
        weights.Controller(sources, {"replica": [rank]}).update(3, WAIT_S)
    for name, value in models.values(3).items():
        if name in names:
            wanted, scales = weights.quantise(value)
            assert torch.equal(model[name].view(torch.uint8), wanted.view(torch.uint8)), name
            assert torch.equal(model[name + "_scale_inv"], scales), name
        else:
            assert torch.equal(model[name], value), name


@pytest.mark.parametrize(
    ("commit", "place"),
    [("swap", 3), ("paused", 0), ("swap", 0), ("paused", 3), ("swap", "gather")][: 5 if LONG else 2],
)
def test_a_trainer_that_is_killed_is_named_by_the_deadline(
    trainers: Callable[[int], list[Remote]], rollouts: Callable[..., Rollouts], commit: str, place: int | str
) -> None:
    sources = trainers(2)
    targets = rollouts(sources, commit)
    set_all(sources, 1)
    targets.controller.update(1, WAIT_S)
    set_all(sources, 2)
    if isinstance(place, int):
        sources[1].stop_after(place, signal.SIGKILL)
    else:
        sources[1].signal_at(place, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(weights.UpdateFailed) as failed:
        targets.controller.update(2, 10.0)
    assert time.monotonic() - begin < WAIT_S
    assert "trainer rank 1" in failed.value.missing
    state = "torn" if commit == "paused" else "whole"
    assert [(rank.version, rank.state) for rank in targets.ranks] == [(1, state)] * 2
    if commit == "swap":
        assert targets.versions() == [[1], [1]]


def test_a_trainer_that_stands_still_in_a_gather_or_dies_behind_its_last_write(
    trainers: Callable[[int], list[Remote]], rollouts: Callable[..., Rollouts]
) -> None:
    """Nobody is held behind the deadline. A version whose bytes have all been sent may come into force on all ranks."""
    sources = trainers(2)
    targets = rollouts(sources)
    set_all(sources, 1)
    targets.controller.update(1, WAIT_S)
    set_all(sources, 2)
    sources[1].signal_at("gather", signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(weights.UpdateFailed, match="trainer rank"):
        targets.controller.update(2, 3.0)
    assert time.monotonic() - begin < WAIT_S
    assert targets.versions() == [[1], [1]]
    sources[1].signal(signal.SIGCONT)
    set_all(sources, 3)
    assert targets.controller.update(3, WAIT_S).committed == ["replica"]
    assert targets.versions() == [[3], [3]]

    set_all(sources, 4)
    sources[1].signal_at("barrier", signal.SIGKILL)
    with contextlib.suppress(weights.UpdateFailed):
        targets.controller.update(4, 10.0)
    (found,) = set(map(tuple, targets.versions()))
    assert found in ((3,), (4,))
    assert [(rank.version, rank.state) for rank in targets.ranks] == [(found[0], "whole")] * 2
    with pytest.raises(weights.UpdateFailed, match="version 5 has not begun: trainer rank 1: "):
        targets.controller.update(5, 10.0)
    assert set(map(tuple, targets.versions())) == {found}


def stopped(remote: Remote) -> None:
    """Wait until a process stands still."""
    end = time.monotonic() + WAIT_S
    while thread_states(remote.pid) != {"T"}:
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("commit", ["swap", "paused"])
def test_nothing_of_a_stopped_trainer_lands_in_the_next_version(
    trainers: Callable[[int], list[Remote]], rollouts: Callable[..., Rollouts], commit: str
) -> None:
    (source,) = trainers(1)
    targets = rollouts([source], commit)
    poison = 0x5C
    landing = [
        memory
        for rank in targets.ranks
        for memory in (rank._copies if commit == "swap" else rank.slots.tensors)  # versions land there
    ]
    for turn in range(ROUNDS):
        old, new = 2 * turn + 1, 2 * turn + 2
        addresses = {0: source.address()}
        source.set(old)
        offers = [rank.expect(old, addresses)[0] for rank in targets.ranks]
        source.stop_after(turn % 7, signal.SIGSTOP)
        publish = threading.Thread(target=_outcome, args=(source, old, offers))
        publish.start()
        stopped(source)
        for rank in targets.ranks:
            rank.abort("the trainer stands still")
        offers = [rank.expect(new, addresses)[0] for rank in targets.ranks]
        for memory in landing:
            memory.fill_(poison)
        source.signal(signal.SIGCONT)
        publish.join(WAIT_S)
        assert not publish.is_alive()
        assert all(bool((memory == poison).all()) for memory in landing), f"round {turn}"
        assert [rank.ready() for rank in targets.ranks] == [False, False]
        source.set(new)
        source.publish(new, WAIT_S, offers=offers)
        assert all(rank.ready(WAIT_S) for rank in targets.ranks)
        for rank in targets.ranks:
            rank.commit(new)
        assert [models.version_of(model, [old, new]) for model in targets.models] == [[new], [new]]


def _outcome(source: Remote, version: int, offers: list[bytes]) -> None:
    """Publish to ranks that have given the version up, which may fail."""
    with contextlib.suppress(weights.UpdateFailed):
        source.publish(version, WAIT_S, offers=offers)
