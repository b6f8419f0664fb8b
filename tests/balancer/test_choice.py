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

WAYS = ("nearest", "round_robin", "hash", "balanced")
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


BAD: list[tuple[dict[str, Any], str]] = [
    ({"how": "best"}, "how is 'best', allowed are nearest"),
    ({"layer": 1}, "layer is 1, allowed are 0 to 0"),
    ({"ep_size": 5}, "ep_size is 5, which does not divide 12 slots"),
    ({"ep_rank": 4}, "ep_rank is 4, allowed are 0 to 3"),
    ({"ranks_per_node": 0}, "ranks_per_node is 0, allowed are 1 to 4"),
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


def test_the_c_interface_checks_its_tables() -> None:
    slots, number = np.array([[0], [9]], np.int32), np.array([1, 1], np.int32)
    args = _abi_balancer.ChooseArgs(
        num_experts=2, width=1, num_ranks=2, slots_per_rank=1, ranks_per_node=2, top_k=1,
        slots=slots.ctypes.data, counts=number.ctypes.data,
    )  # fmt: skip
    with pytest.raises(ValueError, match="slots of expert 1 has 9, allowed are 0 to 1"):
        _abi.call("putget_choose", ctypes.byref(args))
    number[0] = 2
    with pytest.raises(ValueError, match="counts of expert 0 is 2, allowed are 1 to 1"):
        _abi.call("putget_choose", ctypes.byref(args))
    args.device = _abi.DEVICE_CUDA
    with pytest.raises(BackendUnavailable, match="no CUDA kernel"):
        _abi.call("putget_choose", ctypes.byref(args))
