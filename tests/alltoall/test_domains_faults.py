"""Ranks of several domains that are killed or stopped, as processes, and what the survivors then do."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from tests.harness import Rank
from tests.harness.cases import Case
from tests.harness.compare import Outcome, check_round, play_round
from tests.harness.domains import in_domains, only, ragged
from tests.harness.processes import RankProcesses
from tests.harness.run import fresh_ranks

pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")

SIZE, DOMAIN_SIZE, TIMEOUT_S = 4, 2, 4.0
WIDE: dict[str, Any] = {"payloads": (((24,), torch.bfloat16),), "output": ((24,), torch.bfloat16)}
CASE = in_domains(Case(SIZE, ragged(SIZE, 8, 11, 8), num_experts=8, top_k=4, **WIDE), DOMAIN_SIZE)
PROVIDERS = pytest.mark.parametrize("provider", ["tcp", "host"])
SIGNALS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
# Rank 3 is the agent of rank 1, as rank 1 is of rank 3; with rank 3 gone rank 2 is the agent of both.
VICTIMS = pytest.mark.parametrize("victims", [(3,), (0,), (2, 3)], ids=["rank 3", "rank 0", "domain"])


@pytest.fixture
def four() -> Iterator[RankProcesses]:
    with fresh_ranks(SIZE) as ranks:
        yield ranks


def begin(rank: Rank, provider: str) -> None:
    comm = putget.Communicator(network=putget.Network(provider, domain_size=DOMAIN_SIZE))
    me = Rank(rank.rank, rank.size, rank.device, _comm=comm)
    rank.state["comm"] = comm
    rank.state["a2a"] = me.all_to_all(**{**CASE.options(), "timeout_s": TIMEOUT_S, "warmup_timeout_s": 30.0})


def play(rank: Rank, mask: tuple[bool, ...]) -> list[Outcome]:
    case = replace(CASE, active=mask)
    return [play_round(rank.state["a2a"], rank, case, index) for index in range(len(case.rounds))]


def miss(rank: Rank, phase: str) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """A body: rounds until ranks are missing; which, who of these is lost, and after how many seconds."""
    a2a = rank.state["a2a"]
    began = time.monotonic()
    ids = torch.arange(SIZE, dtype=torch.int32).expand(2, SIZE).contiguous() * 2
    try:
        for _ in range(3):
            if phase == "dispatch" or not rank.state.pop("dispatched", False):
                a2a.dispatch(
                    ids, torch.ones(2, SIZE), *(torch.ones(2, *shape).to(dtype) for shape, dtype in CASE.payloads)
                )
            a2a.combine()
    except putget.PeerTimeout as error:
        return error.missing, error.lost, time.monotonic() - began
    return (), (), 0.0


def open_round(rank: Rank) -> None:
    """A body: all ranks have a round open."""
    ids = torch.arange(SIZE, dtype=torch.int32).expand(2, SIZE).contiguous() * 2
    rows = (torch.ones(2, *shape).to(dtype) for shape, dtype in CASE.payloads)
    rank.state["a2a"].dispatch(ids, torch.ones(2, SIZE), *rows)
    rank.state["dispatched"] = True


def go_on(rank: Rank, mask: tuple[bool, ...]) -> None:
    rank.state.pop("dispatched", None)
    rank.state["a2a"].set_active_ranks(mask)


def require_rounds(ranks: RankProcesses, mask: tuple[bool, ...]) -> None:
    members = [rank for rank in range(SIZE) if mask[rank]]
    outcomes = ranks.call(play, mask, ranks=members, timeout=90)
    for index in range(len(CASE.rounds)):
        check_round(replace(CASE, active=mask), index, {rank: of_rank[index] for rank, of_rank in outcomes.items()})


@PROVIDERS
@SIGNALS
@VICTIMS
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_survivors_go_on(
    four: RankProcesses, provider: str, number: signal.Signals, victims: tuple[int, ...], phase: str
) -> None:
    """Killed or stopped before its dispatch or with a round open: the others' rounds have the oracle's bits.

    A stopped rank that wakes up disturbs nobody, finds that the others are gone, and comes back.
    """
    everyone = (True,) * SIZE
    mask = tuple(rank not in victims for rank in range(SIZE))
    survivors = [rank for rank in range(SIZE) if mask[rank]]
    four.call(begin, provider, timeout=90)
    require_rounds(four, everyone)
    if phase == "combine":
        four.call(open_round, timeout=60)
    for victim in victims:
        four.signal(victim, number)
    found = four.call(miss, phase, ranks=survivors, timeout=60)
    for missing, lost, seconds in found.values():
        assert set(missing) & set(victims), found
        assert set(lost) <= set(missing) & set(victims), found
        assert lost or seconds > TIMEOUT_S * 0.9, found  # a rank that is not lost is waited for
    four.call(go_on, mask, ranks=survivors, timeout=60)
    require_rounds(four, mask)
    if number == signal.SIGKILL:
        return
    for rank in survivors:
        four.submit(rank, play, mask)
    for victim in victims:
        four.signal(victim, signal.SIGCONT)
        four.submit(victim, miss, phase)
    outcomes = four.results(survivors, timeout=90)
    for index in range(len(CASE.rounds)):
        held = {rank: of_rank[index] for rank, of_rank in outcomes.items()}
        check_round(replace(CASE, active=mask), index, held)
    woken = four.results(list(victims), timeout=60)
    assert all(set(missing) & set(survivors) for missing, _, _ in woken.values()), woken
    require_rounds(four, mask)
    four.call(go_on, everyone, timeout=60)
    require_rounds(four, everyone)


def test_a_rank_alone_goes_on(four: RankProcesses) -> None:
    """Nobody else is left, in its domain or in another one."""
    four.call(begin, "host", timeout=90)
    require_rounds(four, (True,) * SIZE)  # the first round has a longer deadline
    for victim in (0, 1, 3):
        four.signal(victim, signal.SIGKILL)
    time.sleep(0.1)
    assert four.call(miss, "dispatch", ranks=[2], timeout=60)[2][0]
    alone = only(SIZE, 2)
    four.call(go_on, alone, ranks=[2], timeout=60)
    require_rounds(four, alone)
