"""Weight updates in one process: versions arrive whole or not at all, and what does not fit is refused by name."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pickle
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.project.checkout import ROOT

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import numpy as np
import torch

import putget_transfer as pt
from putget_transfer import weights
from putget_transfer.weights import _controller, _native
from putget_transfer.weights._describe import Part, tensors_of
from tests.transfer import weights_models as models
from tests.transfer.weights_cluster import DEADLINE_S, Cluster

STUB = ROOT / "transfer/python/putget_transfer/weights/_native.pyi"


@pytest.fixture
def make() -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def one(*arguments: object, **named: object) -> Cluster:
        made.append(Cluster(*arguments, **named))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for cluster in made:
        cluster.close()


@pytest.mark.parametrize("commit", ["swap", "paused"])
def test_versions_arrive_whole(make: Callable[..., Cluster], commit: str) -> None:
    cluster = make(commit, replicas=2)
    for version in (1, 2, 5):
        cluster.source.set(version)
        update = cluster.controller.update(version, DEADLINE_S)
        assert update.committed == ["replica 0", "replica 1"]
        assert cluster.versions() == [[version]] * 4
        assert [(rollout.version, rollout.state) for rollout in cluster.rollouts] == [(version, "whole")] * 4
        report = json.loads(update.to_json())["trainers"]["0"]
        assert report["num_bytes"] == cluster.schedule.num_bytes
        assert report["num_writes"] == sum(cluster.schedule.count(rank) for rank in range(4))
        assert report["peak_bytes"] <= 50_000
        assert not report["failed"]
    assert "putget_weights_rollout_updates_total 3" in cluster.rollouts[0].metrics_text()
    assert "putget_weights_trainer_updates_total 3" in cluster.trainer.metrics_text()


def test_a_version_may_be_an_integer_of_numpy(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.source.set(1)
    update = cluster.controller.update(np.int64(1), DEADLINE_S)  # type: ignore[arg-type]
    assert json.loads(update.to_json())["trainers"]["0"]["version"] == 1
    assert cluster.versions() == [[1]] * 2


def test_swap_serves_the_old_version_until_commit(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    cluster.source.set(2)
    offers = [rollout.expect(2, {0: cluster.trainer.address()}) for rollout in cluster.rollouts]
    assert [rollout.ready() for rollout in cluster.rollouts] == [False, False]
    with pytest.raises(ValueError, match="2 came; expected: 2, landing"):
        cluster.rollouts[0].commit(2)
    cluster.trainer.publish(2, DEADLINE_S, offers=[one[0] for one in offers])
    assert all(rollout.ready(DEADLINE_S) for rollout in cluster.rollouts)
    assert cluster.versions() == [[1], [1]]
    assert cluster.rollouts[0].state == "filling"
    cluster.rollouts[0].commit(2)
    assert cluster.versions() == [[2], [1]]
    cluster.rollouts[0].commit(2)  # no effect
    cluster.rollouts[1].commit(2)
    assert cluster.versions() == [[2], [2]]


@pytest.mark.parametrize("commit", ["swap", "paused"])
def test_an_update_that_fails_leaves_the_old_version_or_a_torn_one(make: Callable[..., Cluster], commit: str) -> None:
    cluster = make(commit)
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    cluster.source.set(2)
    publish = cluster.trainer.publish

    def lost(*_arguments: object, **_named: object) -> None:
        raise RuntimeError("the trainer is lost")

    cluster.trainer.publish = lost  # type: ignore[assignment, method-assign]
    with pytest.raises(weights.UpdateFailed, match="trainer rank 0: the trainer is lost") as failed:
        cluster.controller.update(2, DEADLINE_S)
    assert "trainer rank 0" in failed.value.missing
    state = "torn" if commit == "paused" else "whole"
    assert [(rollout.version, rollout.state) for rollout in cluster.rollouts] == [(1, state)] * 2
    assert cluster.versions() == [[1], [1]]
    # The next update heals.
    cluster.trainer.publish = publish  # type: ignore[method-assign]
    cluster.source.set(3)
    assert cluster.controller.update(3, DEADLINE_S).committed == ["replica 0"]
    assert cluster.versions() == [[3], [3]]
    assert [rollout.state for rollout in cluster.rollouts] == ["whole", "whole"]


def test_parts_that_a_framework_names_are_sent(make: Callable[..., Cluster]) -> None:
    """As vLLM's sources name them: a part of each tensor that this rank holds, which is no DTensor."""
    cluster = make()
    cluster.source.set(3)
    tensors = dict(tensors_of(cluster.source))
    parts = {name: Part(tuple(tensor.shape), (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()}
    cluster.trainer = weights.Trainer(cluster.own[0], cluster.schedule, 0, parts, watermark_bytes=50_000)
    cluster.controller = weights.Controller([cluster.trainer], {"replica 0": cluster.rollouts})
    assert cluster.controller.update(3, DEADLINE_S).committed == ["replica 0"]
    assert cluster.versions() == [[3], [3]]


def test_parts_that_lie_elsewhere_than_planned_are_refused() -> None:
    """A framework divides its model anew: a part of the same shape is another one."""
    network = pt.SimNetwork(3)
    own = [pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() for _ in range(3)]
    whole, model = torch.arange(64.0).view(8, 8), {"w": torch.zeros(8, 8)}
    halves = [{"w": Part((8, 8), (at, 0), whole[at : at + 4].clone())} for at in (0, 4)]
    shards = tuple(weights.Shard((at, 0), (4, 8), (rank,)) for rank, at in enumerate((0, 4)))
    params = [weights.Param("w", (8, 8), "float32", weights.Layout(shards))]

    def load(found: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in found:
            model[name].copy_(tensor)

    slots = weights.record(model, weights.checkpoint(params), load=load)
    schedule = weights.plan([params, params], [slots])
    trainers = [weights.Trainer(own[rank], schedule, rank, half) for rank, half in enumerate(halves)]
    rollout = weights.Rollout(own[2], slots, schedule, 0)
    senders = {rank: trainer.address() for rank, trainer in enumerate(trainers)}
    offers = rollout.expect(1, senders)
    for rank, trainer in enumerate(trainers):
        trainer.publish(1, DEADLINE_S, offers=[offers[rank]])
    assert rollout.ready(DEADLINE_S)
    rollout.commit(1)
    assert torch.equal(model["w"], whole)
    halves[0]["w"], halves[1]["w"] = halves[1]["w"], halves[0]["w"]
    offers = rollout.expect(2, senders)
    for rank, trainer in enumerate(trainers):
        with pytest.raises(ValueError, match=r"of 'w' this rank has \[4, 8\] from \[\d, 0\] on; the plan"):
            trainer.publish(2, DEADLINE_S, offers=[offers[rank]])
    assert not rollout.ready()
    assert torch.equal(model["w"], whole)
    for engine in own:
        engine.close()


def test_a_replica_that_fails_is_out_and_joins_again(make: Callable[..., Cluster]) -> None:
    cluster = make(replicas=2)
    cluster.source.set(1)
    cluster.own[4].close()
    update = cluster.controller.update(1, DEADLINE_S)
    assert update.committed == ["replica 0"]
    assert list(update.failed) == ["replica 1"]
    assert cluster.versions() == [[1], [1], [0], [0]]
    # Its second rank starts anew.
    cluster.own[4] = cluster.engine()
    slots = weights.record(cluster.engines[3], weights.checkpoint(weights.describe(cluster.source, rank=0)))
    cluster.rollouts[3] = weights.Rollout(cluster.own[4], slots, cluster.schedule, 3)
    cluster.controller.join("replica 1", cluster.rollouts[2:])
    cluster.source.set(2)
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0", "replica 1"]
    assert cluster.versions() == [[2]] * 4
    cluster.controller.leave("replica 1")
    cluster.source.set(3)
    assert cluster.controller.update(3, DEADLINE_S).committed == ["replica 0"]
    assert cluster.versions() == [[3], [3], [2], [2]]
    with pytest.raises(ValueError, match="'replica 1' came"):
        cluster.controller.leave("replica 1")


def test_a_trainer_lets_ranks_in_again_that_its_engine_has_shut_out(make: Callable[..., Cluster]) -> None:
    """An engine shuts out a peer whose heartbeat it misses, in the same way."""
    cluster = make()
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    cluster.own[0].fence(cluster.own[2].main_address()).wait(DEADLINE_S)
    cluster.source.set(2)
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0"]
    assert cluster.versions() == [[2], [2]]


def test_trainers_that_do_not_answer_are_named_and_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_controller, "GRACE_S", 0.5)
    goes_on = threading.Event()

    class Silent:
        def address(self) -> bytes:
            goes_on.wait(DEADLINE_S)
            return b""

    controller = weights.Controller([Silent() for _ in range(16)], {})
    begin = time.monotonic()
    with pytest.raises(weights.UpdateFailed, match="version 1 has not begun: trainer rank 0: no answer") as failed:
        controller.update(1, 0.1)
    assert time.monotonic() - begin < 16 * 0.5
    assert failed.value.missing == [f"trainer rank {rank}" for rank in range(16)]
    goes_on.set()


def test_versions_ascend_one_at_a_time(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.source.set(2)
    cluster.controller.update(2, DEADLINE_S)

    def submitted() -> list[str]:
        return re.findall(r"submitted_total \d+", cluster.own[0].metrics_text())

    before = submitted()
    assert cluster.controller.update(2, DEADLINE_S).committed == ["replica 0"]
    assert submitted() == before
    with pytest.raises(ValueError, match="1 came; 2 is in force"):
        cluster.controller.update(1, DEADLINE_S)
    trainers = {0: cluster.trainer.address()}
    rollout = cluster.rollouts[0]
    assert rollout.expect(2, trainers) == {}
    with pytest.raises(ValueError, match="1 came; 2 is in force"):
        rollout.expect(1, trainers)
    offer = rollout.expect(3, trainers)[0]
    with pytest.raises(ValueError, match="4 came while 3 is landing"):
        rollout.expect(4, trainers)
    with pytest.raises(ValueError, match="version 3 came; 4 is to be published"):
        cluster.trainer.publish(4, DEADLINE_S, offers=[offer])
    with pytest.raises(ValueError, match="1 came; this rank has published 2"):
        cluster.trainer.publish(1, DEADLINE_S, offers=[])
    rollout.abort()
    with pytest.raises(weights.UpdateFailed, match="given up"):
        rollout.ready()
    with pytest.raises(ValueError, match=r"\[1\] came; \[0\] write"):
        rollout.expect(4, {1: trainers[0]})


@pytest.mark.parametrize("commit", ["swap", "paused"])
def test_a_closed_rank_gives_its_memory_back_and_another_takes_its_place(
    make: Callable[..., Cluster], commit: str
) -> None:
    cluster = make(commit)
    cluster.source.set(1)
    cluster.controller.update(1, 30)
    closed = cluster.rollouts[0]
    offers = closed.expect(2, {0: cluster.trainer.address()})
    before = models.version_of(cluster.engines[0], range(6))
    landing = weakref.ref(closed._copies[0]) if commit == "swap" else None
    storage = closed.slots.tensors[0].untyped_storage()
    assert storage.resizable() == (commit == "swap")
    for _ in range(2):
        closed.close()
    assert storage.resizable()  # it is registered no more
    assert landing is None or landing() is None
    cluster.source.set(2)
    assert list(cluster.trainer.publish(2, 30, offers=[offers[0]]).failed) == [0]  # its keys are void
    assert models.version_of(cluster.engines[0], range(6)) == before == [1]
    with pytest.raises(ValueError, match="expect: rollout rank 0 is closed"):
        closed.expect(3, {0: cluster.trainer.address()})
    with pytest.raises(ValueError, match="no version is expected"):
        closed.ready()
    for _ in range(20):  # immediates and memory come back
        again = weights.Rollout(cluster.own[1], closed.slots, cluster.schedule, 0, commit=commit, delta_bytes=999)  # type: ignore[arg-type]
        assert again._inbox is not None
        inbox = again._inbox.bytes.untyped_storage()
        again.close()
        assert inbox.resizable()
    cluster.rollouts[0] = weights.Rollout(cluster.own[1], closed.slots, cluster.schedule, 0, commit=commit)  # type: ignore[arg-type]
    cluster.controller = weights.Controller([cluster.trainer], {"replica 0": cluster.rollouts})
    cluster.source.set(3)
    assert cluster.controller.update(3, 30).failed == {}
    assert cluster.versions() == [[3], [3]]


@pytest.mark.parametrize("commit", ["swap", "paused"])
def test_an_interrupted_abort_leaves_no_sender_unfenced(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    cluster = make(commit)
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    rollout = cluster.rollouts[0]
    (offer,) = rollout.expect(2, {0: cluster.trainer.address()}).values()

    def interrupted(_peer: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "_fence", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rollout.abort()
    rollout._settle()  # as the next `expect` does
    cluster.source.set(2)
    assert list(cluster.trainer.publish(2, DEADLINE_S, offers=[offer]).failed) == [0]
    assert models.version_of(cluster.engines[0], range(6)) == [1]


def test_an_interrupted_close_goes_on_at_the_next_call(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make("paused")
    rollout = cluster.rollouts[0]
    storage = rollout.slots.tensors[0].untyped_storage()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "_settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rollout.close()
    assert not storage.resizable()
    rollout.close()
    assert storage.resizable()


@pytest.mark.parametrize("begins", [False, True])
def test_a_rank_is_closed_behind_its_engine(make: Callable[..., Cluster], begins: bool) -> None:
    cluster = make()
    if begins:
        cluster.rollouts[0].expect(1, {0: cluster.trainer.address()})
    cluster.own[1].close()
    for _ in range(2):
        cluster.rollouts[0].close()


def test_an_old_offer_is_void_after_the_next_one(make: Callable[..., Cluster]) -> None:
    cluster = make("paused")
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    trainers = {0: cluster.trainer.address()}
    old = [rollout.expect(2, trainers)[0] for rollout in cluster.rollouts]
    for rollout in cluster.rollouts:
        rollout.abort()
        rollout.expect(3, trainers)
    # The trainer goes on with version 2, which nobody expects any more.
    cluster.source.set(2)
    report = cluster.trainer.publish(2, DEADLINE_S, offers=old)
    assert sorted(report.failed) == [0, 1]
    assert cluster.versions() == [[1], [1]]
    assert [rollout.ready() for rollout in cluster.rollouts] == [False, False]


def test_another_schedule_is_refused_before_any_write(make: Callable[..., Cluster]) -> None:
    cluster, other = make(), make(replicas=2)
    offers = [other.rollouts[0].expect(1, {0: cluster.trainer.address()})[0]]
    with pytest.raises(ValueError, match=f"schedule {other.schedule.digest} came"):
        cluster.trainer.publish(1, DEADLINE_S, offers=offers)
    with pytest.raises(ValueError, match="no offer"):
        cluster.trainer.publish(1, DEADLINE_S, offers=[b"{}"])


def _memory(slots: weights.Slots) -> tuple[list[tuple[str, int]], list[torch.Tensor]]:
    return slots.memory, slots.tensors


def test_other_parameters_are_refused_by_name(make: Callable[..., Cluster]) -> None:
    cluster = make()
    named = dict(cluster.source.named_parameters())

    def refused(change: Callable[[dict[str, torch.Tensor]], object], words: str) -> None:
        other = dict(named)
        change(other)
        with pytest.raises(ValueError, match=words):
            weights.Trainer(cluster.own[0], cluster.schedule, 0, other)

    refused(lambda own: own.pop("embed.weight"), "'embed.weight' is missing")
    refused(lambda own: own.update(extra=torch.zeros(1)), "'extra' is not in the schedule")
    refused(
        lambda own: own.update({"layers.0.norm.weight": torch.zeros(3)}), r"'layers.0.norm.weight' is float32 \[3\]"
    )
    refused(lambda own: own.update({"head.weight": own["head.weight"].half()}), "'head.weight' is float16")
    slots = weights.record(cluster.engines[0], weights.checkpoint(weights.describe(cluster.source, rank=0)))
    slots.memory[0] = ("other", 4)
    with pytest.raises(ValueError, match="'other', 4"):
        weights.Rollout(cluster.own[1], slots, cluster.schedule, 0)
    turned = weights.Slots(list(reversed(cluster.rollouts[0].slots)), *_memory(cluster.rollouts[0].slots))
    with pytest.raises(ValueError, match=r"came; the schedule has .* for rank 0"):
        weights.Rollout(cluster.own[1], turned, cluster.schedule, 0)
    with pytest.raises(ValueError, match="'both' came"):
        weights.Rollout(cluster.own[1], slots, cluster.schedule, 0, commit="both")  # type: ignore[arg-type]


def test_parameters_that_change_are_refused_at_the_next_version(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.source.head.weight = torch.nn.Parameter(torch.zeros(1, 2))
    with pytest.raises(weights.UpdateFailed, match=r"'head.weight' is float32 \[1, 2\]"):
        cluster.controller.update(1, DEADLINE_S)
    assert cluster.versions() == [[0], [0]]


def test_ranks_that_differ_are_refused_by_name() -> None:
    one = weights.describe({"w": torch.zeros(4)}, rank=0)
    two = weights.describe({"w": torch.zeros(4), "b": torch.zeros(2)}, rank=1)
    merged = weights.merge([one, two])
    assert [(param.name, param.layout.shards[0].ranks) for param in merged] == [("w", (0, 1)), ("b", (1,))]
    with pytest.raises(ValueError, match="'w' came as float32"):
        weights.merge([one, weights.describe({"w": torch.zeros(5)}, rank=1)])


def test_slots_are_plain_values() -> None:
    entries = weights.checkpoint(weights.describe(models.Source(), rank=0))
    slots = weights.record(models.Engine(1, 0), entries)
    copy = pickle.loads(pickle.dumps(slots))
    assert (list(copy), copy.memory, copy.tensors) == (list(slots), slots.memory, [])
    params = weights.describe(models.Source(), rank=0)
    assert weights.plan(pickle.loads(pickle.dumps(params)), [copy]).digest == weights.plan(params, [slots]).digest
    assert "4 replicas of 1" in weights.plan(params, [slots], replicas=4).show()
    with pytest.raises(ValueError, match="replicas: 0"):
        weights.plan(params, [slots], replicas=0)
    wrong = [dataclasses.replace(params[0], dtype="float4"), *params[1:]]
    with pytest.raises(ValueError, match="float4"):
        weights.plan(wrong, [slots])


def test_the_stub_has_the_names_of_the_compiled_part() -> None:
    tree = ast.parse(STUB.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    compiled = {name: value for name, value in vars(_native).items() if not name.startswith("_")}
    assert set(classes) | functions == set(compiled)
    for name, node in classes.items():
        told = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} | {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        found = {member for member, _ in inspect.getmembers(compiled[name]) if not member.startswith("_")}
        assert told - {"__new__"} == found
