"""expert_to_rank is the same on every rank: compared at construction, and by check() where all ranks ask for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import putget
from tests.harness import Rank, run_ranks


def said_by(call: Any) -> str:
    try:
        call()
    except (ValueError, putget.PutgetError) as error:
        kind = ValueError if isinstance(error, ValueError) else type(error)
        return f"{kind.__name__}: {error}"
    return "accepted"


def construct_apart(rank: Rank, num_experts: int) -> list[str]:
    """A body: the last rank has another table; then all have the same."""
    table = [expert % rank.size for expert in range(num_experts)]
    other = [*table[:-1], 0 if table[-1] else 1]
    given = other if rank.rank == rank.size - 1 else table
    said = [said_by(lambda: rank.all_to_all(num_experts=num_experts, expert_to_rank=given).close())]
    tensor = torch.tensor(table, dtype=torch.int32)
    said.append(said_by(lambda: rank.all_to_all(num_experts=num_experts, expert_to_rank=tensor).close()))
    return said


@pytest.mark.parametrize("num_experts", [6, 300])
def test_a_table_that_differs_at_construction_is_named_on_all_ranks(num_experts: int, device: str) -> None:
    for apart, same in run_ranks(3, construct_apart, num_experts, mode="thread", device=device):
        assert apart.startswith("ValueError: expert_to_rank differs between ranks: rank 0 has ")
        assert ", rank 2 has " in apart
        assert ("[0, 1, 2, 0, 1, 0]" in apart) == (num_experts == 6)
        assert same == "accepted"


def construct_with_tables(rank: Rank) -> list[bool]:
    """A body: a list, a tensor on the CPU, a tensor on the device: is the object's table this tensor, and the same?"""
    found = []
    for table in ([0, 1, 1, 0], torch.tensor([0, 1, 1, 0], dtype=torch.int32)):
        with rank.all_to_all(num_experts=4, expert_to_rank=table) as a2a:
            found.append(a2a.expert_to_rank.tolist() == [0, 1, 1, 0] and a2a.expert_to_rank.device == rank.device)
    table = torch.tensor([0, 1, 1, 0], dtype=torch.int32, device=rank.device)
    with rank.all_to_all(num_experts=4, expert_to_rank=table) as a2a:
        found.append(a2a.expert_to_rank.data_ptr() == table.data_ptr())
    return found


def test_a_table_is_kept_on_the_device_and_copied_from_elsewhere(device: str) -> None:
    assert run_ranks(2, construct_with_tables, mode="thread", device=device) == [[True] * 3] * 2


def change(rank: Rank) -> dict[str, str]:
    """A body: tables change in place, on all ranks alike or not."""
    said = {}
    with rank.all_to_all() as a2a:
        said["as constructed"] = said_by(lambda: a2a.check(expert_to_rank=True))
        a2a.expert_to_rank[0] = 1
        said["changed everywhere"] = said_by(lambda: a2a.check(expert_to_rank=True))
        if rank.rank == 1:
            a2a.expert_to_rank[1] = 2
        said["nobody asks"] = said_by(a2a.check)
        said["changed on rank 1"] = said_by(lambda: a2a.check(expert_to_rank=True))
        a2a.expert_to_rank = [0, 0, 1, 1, 2, 2]
        said["healed"] = said_by(lambda: a2a.check(expert_to_rank=True))
        a2a.expert_to_rank[5] = 3
        said["no rank"] = said_by(lambda: a2a.check(expert_to_rank=True))
        a2a.expert_to_rank[5] = 2
        said["healed again"] = said_by(lambda: a2a.check(expert_to_rank=True))
    return said


def test_a_table_that_changes_is_compared_at_request(device: str) -> None:
    for said in run_ranks(3, change, mode="thread", device=device):
        assert said.pop("changed on rank 1") == (
            "ValueError: expert_to_rank differs between ranks: rank 0 has [1, 0, 1, 1, 2, 2], "
            "rank 1 has [1, 2, 1, 1, 2, 2]"
        )
        assert said.pop("no rank") == "ValueError: expert_to_rank holds ranks from 0 to 3, allowed are 0 to 2"
        assert set(said.values()) == {"accepted"}, said


def compare_without_rank_2(rank: Rank, asked: threading.Event) -> list[str]:
    """A body: rank 2 is excluded, and has another table; then rank 0 asks alone."""
    said = []
    with rank.all_to_all(timeout_s=2.0) as a2a:
        if rank.rank == 2:
            a2a.expert_to_rank[0] = 2
            return said
        a2a.set_active_ranks([True, True, False])
        said.append(said_by(lambda: a2a.check(expert_to_rank=True)))
        if rank.rank == 0:
            said.append(said_by(lambda: a2a.check(expert_to_rank=True)))
            asked.set()
        else:
            said.append("")
            assert asked.wait(20)
        a2a.set_active_ranks([True, True, False])
        said.append(said_by(lambda: a2a.check(expert_to_rank=True)))
    return said


def test_a_rank_that_asks_alone_does_not_hang(device: str) -> None:
    alone, other, _ = run_ranks(3, compare_without_rank_2, threading.Event(), mode="thread", device=device)
    assert (alone[0], other[0], alone[2], other[2]) == ("accepted",) * 4
    assert alone[1] == "PeerTimeout: check, round 0: rank 0 heard nothing from rank(s) 1 within 2 s"


def check_with_a_fault(rank: Rank) -> str:
    """A body: rank 0 has a fault of its own; its peers hear of the table all the same."""
    with rank.all_to_all() as a2a:
        row = torch.ones(2, 4, device=rank.device)
        ids = torch.zeros(2, 2, dtype=torch.int32, device=rank.device)
        rank.meet()
        said_by(lambda: a2a.dispatch(ids, row[:, :2].contiguous(), row, max_rows=1 if rank.rank == 0 else None))
        said = said_by(lambda: a2a.check(expert_to_rank=True))
        a2a.set_active_ranks([True] * rank.size)
    return said


def test_a_rank_with_a_fault_answers_its_peers(device: str) -> None:
    said = run_ranks(2, check_with_a_fault, mode="thread", device=device)
    assert said[0].startswith("CapacityExceeded")
    assert said[1] == "accepted"


IDS = [[0, 2], [1, 3], [4, 5]]  # with the default table two experts each


def play_with_another_table(rank: Rank, changed_in: tuple[int, ...], num_experts: int, halves: bool) -> list[str]:
    """A body: in some rounds rank 1 gives expert 0 to itself; what check() says after each round, and at the end."""
    row = torch.ones(3, 4, device=rank.device)
    ids = torch.tensor(IDS, dtype=torch.int32, device=rank.device)
    weights = row[:, :2].contiguous()
    said = []
    with rank.all_to_all(num_experts=num_experts, expert_to_rank=[e // 2 % 3 for e in range(num_experts)]) as a2a:
        for number in range(6):
            if rank.rank == 1:
                a2a.expert_to_rank[0] = 1 if number in changed_in else 0
            rank.meet()
            if halves:
                a2a.dispatch_start(ids, weights, row)
                a2a.dispatch_finish()
            else:
                a2a.dispatch(ids, weights, row)
            a2a.release() if number % 2 else a2a.combine()
            if number % 3 == 2:
                said.append(said_by(a2a.check))
    return said


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("num_experts", [6, 1500])
def test_rounds_with_different_tables_are_counted_by_source(num_experts: int, halves: bool, device: str) -> None:
    """Each round is counted by the dispatch after it."""
    results = run_ranks(3, play_with_another_table, (1, 2, 5), num_experts, halves, device=device)
    for rank, (first, second) in enumerate(results):
        sources = [1] if rank != 1 else [0, 2]
        for said, rounds in ((first, 1), (second, 1)):
            assert said.startswith(f"ProtocolMisuse: expert_to_rank was another one than on rank {rank} on "), said
            # Tokens of each source for each rank; of rank 1 token 0 does not go to rank 0 then.
            rows = [
                1
                if source == 1 and rank == 0
                else len({token for token, pair in enumerate(IDS) for expert in pair if expert // 2 == rank})
                for source in sources
            ]
            for source, count in zip(sources, rows, strict=True):
                assert f"rank {source} in {rounds} rounds, in which {count} rows came from it" in said, (said, rank)
            assert said.count("rows came") == len(sources)


def group_with_another_table(rank: Rank, copy_rows: bool) -> list[str]:
    """A body: in the first round rank 1 has experts 0 and 4 the other way round; what check() says in each round."""
    row = torch.ones(3, 4, device=rank.device)
    ids = torch.tensor(IDS, dtype=torch.int32, device=rank.device)
    said = []
    with rank.all_to_all() as a2a:
        right = a2a.expert_to_rank.tolist()
        for number in range(3):
            a2a.expert_to_rank = [2, 0, 1, 1, 0, 2] if rank.rank == 1 and number == 0 else right
            rank.meet()
            a2a.dispatch(ids, row[:, :2].contiguous(), row).expert_major(copy_rows=copy_rows)
            said.append(said_by(a2a.check))
            a2a.combine()
    return said


@pytest.mark.parametrize("copy_rows", [False, True])
def test_rows_without_an_expert_here_are_counted_by_source(copy_rows: bool, device: str) -> None:
    results = run_ranks(3, group_with_another_table, copy_rows, mode="thread", device=device)
    for rank, (grouped, noted, healed) in enumerate(results):
        # The first of rank 1's tokens goes to rank 2 for expert 0, the last to rank 0 for expert 4.
        lost = f"ProtocolMisuse: expert_major: 1 rows have no expert on rank {rank} by the table here (1 from rank 1)"
        assert grouped.startswith("accepted" if rank == 1 else lost)
        assert noted.startswith(f"ProtocolMisuse: expert_to_rank was another one than on rank {rank} on rank ")
        assert healed == "accepted"


def play_with_one_table(rank: Rank) -> str:
    """A body: two objects of one workspace with tables of their own, which change; the epoch wraps."""
    row = torch.ones(1, 4, device=rank.device)
    ids = torch.zeros(1, 2, dtype=torch.int32, device=rank.device)
    with (
        rank.all_to_all(expert_to_rank=[0, 1, 2, 0, 1, 2]) as first,
        rank.all_to_all(expert_to_rank=[2, 2, 2, 1, 1, 0], workspace=first.workspace) as second,
    ):
        for turn in range(12):
            if turn == 4:
                first.workspace._reset((1 << 32) - 4)
            if turn == 9:
                first.set_active_ranks([True] * 3)
            a2a = second if turn % 3 == 1 else first
            a2a.expert_to_rank[turn % 6] = turn % 3
            rank.meet()
            a2a.dispatch(ids, row[:, :2].contiguous(), row)
            a2a.combine()
        return said_by(second.check) + said_by(first.check)


def test_tables_that_agree_are_not_counted(device: str) -> None:
    assert run_ranks(3, play_with_one_table, device=device) == ["acceptedaccepted"] * 3
