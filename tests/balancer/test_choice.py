"""The choice of replicas: what each way takes, and what it makes of small batches of recorded routing."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from putget import BackendUnavailable, _abi, _abi_balancer
from putget.balancer import Placement, ReplicaChoice, rebalance
from tests.balancer.recorded import counts, routing

WAYS = ("nearest", "round_robin", "hash", "balanced", "activated")
# Four ranks of three slots: expert 0 on all ranks, 1 on two of the first node, 2 and 3 on one of each.
PLACEMENT = Placement.of([0, 1, 4, 0, 1, 5, 0, 2, 3, 0, 6, 7], 8)


def random_ids(seed: int, tokens: int, experts: int = 8, top_k: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices
    return torch.where(torch.rand(tokens, top_k, generator=generator) < 0.1, -1, ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("how", WAYS)
def test_every_pair_gets_a_slot_of_its_expert(how: str, dtype: torch.dtype) -> None:
    choose = ReplicaChoice(PLACEMENT, how=how, ep_size=4, ep_rank=1, ranks_per_node=2)
    for tokens in (0, 1, 5, 200):
        ids = random_ids(tokens, tokens).to(dtype)
        slots = choose(ids)
        assert slots.dtype == dtype
        assert torch.equal(slots == -1, ids == -1)
        table = torch.from_numpy(PLACEMENT.physical_to_logical[0]).to(dtype)
        assert torch.equal(table[slots[slots >= 0]], ids[ids >= 0])
        assert torch.equal(choose(ids), slots)


@pytest.mark.parametrize("how", WAYS)
def test_ids_out_of_range_are_nobodys(how: str) -> None:
    ids = torch.tensor([[8, -2, 2**31, -(2**40)]])
    assert ReplicaChoice(PLACEMENT, how=how, ep_size=4)(ids).tolist() == [[-1] * 4]


def test_nearest() -> None:
    ids = torch.tensor([[0, 1, 2]])
    slots = [ReplicaChoice(PLACEMENT, how="nearest", ep_size=4, ep_rank=r, ranks_per_node=2)(ids) for r in range(4)]
    # Expert 1 is on ranks 0 and 1: its own rank there, and by rank on the other node.
    assert torch.cat(slots).tolist() == [[0, 1, 7], [3, 4, 7], [6, 1, 7], [9, 4, 7]]


def test_nearest_takes_the_own_node_first() -> None:
    placement = Placement.of([0, 1, 2, 0], 3)  # four ranks of one slot
    choices = [ReplicaChoice(placement, how="nearest", ep_size=4, ep_rank=r, ranks_per_node=2) for r in range(4)]
    assert [int(choose(torch.tensor([[0]]))) for choose in choices] == [0, 0, 3, 3]


def test_round_robin_takes_turns() -> None:
    ids = torch.zeros(8, 1, dtype=torch.int64)
    slots = ReplicaChoice(PLACEMENT, how="round_robin", ep_size=4, ep_rank=1)(ids)
    assert slots.flatten().tolist() == [3, 6, 9, 0, 3, 6, 9, 0]


def test_hash_is_even_and_depends_on_the_seed() -> None:
    ids = torch.zeros(4000, 1, dtype=torch.int32)
    choose = ReplicaChoice(PLACEMENT, how="hash", ep_size=4)
    slots = choose(ids)
    found = torch.bincount(slots.flatten())[[0, 3, 6, 9]]
    assert found.min() > 900
    assert not torch.equal(choose(ids, seed=1), slots)
    assert not torch.equal(ReplicaChoice(PLACEMENT, how="hash", ep_size=4, ep_rank=2)(ids), slots)


def best_largest(ids: NDArray[Any], placement: Placement, layer: int, ep_size: int) -> float:
    """The least largest load that shares of replicas allow: expert by expert until nothing changes."""
    in_rank = placement.num_replicas // ep_size
    number = np.bincount(ids.ravel(), minlength=placement.num_experts).astype(float)
    ranks = [slots[slots >= 0] // in_rank for slots in placement.logical_to_physical[layer]]
    share = [np.full(len(where), n / len(where)) for where, n in zip(ranks, number, strict=True)]
    load = np.zeros(ep_size)
    for where, quota in zip(ranks, share, strict=True):
        load[where] += quota
    for _ in range(60):
        for expert, where in enumerate(ranks):
            if len(where) > 1 and number[expert]:
                load[where] -= share[expert]
                order = np.sort(load[where])
                levels = (np.cumsum(order) + number[expert]) / np.arange(1, len(order) + 1)
                level = levels[np.nonzero(levels >= order)[0][-1]]
                share[expert] = np.maximum(level - load[where], 0)
                load[where] += share[expert]
    return float(load.max())


def largest(slots: torch.Tensor, ep_size: int, num_replicas: int) -> int:
    return int(torch.bincount(slots.flatten() // (num_replicas // ep_size), minlength=ep_size).max())


@pytest.mark.parametrize("seed", range(20))
def test_balanced_is_nearly_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = rng.integers(1, 200, (1, 32))
    placement = rebalance(load, 48, 1, 1, 8)
    ids = rng.choice(32, (96, 4), p=load[0] / load.sum())
    found = largest(ReplicaChoice(placement, ep_size=8)(torch.from_numpy(ids)), 8, 48)
    others = [largest(ReplicaChoice(placement, how=how, ep_size=8)(torch.from_numpy(ids)), 8, 48) for how in WAYS[1:3]]
    assert found <= best_largest(ids, placement, 0, 8) + 2.5
    assert found < min(others)


@pytest.mark.parametrize("how", WAYS)
def test_replicas_on_one_rank_are_as_good_as_one(how: str) -> None:
    """Expert 0 has slots 0 and 1 of rank 0, and slot 2 of rank 1; expert 1 has slots 4 and 5 of rank 2."""
    placement = Placement.of([0, 0, 0, 2, 1, 1], 3)
    ids = torch.tensor([[0]] * 60 + [[2]] * 20 + [[1]] * 40)
    slots = ReplicaChoice(placement, how=how, ep_size=3, ep_rank=2)(ids).flatten()
    table = torch.from_numpy(placement.physical_to_logical[0])
    assert torch.equal(table[slots], ids.flatten())
    loads = torch.bincount(slots // 2, minlength=3).tolist()
    if how == "balanced":
        assert loads == [40, 40, 40]
    if how == "round_robin":
        assert loads == [40, 40, 40]
        assert torch.bincount(slots).tolist() == [20, 20, 20, 20, 20, 20]


def rests(how: str, ep_size: int, slots: int, tokens: int) -> float:
    """Largest over mean, less 1: of batches of consecutive tokens, with a plan of the whole task."""
    ids = routing("law").astype(np.int64)
    placement = rebalance(counts(ids), slots, 1, 1, ep_size)
    found = []
    for layer in range(0, len(ids), 2):
        choose = ReplicaChoice(placement, layer, how=how, ep_size=ep_size)
        for first in range(0, ids.shape[1] - tokens, ids.shape[1] // 6):
            batch = torch.from_numpy(ids[layer, first : first + tokens].copy())
            found.append(largest(choose(batch), ep_size, slots) / (batch.numel() / ep_size) - 1)
    return float(np.mean(found))


@pytest.mark.parametrize(("ep_size", "slots", "tokens"), [(8, 80, 64), (8, 72, 256), (8, 72, 1024), (32, 96, 1024)])
def test_balanced_takes_half_of_the_rest_away(ep_size: int, slots: int, tokens: int) -> None:
    assert rests("balanced", ep_size, slots, tokens) <= rests("round_robin", ep_size, slots, tokens) / 2


@pytest.mark.parametrize(
    ("ep_size", "slots", "tokens", "part"), [(8, 72, 64, 0.53), (32, 96, 64, 0.60), (32, 96, 256, 0.55)]
)
def test_the_plan_limits_what_a_choice_can_do(ep_size: int, slots: int, tokens: int, part: float) -> None:
    """With few slots most experts have one replica. Of a small batch, the largest of them is nobody's to share."""
    assert rests("balanced", ep_size, slots, tokens) <= part * rests("round_robin", ep_size, slots, tokens)


def most_activated(ids: torch.Tensor, slots: torch.Tensor, ep_size: int, num_replicas: int) -> int:
    """The most different slots of a rank."""
    used = slots[slots >= 0].unique()
    return int(torch.bincount(used // (num_replicas // ep_size), minlength=ep_size).max())


def fewest_activated(ids: torch.Tensor, placement: Placement, ep_size: int) -> int:
    """The least that one replica of each expert allows: by paths that free a place, for one limit after the other."""
    in_rank = placement.num_replicas // ep_size
    used = sorted({int(expert) for expert in ids.flatten() if expert >= 0})
    ranks = {e: {int(slot) // in_rank for slot in placement.logical_to_physical[0, e] if slot >= 0} for e in used}
    for limit in range(1, len(used) + 1):
        held: dict[int, list[int]] = {rank: [] for rank in range(ep_size)}

        def place(expert: int, tried: set[int], limit: int = limit, held: dict[int, list[int]] = held) -> bool:
            for rank in sorted(ranks[expert] - tried):
                tried.add(rank)
                if len(held[rank]) < limit:
                    held[rank].append(expert)
                    return True
                for index, other in enumerate(held[rank]):
                    if place(other, tried, limit, held):
                        held[rank][index] = expert
                        return True
            return False

        if all(place(expert, set()) for expert in used):
            return limit
    return len(used)


@pytest.mark.parametrize("seed", range(20))
def test_activated_reads_few_experts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = rebalance(rng.integers(1, 200, (1, 64)), 96, 1, 1, 8)
    ids = torch.stack([torch.from_numpy(rng.permutation(64)[:6]) for _ in range(6)])
    slots = {how: ReplicaChoice(placement, how=how, ep_size=8)(ids) for how in ("activated", "round_robin")}
    assert len(slots["activated"].unique()) == len(ids.unique())  # one replica of each
    found, other = (most_activated(ids, slots[how], 8, 96) for how in ("activated", "round_robin"))
    assert found <= fewest_activated(ids, placement, 8) + 1
    assert found <= other


def test_activated_is_near_the_fewest_on_the_average() -> None:
    excess = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        placement = rebalance(rng.integers(1, 200, (1, 64)), 96, 1, 1, 8)
        ids = torch.from_numpy(rng.choice(64, (8, 6)))
        slots = ReplicaChoice(placement, how="activated", ep_size=8)(ids)
        excess.append(most_activated(ids, slots, 8, 96) - fewest_activated(ids, placement, 8))
    assert min(excess) >= 0
    assert float(np.mean(excess)) <= 0.2


def test_ranks_activate_the_same_replicas_where_nothing_speaks_against_it() -> None:
    ids = torch.tensor([[0], [3]])
    assert len({tuple(ReplicaChoice(PLACEMENT, how="activated", ep_size=4, ep_rank=rank)(ids).flatten().tolist())
                for rank in range(4)}) == 1  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_padding_has_no_slot_and_no_say(how: str) -> None:
    ids = random_ids(5, 40)
    choose = ReplicaChoice(PLACEMENT, how=how, ep_size=4)
    for valid in (0, 17, 40, 41, -1):
        slots = choose(ids, num_valid_tokens=torch.tensor([valid], dtype=torch.int32))
        seen = min(max(valid, 0), 40)
        assert torch.equal(slots[:seen], choose(ids[:seen]))
        assert bool((slots[seen:] == -1).all())


@pytest.mark.parametrize("how", WAYS)
def test_another_placement_is_in_force_from_the_next_call_on(how: str) -> None:
    other = Placement.of([[7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 1]], 8)
    ids = random_ids(3, 30)
    choose = ReplicaChoice(PLACEMENT, how=how, ep_size=4, ep_rank=2, ranks_per_node=2)
    before = choose(ids)
    choose.set_placement(other)
    fresh = ReplicaChoice(other, how=how, ep_size=4, ep_rank=2, ranks_per_node=2)
    assert torch.equal(choose(ids), fresh(ids))
    for wrong, message in (
        (Placement.of([0, 1, 2, 3], 4), "placement has 4 experts and 4 slots; the one in force has 8 and 12"),
        (Placement.of([0, 1, 2, 3, 4, 5, 6, 7] * 2, 8), "placement has 8 experts and 16 slots"),
    ):
        with pytest.raises(ValueError, match=message):
            choose.set_placement(wrong)
    with pytest.raises(ValueError, match="layer is 1, allowed are 0 to 0"):
        choose.set_placement(PLACEMENT, 1)
    assert torch.equal(choose(ids), fresh(ids))
    choose.set_placement(PLACEMENT)
    assert torch.equal(choose(ids), before)


def test_a_seed_in_memory_is_read_at_the_call() -> None:
    ids = random_ids(1, 50)
    choose = ReplicaChoice(PLACEMENT, how="hash", ep_size=4)
    word = torch.zeros(1, dtype=torch.int32)
    for seed in (0, 5, 9):
        word.fill_(seed)
        assert torch.equal(choose(ids, seed=word), choose(ids, seed=seed))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"how": "best"}, "how is 'best', allowed are nearest"),
    ({"layer": 1}, "layer is 1, allowed are 0 to 0"),
    ({"ep_size": 5}, "ep_size is 5, which does not divide 12 slots"),
    ({"ep_rank": 4}, "ep_rank is 4, allowed are 0 to 3"),
    ({"ranks_per_node": 0}, "ranks_per_node is 0, allowed are 1 to 4"),
    ({"max_replicas": 6}, "max_replicas is 6, allowed are 1 to 5"),
    ({"max_replicas": 3}, "4 slots for expert 0, allowed are 3"),
    ({"device": "tpu"}, "device is 'tpu'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplicaChoice(PLACEMENT, **{"ep_size": 4, **changes})


def test_bad_tensors_are_named() -> None:
    choose = ReplicaChoice(PLACEMENT, ep_size=4)
    ids = random_ids(0, 4)
    for wrong, message in ((ids.float(), "torch.float32"), (ids[0], r"\[3\]"), (ids.t(), "not contiguous")):
        with pytest.raises(ValueError, match=f"topk_ids is .*{message}"):
            choose(wrong)
    with pytest.raises(ValueError, match=r"out is torch.int32 \[4, 3\]; topk_ids is torch.int64"):
        choose(ids, out=ids.int())
    with pytest.raises(ValueError, match="out is topk_ids"):
        choose(ids, out=ids)
    with pytest.raises(ValueError, match="seed is -1"):
        choose(ids, seed=-1)
    with pytest.raises(ValueError, match="seed has dtype int64, expected int32"):
        choose(ids, seed=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"num_valid_tokens has shape \[2\], expected \[1\]"):
        choose(ids, num_valid_tokens=torch.zeros(2, dtype=torch.int32))


def test_the_c_interface_checks_its_tables() -> None:
    slots = np.array([0, 1, 1, 0], np.int32)
    tables = np.full(_abi.library().putget_replicas_words(2, 2), 77, np.int32)
    made = _abi_balancer.ReplicasArgs(
        num_experts=2, width=2, num_ranks=2, slots_per_rank=2, ranks_per_node=2,
        physical_to_logical=slots.ctypes.data, tables=tables.ctypes.data,
    )  # fmt: skip
    for held, message in (
        ([0, 1, 2, 1], "slot 2 holds 2, allowed are -1 and experts below 2"),
        ([0, 0, -1, -1], "no slot for expert 1"),
        ([0, 1, 1, 1], "3 slots for expert 1, allowed are 2"),
    ):
        slots[:] = held
        with pytest.raises(ValueError, match=message):
            _abi.call("putget_replicas", ctypes.byref(made))
        assert (tables == 77).all()
    slots[:] = [0, 1, 1, 0]
    _abi.call("putget_replicas", ctypes.byref(made))
    args = _abi_balancer.ChooseArgs(
        num_experts=2, width=2, num_ranks=2, slots_per_rank=2, top_k=1, tables=tables.ctypes.data
    )
    _abi.call("putget_choose", ctypes.byref(args))
    first_slot = 5 * 2 + 1
    for word, value, message in (
        (first_slot + 3, 4, "expert 1 has slot 4, allowed are 0 to 3"),
        (1, 3, "expert 1 has 3 slots, allowed are 1 to 2"),
        (2, 0, "ranks of an expert is 0, allowed are 1 to 2"),
        (4, 2, "nearest of an expert is 2, allowed are 0 to 1"),
    ):
        kept, tables[word] = tables[word], value
        with pytest.raises(ValueError, match=message):
            _abi.call("putget_choose", ctypes.byref(args))
        tables[word] = kept


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailable, match="device cuda"):
        ReplicaChoice(PLACEMENT, ep_size=4, device="cuda")
