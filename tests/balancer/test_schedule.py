"""Moves in batches: every batch can be carried out, and the placement at the end is the wanted one."""

from __future__ import annotations

import numpy as np
import pytest

from putget.balancer import Placement, rebalance
from putget.balancer.schedule import Batch, batches


def held(slots: np.ndarray, ranks: int) -> list[list[int]]:
    """The experts of each rank, sorted, of one layer."""
    return [sorted(set(rank.tolist())) for rank in slots.reshape(ranks, -1)]


def play(current: Placement, target: Placement, ranks: int, cells: int) -> list[Batch]:
    """All batches, each held against what it starts from."""
    slots = current.physical_to_logical.copy()
    found = list(batches(current, target, ranks, cells))
    each = slots.shape[1] // ranks
    for batch in found:
        after = slots.copy()
        arrivals = np.zeros(ranks, int)
        assert len({(one.layer, one.dst) for one in batch.transfers}) == len(batch.transfers)
        for one in batch.transfers:
            assert one.src // each != one.dst // each
            after[one.layer, one.dst] = slots[one.layer, one.src]
            arrivals[one.dst // each] += 1
        assert arrivals.max() <= cells
        assert np.array_equal(after, batch.slots)
        Placement.of(after, current.num_experts)  # every expert has a slot
        changed = np.flatnonzero((after != slots).any(axis=1)).tolist()
        assert changed == list(batch.layers)
        slots = after
    for layer, wanted in enumerate(target.physical_to_logical):
        assert held(slots[layer], ranks) == held(wanted, ranks), layer
    return found


def random_placement(rng: np.random.Generator, layers: int, experts: int, slots: int, ranks: int) -> Placement:
    """No expert twice on a rank, which the landing areas would not bring."""
    table = []
    while len(table) < layers:
        one = rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, slots - experts)]))
        if all(len(set(rank)) == len(rank) for rank in one.reshape(ranks, -1).tolist()):
            table.append(one)
    return Placement.of(np.stack(table), experts)


@pytest.mark.parametrize("cells", [1, 2, 7])
@pytest.mark.parametrize(("experts", "slots", "ranks"), [(8, 8, 4), (8, 10, 2), (16, 20, 4), (24, 24, 8), (6, 12, 3)])
def test_random_placements_become_each_other(experts: int, slots: int, ranks: int, cells: int) -> None:
    rng = np.random.default_rng(experts * 100 + slots + cells)
    for _ in range(20):
        first, second = (random_placement(rng, 2, experts, slots, ranks) for _ in range(2))
        play(first, second, ranks, cells)


def test_plans_take_as_many_batches_as_their_busiest_rank_needs() -> None:
    rng = np.random.default_rng(0)
    load = np.stack([rng.permutation(10000 / np.arange(1, 65) ** 0.8) for _ in range(6)])
    first = rebalance(load, 72, 1, 1, 8)
    second = rebalance(rng.permutation(load, axis=1), 72, 1, 1, 8, previous=first)
    for cells in (2, 8):
        found = play(first, second, 8, cells)
        arrivals = np.zeros(8, int)
        for batch in found:
            for one in batch.transfers:
                arrivals[one.dst // 9] += 1
        assert len(found) <= 1.5 * -(-arrivals.max() // cells) + 1
    assert list(batches(first, first, 8, 2)) == []


def test_a_full_circle_is_one_batch() -> None:
    first = Placement.of([0, 1, 2, 3, 4, 5], 6)
    second = Placement.of([5, 1, 0, 3, 2, 4], 6)
    (batch,) = play(first, second, 3, 2)
    assert len(batch.transfers) == 3


def test_a_dead_ranks_slots_stay_empty() -> None:
    first = Placement.of([0, 1, 2, -1, -1, -1, 3, 0, 1], 4)
    second = Placement.of([0, 3, 2, -1, -1, -1, 3, 0, 1], 4)
    (batch,) = play(first, second, 3, 1)
    assert batch.transfers[0].src == 6


def test_the_most_urgent_layer_comes_first() -> None:
    first = Placement.of([[0, 1, 0, 1]] * 3, 2)
    second = Placement.of([[0, 0, 1, 1]] * 3, 2)
    assert list(batches(first, second, 2, 1)) == []  # a second replica on a rank is left out
    first, second = Placement.of([[0, 1, 2, 3]] * 3, 4), Placement.of([[0, 2, 1, 3]] * 3, 4)
    assert [batch.layers for batch in batches(first, second, 2, 1, [2, 0, 1])] == [(2,), (0,), (1,)]


def test_wrong_arguments_are_refused() -> None:
    first = Placement.of([0, 1, 2, 3], 4)
    for other, ranks, cells in ((Placement.of([0, 1, 2, 3, 0, 0], 4), 2, 1), (first, 3, 1), (first, 2, 0)):
        with pytest.raises(ValueError, match="they must be alike, and divide by"):
            next(batches(first, other, ranks, cells))
