"""Going on after a time-out: `recover` asks all ranks, whomever each of them has missed."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

import putget
from tests.harness import Rank, RankProcesses, fresh_ranks
from tests.harness.domains import World, only

SIZE, TIMEOUT_S = 4, 2.0


class Loss:
    """Rank `gone` stops before or behind its dispatch of a round, and stays until the others have gone on."""

    def __init__(self, gone: int, round_of_it: int, behind: bool) -> None:
        self.gone, self.round_of_it, self.behind = gone, round_of_it, behind
        self.is_over = threading.Barrier(SIZE)


def play(a2a: putget.AllToAll, rank: Rank, loss: Loss | None, number: int) -> list[float] | None:
    """A round in which each rank sends rows to some ranks; None where this rank stops in it."""
    stops = loss is not None and (loss.gone, loss.round_of_it) == (rank.rank, number)
    if stops and loss is not None and not loss.behind:
        return None
    ids = torch.tensor([[2 * ((rank.rank + number + step) % SIZE) for step in (0, 1)]] * 3, dtype=torch.int32)
    received = a2a.dispatch(ids, torch.ones(3, 2), torch.full((3, 4), 1.0 + rank.rank))
    if stops:
        return None
    a2a.combine_input.copy_(received.payloads[0])
    return [float(value) for value in a2a.combine()[:, 0]]


def lose_and_recover(rank: Rank, loss: Loss) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A body: rounds until a rank is missing; whom this rank misses, and the ranks that go on."""
    a2a = rank.all_to_all(timeout_s=TIMEOUT_S, warmup_timeout_s=20.0)
    missing: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    try:
        for number in range(loss.round_of_it + 2):
            if play(a2a, rank, loss, number) is None:
                break
        else:
            raise AssertionError("no rank was missed")
    except putget.PeerTimeout as error:
        missing = error.missing
        ranks = a2a.recover()
        for number in range(3):
            sent = [(rank.rank + number + step) % SIZE for step in (0, 1)]
            want = (1.0 + rank.rank) * len(set(sent).intersection(ranks))
            assert play(a2a, rank, None, number) == [want] * 3
    loss.is_over.wait(60)
    a2a.close()
    return missing, ranks


@pytest.mark.parametrize("losses", [3, pytest.param(8, marks=pytest.mark.soak)])
@pytest.mark.parametrize("domain_size", [1, 2])
def test_a_healthy_group_never_splits(domain_size: int, losses: int) -> None:
    """Across domains a rank misses the one that it waits for, which may be healthy and wait for the lost one itself."""
    chosen = random.Random(domain_size)
    blamed = []
    for _ in range(losses):
        gone = chosen.randrange(SIZE)
        loss = Loss(gone, chosen.randrange(1, 4), chosen.random() < 0.7)
        found = World().run(SIZE, domain_size, lose_and_recover, loss)
        healthy = tuple(rank for rank in range(SIZE) if rank != gone)
        for rank in healthy:
            missing, ranks = found[rank]
            assert ranks == healthy, found
            blamed += [(rank, missing)] if set(missing) - {gone} else []
    assert blamed or losses < 8  # else nothing here was harder than dropping those that are missing


@pytest.fixture
def ranks() -> Any:
    with fresh_ranks(3) as processes:
        processes.call(construct)
        yield processes


def construct(rank: Rank) -> None:
    rank.state["a2a"] = rank.all_to_all(timeout_s=TIMEOUT_S, warmup_timeout_s=20.0)


def recover(rank: Rank, deadline: float | None = None, quorum: int | None = None, delay: float = 0.0) -> Any:
    time.sleep(delay)
    try:
        return rank.state["a2a"].recover(deadline, quorum=quorum)
    except (putget.PutgetError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_that_come_back_are_taken_again(ranks: RankProcesses) -> None:
    assert ranks.call(recover, ranks=[0, 1]) == dict.fromkeys((0, 1), (0, 1))
    for rank, delay in enumerate((0.0, 0.3, 1.0)):
        ranks.submit(rank, recover, 30.0, None, delay)
    assert ranks.results(range(3)) == dict.fromkeys(range(3), (0, 1, 2))
    assert set(ranks.call(active_ranks).values()) == {only(3, 0, 1, 2)}


def active_ranks(rank: Rank) -> tuple[bool, ...]:
    active: tuple[bool, ...] = rank.state["a2a"].active_ranks
    return active


def test_a_quorum_that_does_not_answer_is_an_error(ranks: RankProcesses) -> None:
    for said in ranks.call(recover, None, 3, ranks=[0, 1]).values():
        assert said.startswith("QuorumLost"), said
    assert ranks.call(recover, None, 2, ranks=[0, 1]) == dict.fromkeys((0, 1), (0, 1))


def test_a_deadline_bounds_it(ranks: RankProcesses) -> None:
    """A rank that does not answer costs half of it at most."""
    began = time.monotonic()
    assert ranks.call(recover, 1.0, ranks=[0, 1]) == dict.fromkeys((0, 1), (0, 1))
    assert time.monotonic() - began < 2 * TIMEOUT_S + 10


@pytest.mark.parametrize("deadline", [0, -1.0, "1", True, float("nan")])
def test_a_deadline_is_seconds(ranks: RankProcesses, deadline: Any) -> None:
    for said in ranks.call(recover, deadline).values():
        assert said.startswith("ValueError: deadline is "), said
