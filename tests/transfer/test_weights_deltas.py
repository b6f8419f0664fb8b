"""Deltas: what has changed arrives, and what does not fit a delta comes whole, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from putget_transfer import weights
from putget_transfer.weights import _delta, _deltas
from tests.transfer import weights_models as models
from tests.transfer.weights_cluster import DEADLINE_S, Cluster


@pytest.fixture
def make() -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def one(*arguments: Any, **named: Any) -> Cluster:
        made.append(Cluster(*arguments, **named))
        return made[-1]

    yield one
    for cluster in made:
        cluster.close()


def change(source: models.Source, seed: int, share: float) -> None:
    """Change a share of all elements."""
    made = torch.Generator().manual_seed(seed)
    for param in source.parameters():
        picked = torch.rand(param.shape, generator=made) < share
        with torch.no_grad():
            param[picked] += 1 + torch.rand(int(picked.sum()), generator=made)


def carries(cluster: Cluster) -> bool:
    """Say whether all rollout ranks have what a plain load of the trainer's weights makes."""
    for engine in cluster.engines:
        plain = models.Engine(engine.tp, engine.rank)
        plain.load_weights((name, param.detach()) for name, param in cluster.source.named_parameters())
        pairs = zip(engine.parameters(), plain.parameters(), strict=True)
        if not all(torch.equal(own, wanted) for own, wanted in pairs):
            return False
    return True


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 300),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_a_record_makes_the_new_bytes_of_the_old(size: int, dtype: torch.dtype, share: float, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    width = dtype.itemsize
    old = torch.randint(0, 256, (size * width,), dtype=torch.uint8, generator=made)
    picked = torch.rand(size, generator=made) < share
    noise = torch.randint(0, 256, (size, width), dtype=torch.uint8, generator=made)
    new = torch.where(picked[:, None], noise, old.view(size, width)).flatten()
    changes = [_delta.Change.between(number, old, new, width) for number in (0, 3)]
    record = torch.zeros(_delta.size_of(changes), dtype=torch.uint8)
    _delta.write_record(record, 77, changes)
    assert _delta.read_record(record, 78) is None
    entries = _delta.read_record(record, 77)
    assert entries is not None
    assert [entry[0] for entry in entries] == [0, 3]
    at = _delta.first_entry(len(entries))
    for _, runs, elements, total in entries:
        got = old.clone()
        values = _delta._integers(got, width)
        at = _delta.apply_entry(record, at, runs, elements, values)
        assert torch.equal(got, new)
        assert _delta.digest(values) == total
        if size:
            got[int(torch.randint(0, size * width, (), generator=made))] ^= 1
            assert _delta.digest(_delta._integers(got, width)) != total
    assert at == len(record)


@pytest.mark.parametrize("commit", ["swap", "paused"])
def test_changes_arrive(make: Callable[..., Cluster], commit: str) -> None:
    cluster = make(commit, replicas=2, delta_bytes=1 << 16)
    cluster.source.set(1)
    first = cluster.controller.update(1, DEADLINE_S).trainers[0]
    for version, share in ((2, 0.0), (3, 0.01), (4, 0.02)):
        change(cluster.source, version, share)
        update = cluster.controller.update(version, DEADLINE_S, since=version - 1)
        report = update.trainers[0]
        assert carries(cluster)
        assert not report.whole
        assert report.num_deltas == report.num_writes == first.num_writes
        assert report.num_bytes == report.delta_bytes < first.num_bytes / 5
        assert report.peak_bytes <= 50_000
    assert "putget_weights_rollout_deltas_total" in cluster.rollouts[0].metrics_text()


def test_what_is_no_less_comes_whole(make: Callable[..., Cluster]) -> None:
    cluster = make(delta_bytes=1 << 16)
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    change(cluster.source, 2, 0.9)
    with torch.no_grad():
        cluster.source.embed.weight.add_(0)  # one that has not changed
    report = cluster.controller.update(2, DEADLINE_S, since=1).trainers[0]
    assert carries(cluster)
    assert report.num_deltas == 0
    assert report.num_bytes == cluster.schedule.num_bytes


def test_a_rank_that_missed_a_version_gets_it_whole(make: Callable[..., Cluster]) -> None:
    cluster = make(replicas=2, delta_bytes=1 << 16)
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    ranks = cluster.controller.replicas["replica 1"]
    cluster.controller.leave("replica 1")
    change(cluster.source, 2, 0.01)
    cluster.controller.update(2, DEADLINE_S, since=1)
    cluster.controller.join("replica 1", ranks)
    change(cluster.source, 3, 0.01)
    report = cluster.controller.update(3, DEADLINE_S, since=2).trainers[0]
    assert carries(cluster)
    assert sorted(report.whole) == [2, 3]
    assert report.whole[2] == "version 2 came as the base; rollout rank 2 holds version 1"
    # A trainer that keeps another version sends all to all.
    change(cluster.source, 4, 0.01)
    report = cluster.controller.update(5, DEADLINE_S, since=1).trainers[0]
    assert carries(cluster)
    assert report.whole[0] == "version 1 came as the base; this rank keeps 3"
    assert report.num_deltas == 0


@pytest.mark.parametrize("commit", ["swap", "paused"])
def test_a_broken_record_is_found(make: Callable[..., Cluster], commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make(commit, delta_bytes=1 << 16)
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    write, broken = _deltas.write_record, []

    def breaks(to: Any, token: int, changes: Any) -> None:
        write(to, token, changes)
        if not broken and any(one.values.numel() for one in changes):
            broken.append(True)
            to[-8] ^= 4  # in the last value, or behind it
            to[_delta.first_entry(len(changes)) - 8] ^= 4  # in the last digest

    monkeypatch.setattr(_deltas, "write_record", breaks)
    change(cluster.source, 2, 0.01)
    with pytest.raises(
        weights.UpdateFailed, match=r"a delta of trainer rank 0: the result for '.*' has another digest"
    ):
        cluster.controller.update(2, DEADLINE_S, since=1)
    assert broken
    assert {rollout.state for rollout in cluster.rollouts} == {"torn" if commit == "paused" else "whole"}
    if commit == "swap":
        assert cluster.versions() == [[1], [1]]
    report = cluster.controller.update(3, DEADLINE_S, since=2).trainers[0]
    assert sorted(report.whole) == [0, 1]
    assert carries(cluster)
    change(cluster.source, 4, 0.01)
    report = cluster.controller.update(4, DEADLINE_S, since=3).trainers[0]
    assert report.num_deltas == report.num_writes
    assert carries(cluster)


def test_an_update_that_failed_is_followed_by_a_whole_one(make: Callable[..., Cluster]) -> None:
    cluster = make(delta_bytes=1 << 16)
    cluster.source.set(1)
    cluster.controller.update(1, DEADLINE_S)
    publish = cluster.trainer.publish

    def lost(*_arguments: Any, **_named: Any) -> None:
        raise RuntimeError("the trainer is lost")

    cluster.trainer.publish = lost  # type: ignore[assignment, method-assign]
    change(cluster.source, 2, 0.01)
    with pytest.raises(weights.UpdateFailed, match="the trainer is lost"):
        cluster.controller.update(2, DEADLINE_S, since=1)
    cluster.trainer.publish = publish  # type: ignore[method-assign]
    report = cluster.controller.update(3, DEADLINE_S, since=1).trainers[0]
    assert "no version that changes apply to" in report.whole[0]
    assert carries(cluster)


def test_mistakes_are_named(make: Callable[..., Cluster]) -> None:
    plain, cluster = make(), make(delta_bytes=1 << 16)
    with pytest.raises(ValueError, match="since: 1 came for version 2"):
        plain.trainer.publish(2, DEADLINE_S, offers=[], since=1)
    with pytest.raises(ValueError, match="since: 2 came for version 2"):
        cluster.trainer.publish(2, DEADLINE_S, offers=[], since=2)


def test_an_inbox_of_less_than_nothing_is_refused(make: Callable[..., Cluster]) -> None:
    cluster = make()
    slots = weights.record(cluster.engines[0], weights.checkpoint(cluster.params))
    with pytest.raises(ValueError, match="delta_bytes: -1000 came; bytes from 0 on are allowed"):
        weights.Rollout(cluster.own[1], slots, cluster.schedule, 0, delta_bytes=-1000)
