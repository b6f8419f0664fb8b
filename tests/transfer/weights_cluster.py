"""Trainers and rollout ranks in one process, on a simulated network."""

from __future__ import annotations

import putget_transfer as pt
from putget_transfer import weights
from tests.transfer import weights_models as models

DEADLINE_S = 60.0


class Cluster:
    """One trainer with plain tensors, and replicas of two tensor-parallel ranks, on a simulated network."""

    def __init__(self, commit: str = "swap", replicas: int = 1, delta_bytes: int = 0, tp: int = 2) -> None:
        self.network = pt.SimNetwork(3)
        self.source = models.Source()
        self.engines = [models.Engine(tp, rank % tp) for rank in range(tp * replicas)]
        self.params = params = weights.describe(self.source, rank=0)
        entries = weights.checkpoint(params)
        recorded = [weights.record(engine, entries) for engine in self.engines]
        self.schedule = weights.plan(params, recorded[:tp], replicas=replicas, task_bytes=20_000)
        self.own = [self.engine() for _ in range(1 + len(self.engines))]
        self.trainer = weights.Trainer(
            self.own[0], self.schedule, 0, self.source, watermark_bytes=50_000, deltas=delta_bytes > 0
        )
        self.rollouts = [
            weights.Rollout(own, slots, self.schedule, rank, commit=commit, delta_bytes=delta_bytes)  # type: ignore[arg-type]
            for rank, (own, slots) in enumerate(zip(self.own[1:], recorded, strict=True))
        ]
        pairs = {f"replica {at}": self.rollouts[tp * at : tp * at + tp] for at in range(replicas)}
        self.controller = weights.Controller([self.trainer], pairs)

    def engine(self) -> pt.Engine:
        return pt.Engine.builder().group(pt.DeviceGroup.sim(self.network, 1)).heartbeat(0.2, 5.0).grace(0.5).build()

    def versions(self, among: range = range(6)) -> list[list[int]]:
        return [models.version_of(engine, among) for engine in self.engines]

    def close(self) -> None:
        for own in self.own:
            own.close()
