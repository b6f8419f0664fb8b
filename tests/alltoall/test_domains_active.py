"""Active ranks that change across virtual domains, against the oracle, bit by bit."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from putget.core import domain_rounds
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case
from tests.harness.compare import check_case, check_round, play_round
from tests.harness.domains import Masks, World, check_masks, come_and_go, in_domains, network, only, ragged
from tests.memory.test_workspace import bytes_of


def shared_then_changed(rank: Rank, case: Case, masks: list[tuple[bool, ...]], meeting: threading.Barrier) -> list[Any]:
    """A body: two objects of a workspace under one mask after the other; one goes in the middle, another comes."""
    outcomes: list[Any] = []
    workspace = putget.Workspace(rank.comm, 2 * bytes_of(case), device=rank.device, timeout_s=20, warmup_timeout_s=20)
    objects = [rank.all_to_all(**case.options(), workspace=workspace) for _ in range(3)]
    objects.pop(1).close()
    objects.append(rank.all_to_all(**case.options(), workspace=workspace))
    for number, mask in enumerate(masks):
        outcomes.append([])
        if mask[rank.rank]:
            if number > 0:
                workspace.set_active_ranks(mask)
            under_it = replace(case, active=mask)
            for index in range(len(case.rounds)):
                outcomes[-1].append(play_round(objects[index % 3], rank, under_it, index))
        meeting.wait(60)
    for owner in (*objects, workspace):
        owner.close()
    return outcomes


def change_with(rank: Rank, case: Case, count: int) -> list[Any]:
    """A body: so many objects on a workspace, as layers of a model; ranks agree, and the last object plays."""
    with putget.Workspace(
        rank.comm, bytes_of(case), device=rank.device, timeout_s=20, warmup_timeout_s=20
    ) as workspace:
        objects = [rank.all_to_all(**case.options(), workspace=workspace) for _ in range(count)]
        workspace.set_active_ranks((True,) * rank.size)
        outcome = play_round(objects[-1], rank, case, 0)
        for owner in objects:
            owner.close()
    return [outcome]


def test_a_workspace_of_all_layers_of_a_large_model_goes_on() -> None:
    case = in_domains(Case(3, ragged(3, 1, 2, 5), num_experts=6, top_k=2, max_tokens_per_rank=5), 2)
    found = run_ranks(3, change_with, case, 96, mode="thread", timeout=120, network=network(2))
    check_case(case, found)


def make_too_many(rank: Rank, case: Case) -> str:
    """A body."""
    with putget.Workspace(
        rank.comm, bytes_of(case), device=rank.device, timeout_s=20, warmup_timeout_s=20
    ) as workspace:
        objects = [rank.all_to_all(**case.options(), workspace=workspace) for _ in range(3)]
        with pytest.raises(ValueError, match="give some of them another workspace") as caught:
            rank.all_to_all(**case.options(), workspace=workspace)
        objects.pop().close()
        objects.append(rank.all_to_all(**case.options(), workspace=workspace))
        for owner in objects:
            owner.close()
    return str(caught.value)


def test_objects_whose_memory_cannot_be_shared_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain_rounds, "MAX_DESCRIPTORS", 3)
    case = in_domains(Case(3, ragged(3, 1, 2, 5), num_experts=6, top_k=2, max_tokens_per_rank=5), 2)
    for text in run_ranks(3, make_too_many, case, mode="thread", network=network(2)):
        assert "workspace: its 4 objects share 4 memories with each rank of a domain, allowed are 3" in text


def make_again(rank: Rank, case: Case) -> list[Any]:
    """A body: rank 1 cannot make the second object of a workspace, and all make it again; the first one is number 0."""
    with putget.Workspace(
        rank.comm, bytes_of(case), device=rank.device, timeout_s=20, warmup_timeout_s=20
    ) as workspace:
        first = rank.all_to_all(**case.options(), workspace=workspace)
        rank.comm.numbers.next = 4096  # as behind as many objects that have been closed
        with pytest.MonkeyPatch.context() as patch:
            if rank.rank == 1:
                patch.setattr(rank.comm.numbers, "take", refuse)
            with pytest.raises(putget.PutgetError):
                rank.all_to_all(**case.options(), workspace=workspace)
        with rank.all_to_all(**case.options(), workspace=workspace) as again:
            outcomes = [play_round(owner, rank, case, index) for index, owner in enumerate((first, again, first))]
        first.close()
    return outcomes


def refuse() -> int:
    raise putget.PutgetError("there is no room")


def test_an_object_that_one_rank_could_not_make_is_made_again() -> None:
    case = in_domains(Case(3, ragged(3, 3, 2, 5), num_experts=6, top_k=2, max_tokens_per_rank=5), 2)
    check_case(case, run_ranks(3, make_again, case, mode="thread", network=network(2)))


def test_active_ranks_change_for_all_objects_of_a_workspace(provider: str) -> None:
    wide = {"payloads": (((24,), torch.bfloat16),), "output": ((24,), torch.bfloat16)}
    case = in_domains(Case(4, ragged(4, 9, 2, 9), num_experts=8, top_k=4, max_tokens_per_rank=9, **wide), 2)
    masks = [only(4, 0, 1, 2, 3), only(4, 0, 1, 2), only(4, 1, 3), only(4, 0, 1, 2, 3)]
    net = network(2, provider)
    meeting = threading.Barrier(4)
    found = run_ranks(4, shared_then_changed, case, masks, meeting, mode="thread", timeout=200, network=net)
    for number, mask in enumerate(masks):
        for index in range(len(case.rounds)):
            held = {rank: found[rank][number][index] for rank in range(4) if mask[rank]}
            check_round(replace(case, active=mask), index, held)


@pytest.mark.parametrize(
    ("ep_size", "domain_size", "members"),
    [(4, 2, [(0, 1, 2), (1, 3), (0, 1), (2,)]), (5, 3, [(0, 3, 4), (1, 2, 3), (0, 1, 2)]), (3, 1, [(0, 2), (1,)])],
    ids=["2x2", "3+2", "3x1"],
)
def test_active_ranks_come_and_go(ep_size: int, domain_size: int, members: list[Any], world: World) -> None:
    """A rank, agents and whole domains leave, others begin anew, and all come back."""
    rounds = ragged(ep_size, 8, ep_size, 9)
    wide = {"payloads": (((24,), torch.bfloat16),), "output": ((24,), torch.bfloat16)}
    case = in_domains(
        Case(ep_size, rounds, num_experts=2 * ep_size, top_k=4, max_tokens_per_rank=9, **wide), domain_size
    )
    everyone = only(ep_size, *range(ep_size))
    masks = Masks(everyone, *(only(ep_size, *some) for some in members), everyone)
    check_masks(case, masks, world.run(ep_size, domain_size, come_and_go, case, masks, timeout=200))


def test_a_round_that_is_open_ends_with_the_active_ranks(world: World) -> None:
    """Rounds of before leave nothing behind, however they stood."""

    def body(rank: Rank) -> float:
        ids = torch.arange(4, dtype=torch.int32).expand(2, 4).contiguous().to(rank.device)
        weights, rows = torch.ones(2, 4, device=rank.device), torch.ones(2, 4, device=rank.device)
        with rank.all_to_all(num_experts=4, top_k=4, timeout_s=20.0) as a2a:
            for number in range(6):
                rank.meet()
                if number % 3:
                    a2a.dispatch(ids, weights, rows)
                if number % 2:
                    a2a.dispatch_start(ids, weights, rows)
                rank.wait()
                rank.meet()
                a2a.set_active_ranks([True] * 4)
            rank.meet()
            a2a.dispatch(ids, weights, rows)
            a2a.combine_input.fill_(10.0**rank.rank)
            out = a2a.combine()
            rank.wait()
            rank.meet()
            return out[1, 0].item()

    assert world.run(4, 2, body) == [1111.0] * 4
