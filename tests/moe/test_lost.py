"""A layer whose ranks are lost: it raises until experts are back or the caller goes on without them, and says so."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch

import putget
from putget.balancer import Balancer, Placement, PlanOptions
from putget.moe import ExpertParallelMoE
from tests.harness import Rank, run_ranks
from tests.harness.domains import Masks
from tests.moe.dense import Dense, relative_error
from tests.moe.layers import BF16_TOLERANCE, make_layer

DENSE = Dense(num_experts=6)
ALL, WITHOUT = (True, True, True), (True, True, False)
LOST = (4, 5)  # experts of rank 2 where each rank has two


def tokens(layer: ExpertParallelMoE, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight tokens, and which of them have an expert of rank 2."""
    x = torch.randn(8, DENSE.hidden, generator=torch.Generator().manual_seed(rank)).bfloat16()
    ids, _ = layer.router(x)
    return x, torch.isin(ids, torch.tensor(LOST)).any(1)


def refused(layer: ExpertParallelMoE, x: torch.Tensor) -> putget.ExpertsLost:
    """The exception of each call while experts are lost."""
    for call in (lambda: layer(x), layer.check, lambda: layer(x)):
        with pytest.raises(putget.ExpertsLost) as caught:
            call()
    return caught.value


def lose_accept_and_get_back(rank: Rank, masks: Masks) -> None:
    """A body: rank 2 is left out and comes back."""
    layer = make_layer(rank, DENSE)
    x, is_hit = tokens(layer, rank.rank)
    assert is_hit.any()
    assert not is_hit.all()
    first: list[torch.Tensor] = []
    began = time.time()

    def play(me: Rank, mask: tuple[bool, ...]) -> None:
        if mask == ALL:
            assert layer.metrics() == first_metrics(layer, rounds=len(first))
            first.append(layer(x))
            assert torch.equal(first[0], first[-1])
            layer.check()
            return
        error = refused(layer, x)
        assert (error.experts, error.partly, error.ranks) == (LOST, (), (2,))
        assert began <= error.since <= time.time()
        assert str(error) == str(pickle.loads(pickle.dumps(error)))
        assert "expert(s) 4, 5 are lost with rank(s) 2 since 20" in str(error)
        assert "layer.degraded = True" in str(error)
        found = layer.metrics()
        assert (found.active_ranks, found.lost_ranks) == ((0, 1), (2,))
        assert (found.lost_experts, found.partly_lost_experts, found.lost_since) == (LOST, (), error.since)
        assert (found.degraded, found.degraded_rounds) == (False, 0)
        layer.degraded = True
        for number in range(3):
            output = layer(x)
            assert torch.equal(output[~is_hit], first[0][~is_hit])
            assert not torch.equal(output[is_hit], first[0][is_hit])
            layer.check()
            found = layer.metrics()
            assert (found.degraded, found.degraded_rounds, found.lost_since) == (True, number + 1, error.since)
        layer.degraded = False
        assert refused(layer, x).since == error.since

    masks.play(rank, layer.a2a, play)
    layer.close()


def first_metrics(layer: ExpertParallelMoE, rounds: int) -> Any:
    """The report of a layer without a loss; once it went on without rank 2 for three rounds."""
    without = 3 if rounds and layer.a2a.ep_rank != 2 else 0
    found = layer.metrics()
    assert found.active_ranks == (0, 1, 2)
    assert (found.lost_ranks, found.lost_experts, found.partly_lost_experts, found.lost_since) == ((), (), (), None)
    assert (found.degraded, found.degraded_rounds) == (False, without)
    return found


def test_a_layer_raises_until_the_loss_is_accepted_or_over() -> None:
    run_ranks(3, lose_accept_and_get_back, Masks(ALL, WITHOUT, ALL), mode="thread")


def replicas(rank: Rank, masks: Masks, accepted: bool) -> None:
    """A body: rank 2 has replicas alone, then the placement forgets them."""
    start = Placement.of([0, 1, 2, 3, 4, 5, 0, 3, 5], 6)
    layer = make_layer(rank, DENSE, placement=start, degraded=accepted)
    x, _ = tokens(layer, rank.rank)
    first = layer(x)

    def play(me: Rank, mask: tuple[bool, ...]) -> None:
        if mask == ALL:
            return
        found = layer.metrics()
        assert (found.lost_experts, found.partly_lost_experts, found.degraded) == ((), (0, 3, 5), accepted)
        if accepted:
            layer(x)
        else:
            error = refused(layer, x)
            assert (error.experts, error.partly) == ((), (0, 3, 5))
            assert "replicas of expert(s) 0, 3, 5 are lost" in str(error)
        layer.set_placement(Placement.of([0, 1, 2, 3, 4, 5, -1, -1, -1], 6), DENSE.state())
        assert relative_error(layer(x), first.float()) < BF16_TOLERANCE
        layer.check()
        assert layer.metrics().degraded_rounds == accepted
        assert layer.metrics().lost_since is None

    masks.play(rank, layer.a2a, play)
    layer.close()


@pytest.mark.parametrize("accepted", [False, True])
def test_replicas_on_lost_ranks_count_until_the_placement_forgets_them(accepted: bool) -> None:
    run_ranks(3, replicas, Masks(ALL, WITHOUT), accepted, mode="thread")


def differ(rank: Rank) -> str:
    with pytest.raises(ValueError, match="degraded differs between ranks") as caught:
        make_layer(rank, DENSE, degraded=rank.rank == 1)
    return str(caught.value)


def test_ranks_accept_alike() -> None:
    run_ranks(3, differ, mode="thread")


def test_many_experts_are_counted() -> None:
    error = putget.ExpertsLost(range(100), (), (1,), 0.0)
    assert "expert(s) 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 84 more are lost" in str(error)
    assert "since 1970-01-01 00:00:00 UTC" in str(error)


def balanced(rank: Rank, masks: Masks, stays: bool) -> None:
    """A body: rank 2 is lost under a balancer without a store, with experts of its own or with replicas alone."""
    slots = [0, 1, 2, 0, 1, 2, 3, 4, 5] if stays else [0, 1, 2, 3, 4, 5, 0, 1, 2]
    start = Placement.of(slots, 6)
    layer = make_layer(rank, DENSE, placement=start, count_experts=True, num_stats=9)
    still = PlanOptions(interval=4, min_gain=100.0)  # no plan moves an expert before
    balancer = Balancer(rank.comm, [layer], start, plan=still, device=rank.device, timeout_s=20.0)
    x, _ = tokens(layer, rank.rank)

    def serve() -> None:
        for _ in range(9):
            layer(x)
            balancer.step()

    def play(me: Rank, mask: tuple[bool, ...]) -> None:
        if mask == ALL:
            serve()
            return
        if stays:
            with pytest.raises(putget.PutgetError, match=r"the placement stays.*degraded"):
                balancer.set_active_ranks(mask)
            assert refused(layer, x).experts == (3, 4, 5)
            layer.degraded = True
        else:
            balancer.set_active_ranks(mask)
        serve()
        assert (layer.metrics().lost_since is None, layer.metrics().degraded_rounds) == (not stays, 9 * stays)

    masks.play(rank, layer.a2a, play)
    balancer.close()
    layer.close()


@pytest.mark.parametrize("stays", [True, False], ids=["lost", "replicas"])
def test_a_balancer_without_a_store(stays: bool) -> None:
    run_ranks(3, balanced, Masks(ALL, WITHOUT), stays, mode="thread")
