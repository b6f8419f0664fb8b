"""Counts of dispatch and numbers that it carries beside the rows: expert_load, and the numbers of each rank.

The cases of test_alltoall.py hold both against the oracle, in every kind of round.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import putget
from tests.harness import Rank, fresh_ranks, run_ranks

SIZE = 3
EXPERTS = 6  # two a rank


def dispatch_of(a2a: putget.AllToAll, rank: Rank, ids: Tensor, **beside: Any) -> putget.Received:
    rows = torch.zeros(ids.shape[0], 4, device=rank.device)
    received = a2a.dispatch(ids.to(rank.device), torch.zeros(ids.shape, device=rank.device), rows, **beside)
    a2a.release()
    return received


def play_sums(rank: Rank) -> list[int]:
    """A body: three rounds into one counter, one of them without."""
    ids = torch.tensor([[0, 5], [0, -1], [2, 7]], dtype=torch.int32)
    load = torch.zeros(EXPERTS, dtype=torch.int32, device=rank.device)
    valid = torch.tensor(1, dtype=torch.int32, device=rank.device)
    with rank.all_to_all() as a2a:
        rank.meet()
        dispatch_of(a2a, rank, ids, expert_load=load)
        dispatch_of(a2a, rank, ids)
        dispatch_of(a2a, rank, ids, expert_load=load, num_valid_tokens=valid)
        with pytest.raises(putget.InvalidExpertIds):
            a2a.check()
        return load.tolist()


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_loads_add_up(mode: str, device: str) -> None:
    assert run_ranks(SIZE, play_sums, mode=mode, device=device) == [[3, 0, 1, 0, 0, 2]] * SIZE


def play_without(rank: Rank) -> tuple[list[int], list[list[int]]] | None:
    """A body: the last rank is left out after a round with everybody."""
    ids = torch.tensor([[0, 5], [2, 4]], dtype=torch.int32)
    load = torch.zeros(EXPERTS, dtype=torch.int32)
    numbers = torch.tensor([rank.rank + 1, -rank.rank], dtype=torch.int32)
    with rank.all_to_all(num_stats=2) as a2a:
        first = dispatch_of(a2a, rank, ids, stats=numbers).stats
        assert first is not None
        assert first.tolist() == [[1, 0], [2, -1], [3, -2]]
        if rank.rank == SIZE - 1:
            return None
        a2a.set_active_ranks([True] * (SIZE - 1) + [False])
        told = dispatch_of(a2a, rank, ids, stats=numbers, expert_load=load).stats
        assert told is not None
        return load.tolist(), told.tolist()


def test_a_rank_that_is_not_active_tells_zeros_and_gets_no_load() -> None:
    outcome = ([1, 0, 1, 0, 0, 0], [[1, 0], [2, -1], [0, 0]])
    with fresh_ranks(SIZE) as ranks:  # of their own: the others' communicator does without a rank from here on
        assert ranks.call(play_without) == {0: outcome, 1: outcome, 2: None}


def be_refused(rank: Rank, options: dict[str, Any], beside: dict[str, Any]) -> str:
    """A body: the message, and a round that works afterwards."""
    ids = torch.zeros((1, 2), dtype=torch.int32)
    with rank.all_to_all(**options) as a2a:
        given = {name: value(a2a, rank) if callable(value) else value for name, value in beside.items()}
        with pytest.raises(ValueError) as caught:
            dispatch_of(a2a, rank, ids, **given)
        rank.meet()
        dispatch_of(a2a, rank, ids)
        return str(caught.value)


def in_the_workspace(a2a: putget.AllToAll, rank: Rank) -> Tensor:
    return a2a.workspace.memory.tensor()[: 4 * EXPERTS].view(torch.int32)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("expert_load has shape [5], expected [6]", {}, {"expert_load": torch.zeros(5, dtype=torch.int32)}),
    ("expert_load has dtype int64, expected int32", {}, {"expert_load": torch.zeros(6, dtype=torch.int64)}),
    ("expert_load is a list, expected a tensor", {}, {"expert_load": [0] * 6}),
    ("expert_load lies in the workspace", {}, {"expert_load": in_the_workspace}),
    ("stats is given, this AllToAll has none: construct it", {}, {"stats": torch.zeros(1, dtype=torch.int32)}),
    ("stats has shape [2], expected [3]", {"num_stats": 3}, {"stats": torch.zeros(2, dtype=torch.int32)}),
    ("stats has dtype float32, expected int32", {"num_stats": 3}, {"stats": torch.zeros(3)}),
    ("stats has strides [2], expected a contiguous", {"num_stats": 3}, {"stats": torch.zeros(6).int()[::2]}),
    ("stats lies in the workspace", {"num_stats": EXPERTS}, {"stats": in_the_workspace}),
]


@pytest.mark.parametrize(("message", "options", "beside"), REFUSED, ids=[case[0] for case in REFUSED])
def test_wrong_arguments_are_refused(message: str, options: dict[str, Any], beside: dict[str, Any]) -> None:
    for said in run_ranks(2, be_refused, {"num_experts": EXPERTS, **options}, beside, mode="thread"):
        assert said.startswith(message)


@pytest.mark.parametrize("value", [-1, 65537, 2.0, "2", True, None])
def test_num_stats_refuses(value: Any) -> None:
    (comm,) = putget.Communicator.local(1)
    with pytest.raises(ValueError, match=r"^num_stats is .*, allowed are ints from 0 to 65536"):
        Rank(0, 1, torch.device("cpu"), _comm=comm).all_to_all(num_stats=value)
    comm.close()


def differ(rank: Rank) -> str:
    with pytest.raises(ValueError) as caught:
        rank.all_to_all(num_stats=rank.rank)
    return str(caught.value)


def test_ranks_agree_on_the_number() -> None:
    for said in run_ranks(2, differ, mode="thread"):
        assert "num_stats" in said


def test_no_bytes_without_statistics() -> None:
    row = putget.Payload((64,), torch.bfloat16)
    sizes = {"ep_size": 4, "max_tokens_per_rank": 8, "top_k": 2, "payloads": [row], "output": row}
    without = putget.workspace_bytes(**sizes)
    assert putget.workspace_bytes(**sizes, num_stats=0) == without
    assert putget.workspace_bytes(**sizes, num_stats=1) > without
