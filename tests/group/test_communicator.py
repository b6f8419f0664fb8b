"""Groups of ranks: the world, subgroups of it, and threads of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import putget
from tests.harness import Rank, fresh_ranks, run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import Outcome, check_case, play


def names(rank: Rank) -> tuple[int, int]:
    comm = putget.Communicator(dist.group.WORLD)
    seen = comm.rank, comm.size
    comm.close()
    comm.close()
    return seen


def test_world_has_the_ranks_of_torch() -> None:
    assert run_ranks(4, names) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_local_ranks_are_numbered() -> None:
    comms = putget.Communicator.local(3)
    assert [(comm.rank, comm.size) for comm in comms] == [(0, 3), (1, 3), (2, 3)]
    for comm in comms:
        comm.close()
        comm.close()


@pytest.mark.parametrize("count", [0, -1, 129, 1.0, "2", True])
def test_local_wants_a_count_of_ranks(count: Any) -> None:
    with pytest.raises(ValueError, match=r"\bn\b"):
        putget.Communicator.local(count)


def test_without_torch_distributed_it_says_so() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="group"):
        putget.Communicator()


def play_in_subgroups(rank: Rank, members: list[list[int]], cases: list[Case]) -> tuple[int, list[Outcome]] | None:
    """A body: every subgroup plays its own case, at the same time; a rank outside of all plays none."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [i for i, ranks in enumerate(members) if rank.rank in ranks]
    if not mine:
        return None
    group, case = groups[mine[0]], cases[mine[0]]
    comm = putget.Communicator(group)
    me = Rank(comm.rank, comm.size, rank.device, _comm=comm)
    outcomes = play(me, case)
    comm.close()
    return comm.rank, outcomes


def test_subgroups_of_the_world(device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 8:
        pytest.skip("needs 8 GPUs: subgroups are of processes")
    members = [[0, 3], [1, 2, 6, 7]]
    cases = [
        Case(2, (Round(1, (3, 8)), Round(2, (0, 5), ending="flat")), num_experts=5, top_k=3),
        Case(4, (Round(3, (3, 8, 0, 1)), Round(4, (1, 5, 2, 2), ending="open")), num_experts=9, top_k=2),
    ]
    results = run_ranks(8, play_in_subgroups, members, cases, device=device)
    assert results[4] is None
    assert results[5] is None
    for ranks, case in zip(members, cases, strict=True):
        assert [results[rank][0] for rank in ranks] == list(range(len(ranks)))
        check_case(case, [results[rank][1] for rank in ranks])


def refused_outsider(rank: Rank) -> str:
    group = dist.new_group([0])
    if rank.rank == 0:
        putget.Communicator(group).close()
        return "member"
    try:
        putget.Communicator(group)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_rank_outside_the_group_is_refused() -> None:
    member, outsider = run_ranks(2, refused_outsider)
    assert member == "member"
    assert "group" in outsider


def play_on_two_communicators(rank: Rank, case: Case) -> list[list[Outcome]]:
    """A body: objects of two communicators over the same ranks do not see each other's messages."""
    first, second = putget.Communicator(), putget.Communicator()
    ranks = [Rank(rank.rank, rank.size, rank.device, _comm=comm) for comm in (first, second)]
    with ranks[1].all_to_all(**case.options()), ranks[0].all_to_all():
        outcomes = [play(me, case) for me in ranks]
    first.close()
    second.close()
    return outcomes


def test_two_communicators_over_the_same_ranks() -> None:
    case = Case(3, (Round(1, (3, 8, 0)), Round(2, (0, 5, 1))), top_k=3)
    results = run_ranks(3, play_on_two_communicators, case)
    for i in range(2):
        check_case(case, [outcomes[i] for outcomes in results])


def use_after_close(rank: Rank) -> list[str]:
    comm = putget.Communicator()
    comm.close()
    messages = []
    for make in (
        lambda: putget.Workspace(comm, 1 << 16, device="cpu"),
        lambda: Rank(rank.rank, rank.size, rank.device, _comm=comm).all_to_all(),
    ):
        with pytest.raises((ValueError, putget.PutgetError)) as caught:
            make()
        messages.append(str(caught.value))
    return messages


def test_a_closed_communicator_is_refused() -> None:
    for messages in run_ranks(2, use_after_close):
        assert all("closed" in message for message in messages)


def said(rank: Rank) -> dict[int, Any]:
    """A body: what all ranks hear of each other."""
    return rank.comm.exchange("where", {"rank": rank.rank, "tuple": (1, None)}, 30.0)


def test_ranks_hear_the_values_of_all() -> None:
    assert run_ranks(3, said) == [{rank: {"rank": rank, "tuple": [1, None]} for rank in range(3)}] * 3


def apart(rank: Rank, how: str) -> str:
    """A body: rank 1 differs from the others, or does not come; all hear of it, and the next exchange works."""
    try:
        if how == "name":
            rank.comm.exchange("theirs" if rank.rank == 1 else "ours", 0, 30.0)
        elif how == "value":
            rank.comm.exchange("ours", object() if rank.rank == 1 else 0, 30.0)
        elif rank.rank != 1:
            rank.comm.exchange("ours", 0, 0.2)
    except (ValueError, putget.PeerTimeout) as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = ""
    if how == "missing":
        return found
    assert rank.comm.exchange("afterwards", rank.rank, 30.0) == {0: 0, 1: 1, 2: 2}
    return found


def test_ranks_at_different_names_are_told_both() -> None:
    for text in run_ranks(3, apart, "name"):
        assert "'ours'" in text
        assert "'theirs'" in text
        assert "rank 1" in text


def test_a_value_that_is_no_json_ends_it_on_all_ranks() -> None:
    for text in run_ranks(3, apart, "value"):
        assert re.search(r"ValueError: (rank 1: )?value of 'ours' is <object .*, expected JSON", text)


def test_a_rank_that_does_not_come_is_named() -> None:
    with fresh_ranks(3) as ranks:  # rank 1 is behind the others afterwards
        ranks.call(said)
        told = ranks.call(apart, "missing")
        zero, one, two = (told[rank] for rank in range(3))
    assert "1" in zero
    assert zero.startswith("PeerTimeout")
    assert two.startswith("PeerTimeout")
    assert one == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", 1, 1.0), "name is ''"),
        (("a", "x" * (1 << 20), 1.0), "value of 'a' has 1048578 bytes as JSON, allowed are 983040"),
        (("a", {"b": {1}}, 1.0), "value of 'a' is"),
        (("a", 1, 0), "deadline is 0"),
        (("a", 1, float("nan")), "deadline is nan"),
    ],
)
def test_a_wrong_exchange_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    (comm,) = putget.Communicator.local(1)
    with comm:
        with pytest.raises(ValueError, match=re.escape(text)):
            comm.exchange(*arguments)
        with pytest.raises(ValueError, match=r"members is \[1\], expected ranks below 1 with rank 0"):
            comm.exchange_among("a", 1, 1.0, members=[1])
        assert comm.exchange("a", 1.5, 1.0) == {0: 1.5}
    with pytest.raises(ValueError, match="closed"):
        comm.exchange("a", 1, 1.0)
