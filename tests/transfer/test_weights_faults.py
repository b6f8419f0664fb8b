"""Updates with random faults: after each, the rollout's logits equal those of exactly one version, bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import torch

from putget_transfer import weights
from tests.transfer import weights_models as models
from tests.transfer.weights_cluster import DEADLINE_S, Cluster

ROUNDS = int(os.environ.get("PUTGET_WEIGHTS_ROUNDS", "16"))
FAULTS = ("none", "a task fails", "the source is lost", "a write is lost", "given up", "another base", "commit fails")
SHORT_S = 2.0
"""The deadline where a write is lost, which may be noticed then only."""
TOKENS = torch.arange(8)


def logits(engine: models.Engine) -> torch.Tensor:
    """Run the model, in which every parameter counts."""
    with torch.no_grad():
        found = engine.embed[TOKENS]
        for layer in range(models.LAYERS):
            query, key, value = (found * engine.norm[layer] @ engine.qkv[layer].T).split(
                [models.HEADS * models.HEAD, models.KV_HEADS * models.HEAD, models.KV_HEADS * models.HEAD], 1
            )
            scores = (query[:, : key.shape[1]] @ key.T / 8).softmax(1)
            mixed = torch.cat([scores @ value, query[:, value.shape[1] :]], 1)
            found = found + (mixed @ engine.o[layer].T).tanh()
            chances = (found @ engine.router[layer].T).softmax(1)
            for expert in range(models.EXPERTS):
                gate, up = (found @ engine.w13[layer][expert].T).chunk(2, 1)
                found = found + chances[:, expert, None] * ((gate.tanh() * up).tanh() @ engine.w2[layer][expert].T)
        return found @ engine.head.T


class Fault:
    """A fault, for the length of an update."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self.cluster, self.chance = cluster, chance
        self.left = chance.randrange(len(cluster.trainer.tasks))

    def task_fails(self, *arguments: Any) -> None:
        """Fail in front of a random task."""
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of memory")
        type(self.cluster.trainer)._task(self.cluster.trainer, *arguments)

    def given_up(self, *arguments: Any) -> None:
        """Have the rollout rank give the version up while bytes land."""
        self.left -= 1
        if self.left == -1:
            self.cluster.rollouts[0].abort("it takes too long")
        type(self.cluster.trainer)._task(self.cluster.trainer, *arguments)

    @contextlib.contextmanager
    def during(self, name: str) -> Any:
        trainer: Any = self.cluster.trainer
        rollout: Any = self.cluster.rollouts[0]
        try:
            if name == "a task fails":
                trainer._task = self.task_fails
            elif name == "given up":
                trainer._task = self.given_up
            elif name == "the source is lost":
                trainer.publish = self.lost
            elif name == "a write is lost":
                self.cluster.network.set_faults(drop_writes=0.2)
            elif name == "commit fails":
                rollout.commit = self.lost
            yield
        finally:
            self.cluster.network.set_faults()
            for owner, words in ((trainer, ("_task", "publish")), (rollout, ("commit",))):
                for word in words:
                    vars(owner).pop(word, None)

    def lost(self, *_arguments: Any, **_named: Any) -> None:
        raise RuntimeError("it is lost")


def test_logits_are_those_of_one_version_after_each_update() -> None:
    cluster, chance = Cluster(delta_bytes=1 << 16, tp=1), random.Random(5)
    seen: dict[bytes, int] = {logits(cluster.engines[0]).view(torch.uint8).numpy().tobytes(): 0}
    came: Counter[str] = Counter()
    base = 0
    try:
        for version in range(1, ROUNDS + 1):
            name = FAULTS[version % len(FAULTS)] if version <= len(FAULTS) else chance.choice(FAULTS)
            since = {"none": base or None, "another base": 999_999_999 % version}.get(name, base or None)
            cluster.source.set(version)
            if version % 3 == 0 and base:  # few elements differ from the version in force
                cluster.source.set(base)
                with torch.no_grad():
                    next(cluster.source.parameters()).view(-1)[version % 7] = version
            plain = models.Engine(1, 0)
            plain.load_weights((name, param.detach()) for name, param in cluster.source.named_parameters())
            seen[logits(plain).view(torch.uint8).numpy().tobytes()] = version
            assert len(seen) == version + 1
            try:
                with Fault(cluster, chance).during(name):
                    deadline_s = SHORT_S if name == "a write is lost" else DEADLINE_S
                    cluster.controller.update(version, deadline_s, since=since)
                base = version
                came["updated"] += 1
            except weights.UpdateFailed:
                came[name] += 1
            cluster.controller.replicas.setdefault("replica 0", cluster.rollouts)
            found = seen.get(logits(cluster.engines[0]).view(torch.uint8).numpy().tobytes())
            assert found == cluster.rollouts[0].version == base, (version, name, found, base)
    finally:
        cluster.close()
    assert came["updated"]
    assert {"a task fails", "the source is lost", "given up", "commit fails"} <= set(came)
