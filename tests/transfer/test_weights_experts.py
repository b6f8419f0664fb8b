"""Updates of weights beside moves of experts: no two movers write a slot, and each slot says its version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import torch

import putget_transfer as pt
from putget.balancer import Landing, Move
from putget.experts import ExpertBlobs, ExpertSlots
from putget_transfer import weights
from tests.harness import Rank, run_ranks

DEADLINE_S = 60.0
MOVES = [Move(0, 0, 0, 1, 1)]


def value(expert: int, version: int) -> float:
    """Return what each element of an expert is in a version."""
    return 100.0 * version + expert


class Server:
    """A rank with two slots of experts, a balancer's landing, and a trainer of its own.

    Experts 0 and 1 begin on rank 0, 2 and 3 on rank 1.
    """

    def __init__(self, rank: Rank, commit: str) -> None:
        self.rank, self.commit = rank, commit
        held = [2 * rank.rank, 2 * rank.rank + 1]
        self.w = torch.tensor([[value(expert, 0)] * 8 for expert in held])
        self.slots = ExpertSlots([ExpertBlobs({"w": self.w})], [held])
        self.landing = Landing(rank.comm, self.slots.layers, device="cpu", timeout_s=20.0, slots=self.slots)
        self.network = pt.SimNetwork(3)
        self.engines: list[pt.Engine] = []
        self.record()

    def engine(self) -> pt.Engine:
        group = pt.DeviceGroup.sim(self.network, 1)
        self.engines.append(pt.Engine.builder().group(group).heartbeat(0.2, 5.0).grace(0.5).build())
        return self.engines[-1]

    def record(self) -> None:
        """Plan for the experts that the slots hold now."""
        held = self.slots.experts(0)
        names = [f"expert {expert}" for expert in held]

        def load(checkpoint: Any) -> None:
            for name, tensor in checkpoint:
                self.w[names.index(name)].copy_(tensor)

        self.source = {name: torch.zeros(8) for name in names}
        params = weights.describe(self.source, rank=0)
        self.recorded = recorded = weights.record({"w": self.w}, params, load=load, experts=self.slots)
        self.schedule = weights.plan(params, [recorded])
        options: Any = {"commit": self.commit, "experts": self.slots}
        self.rollout = weights.Rollout(self.engine(), recorded, self.schedule, 0, **options)
        self.new_trainer()

    def new_trainer(self) -> None:
        self.trainer_engine = self.engine()
        self.trainer = weights.Trainer(self.trainer_engine, self.schedule, 0, self.source)

    def expect(self, version: int) -> dict[int, bytes]:
        for name, tensor in self.source.items():
            tensor.fill_(value(int(name.split()[1]), version))
        return self.rollout.expect(version, {0: self.trainer.address()}, DEADLINE_S)

    def finish(self, version: int, offers: dict[int, bytes]) -> None:
        self.trainer.publish(version, DEADLINE_S, offers=[offers[0]])
        assert self.rollout.ready(DEADLINE_S)
        self.rollout.commit(version)

    def update(self, version: int) -> None:
        self.finish(version, self.expect(version))

    def refusal(self, version: int) -> str:
        with pytest.raises(ValueError) as caught:
            self.expect(version)
        return str(caught.value)

    def turn(self) -> int:
        """Move and take what has come; return the batch that all ranks have taken."""
        self.landing.move()
        said = self.rank.comm.exchange("landed", int(self.landing.landed), 20.0)
        self.landing.take(torch.tensor([min(said.values())], dtype=torch.int32))
        return self.landing.progress().agreed

    def take_batch(self) -> None:
        while self.turn() < self.landing.batch:
            pass

    def require_whole(self, *versions: int) -> None:
        """The bytes of each slot are those of the expert and version that the slot says."""
        assert self.slots.versions() == versions
        for slot in range(2):
            expert, version = self.slots.in_force(0, slot)
            assert self.w[slot].tolist() == [value(expert, version)] * 8

    def close(self) -> None:
        self.landing.close()
        for engine in self.engines:
            engine.close()


def update_first(rank: Rank, commit: str) -> None:
    """A body: rank 0 is in an update when an expert shall move from there; rank 1 is not."""
    server = Server(rank, commit)
    server.update(1)
    server.require_whole(1)
    if rank.rank == 0:
        offers = server.expect(2)
        assert not server.landing.post(MOVES), "moves began beside an update"
    else:
        assert server.landing.post(MOVES)
        assert "but a balancer's moves has the slots of its experts" in server.refusal(2)
        server.require_whole(1)
    assert max(server.turn() for _ in range(6)) == 0, "a batch was taken without a rank"
    if rank.rank == 0:
        server.finish(2, offers)
        assert server.landing.post(MOVES)
    server.take_batch()
    # Rank 1 was left out of version 2. The expert that came has the version of where it came from.
    assert server.slots.experts(0) == ([0, 1] if rank.rank == 0 else [2, 0])
    server.require_whole(*((2,) if rank.rank == 0 else (1, 2)))
    assert "experts have moved since its slots were recorded" in server.refusal(3)
    assert server.slots.mover is None
    server.record()
    server.update(3)
    server.require_whole(3)
    server.close()


def moves_first(rank: Rank, commit: str) -> None:
    """A body: a batch is under way on both ranks when an update comes."""
    server = Server(rank, commit)
    server.update(1)
    assert server.landing.post(MOVES)
    for _ in range(3):
        server.landing.move()
        assert "but a balancer's moves has the slots of its experts" in server.refusal(2)
        assert server.rollout.state == "whole"
    server.take_batch()
    server.require_whole(1)
    assert "experts have moved" in server.refusal(2)
    server.record()
    server.update(2)
    server.require_whole(2)
    server.close()


def moves_behind_the_record(rank: Rank, commit: str) -> None:
    """A body: experts move between the record and the rollout."""
    server = Server(rank, commit)
    recorded, schedule = server.recorded, server.schedule
    assert server.landing.post(MOVES)
    server.take_batch()
    options: Any = {"commit": commit, "experts": server.slots}
    server.rollout = weights.Rollout(server.engine(), recorded, schedule, 0, **options)
    server.new_trainer()
    assert "experts have moved since its slots were recorded" in server.refusal(2)
    recorded.moved = None
    with pytest.raises(ValueError, match="recorded without them"):
        weights.Rollout(server.engine(), recorded, schedule, 0, **options)
    server.record()
    server.update(2)
    server.require_whole(2)
    server.close()


def trainer_dies(rank: Rank, commit: str) -> None:
    """A body: the trainer of each rank dies behind the offers. Then an expert moves, and an update comes."""
    server = Server(rank, commit)
    server.update(1)
    server.expect(2)
    assert not server.landing.post(MOVES)
    server.trainer_engine.close()
    with pytest.raises(weights.UpdateFailed, match="missing: trainer rank 0"):
        server.rollout.ready(DEADLINE_S)
    if commit == "paused":
        assert server.slots.versions() == (-1,)
        assert not server.landing.post(MOVES), "torn experts moved"
        server.new_trainer()
        server.update(3)
        server.require_whole(3)
    else:
        server.require_whole(1)
    assert server.slots.mover is None
    assert server.landing.post(MOVES)
    server.take_batch()
    server.require_whole(3 if commit == "paused" else 1)
    server.record()
    server.update(4)
    server.require_whole(4)
    server.close()


@pytest.mark.parametrize("commit", ["swap", "paused"])
@pytest.mark.parametrize("body", [update_first, moves_first, moves_behind_the_record, trainer_dies])
def test_no_two_movers_write_a_slot(body: Callable[[Rank, str], None], commit: str) -> None:
    run_ranks(2, body, commit)
