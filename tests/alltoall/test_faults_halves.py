"""Ranks that die or stop between the halves of a round: who misses them when, and a correct round without them.

Every test starts processes of its own. tests/alltoall/test_faults.py has the same for whole calls.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.alltoall.test_faults import SLACK_S, TIMEOUT_S, Timeout, set_active_ranks, timed_out
from tests.harness import Rank, RankProcesses, fresh_ranks
from tests.harness.cases import COMBINE, DISPATCH, Case, Round
from tests.harness.compare import Outcome, check_round, play_round

SIZE = 3
VICTIM = 1
SURVIVORS = (0, 2)
WARMUP_S = 4.0
IN_HALVES = (DISPATCH + COMBINE,) * SIZE
CASE = Case(
    SIZE,
    tuple(Round(i, (3, 8 - i, i), ending=("zero_copy", "flat")[i % 2], halves=IN_HALVES) for i in range(5)),
    num_experts=7,
    top_k=3,
    payloads=(((40,), torch.uint8), ((3,), torch.float32)),
    output=((160,), torch.bfloat16),
)
WIRES: dict[str, dict[str, Any]] = {
    "sent": {},
    "got": {"sentinel_rows": False},
    "quantised": {"wire": torch.float8_e4m3fn},
}
HALVES = ("dispatch_start", "dispatch_finish", "combine_start", "combine_finish")


# Bodies: the object and what it has received are in the rank's state.


def construct(rank: Rank, case: Case) -> None:
    rank.state["a2a"] = rank.all_to_all(**{**case.options(), "timeout_s": TIMEOUT_S, "warmup_timeout_s": WARMUP_S})


def play_one(rank: Rank, case: Case, index: int) -> Outcome:
    return play_round(rank.state["a2a"], rank, case, index)


def run_halves(rank: Rank, case: Case, index: int, halves: tuple[str, ...]) -> Outcome | None:
    """Runs some halves of a round; the outcome, once there is one."""
    a2a, state = rank.state["a2a"], rank.state
    outcome: Outcome | None = None
    for half in halves:
        if half == "dispatch_start":
            sent = case.sent(index, rank.rank)
            a2a.dispatch_start(sent.topk_ids, sent.topk_weights, *sent.payloads)
        elif half == "dispatch_finish":
            received = a2a.dispatch_finish()
            state["seen"] = {
                "topk_ids": received.topk_ids.clone(),
                "topk_weights": received.topk_weights.clone(),
                "payloads": tuple(rows.clone() for rows in received.payloads),
                "num_tokens": received.num_tokens.clone(),
                "target_ranks": a2a.target_ranks.clone(),
                "target_slots": a2a.target_slots.clone(),
            }
            outcome = Outcome(**state["seen"], invalid=0, combined=None)
        elif half == "combine_start":
            a2a.combine_start(case.expert_rows(index, rank.rank))
        else:
            outcome = Outcome(**state["seen"], invalid=0, combined=a2a.combine_finish().clone())
    a2a.check()
    return outcome


def miss(rank: Rank, case: Case, index: int, halves: tuple[str, ...]) -> None:
    """Halves that miss the victim; a combine that needs none of its rows ends, and what comes next misses it."""
    run_halves(rank, case, index, halves)
    run_halves(rank, case, index + 1, HALVES[:2])


def go_on(rank: Rank, case: Case, halves: tuple[str, ...]) -> None:
    """Finishes round 1, as far as it can be finished, and begins the next one."""
    run_halves(rank, case, 1, halves)
    run_halves(rank, case, 2, HALVES)


# State that the tests share.


def require_round(ranks: RankProcesses, case: Case, index: int, members: tuple[int, ...]) -> None:
    """The members play a round in halves that must come out right, to the bit."""
    active = replace(case, active=tuple(rank in members for rank in range(SIZE)))
    check_round(active, index, ranks.call(play_one, active, index, ranks=members))


def require_timeout(case: Case, lost: dict[int, Timeout | str], phase: str, epoch: int) -> None:
    """All survivors say that they miss the victim, in which step of which round.

    Who needs none of its sentinel rows does not miss it in combine (of round 1, epoch 2).
    """
    assert set(lost) == set(SURVIVORS)
    assert any(case.needs(1, rank, VICTIM) for rank in SURVIVORS)
    for rank, got in lost.items():
        goes_on = phase == "combine" and case.sentinel_rows is not False and not case.needs(1, rank, VICTIM)
        step = ("dispatch", 3) if goes_on else (phase, epoch)
        assert isinstance(got, Timeout), got
        assert (got.phase, got.epoch, got.rank, got.missing) == (*step, rank, (VICTIM,))
        assert TIMEOUT_S * 0.9 <= got.seconds < TIMEOUT_S + SLACK_S
        for word in (step[0], f"rank {rank}", str(step[1]), str(VICTIM)):
            assert word in got.text


# Where the victim is lost: the halves of round 1 (epoch 2) that all ranks have run by then, those that the survivors
# can still run, those that miss the victim, and what these say.
MOMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[int, tuple[str, ...]], tuple[str, int]]] = {
    "before_dispatch_start": ((), ("dispatch_start",), (1, ("dispatch_finish",)), ("dispatch", 2)),
    # Its rows and flags are with everybody.
    "after_dispatch_start": (
        HALVES[:1],
        ("dispatch_finish", "combine_start"),
        (1, ("combine_finish",)),
        ("combine", 2),
    ),
    "after_dispatch": (HALVES[:2], ("combine_start",), (1, ("combine_finish",)), ("combine", 2)),
    # Its rows are with everybody, or can still be read: the round is whole, and the next one misses it.
    "after_combine_start": (
        HALVES[:3],
        ("combine_finish",),
        (2, ("dispatch_start", "dispatch_finish")),
        ("dispatch", 3),
    ),
}


@pytest.mark.parametrize(
    ("moment", "wire", "number"),
    [
        ("before_dispatch_start", "sent", signal.SIGKILL),
        ("after_dispatch_start", "got", signal.SIGSTOP),
        ("after_dispatch_start", "quantised", signal.SIGKILL),
        ("after_dispatch", "got", signal.SIGKILL),
        ("after_dispatch", "sent", signal.SIGSTOP),
        ("after_dispatch", "quantised", signal.SIGKILL),
        ("after_combine_start", "got", signal.SIGKILL),
        ("after_combine_start", "sent", signal.SIGKILL),
        ("after_combine_start", "quantised", signal.SIGSTOP),
    ],
    ids=lambda value: {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}.get(value, value),
)
def test_a_rank_lost_between_halves(moment: str, wire: str, number: signal.Signals) -> None:
    case = replace(CASE, **WIRES[wire])
    before, still, (index, missing), said = MOMENTS[moment]
    with fresh_ranks(SIZE) as ranks:
        ranks.call(construct, case)
        require_round(ranks, case, 0, tuple(range(SIZE)))
        ranks.call(run_halves, case, 1, before)
        ranks.signal(VICTIM, number)
        outcomes = ranks.call(run_halves, case, 1, still, ranks=SURVIVORS)
        check_round(case, 1, {rank: seen for rank, seen in outcomes.items() if seen is not None}, check=False)
        require_timeout(case, ranks.call(timed_out, miss, case, index, missing, ranks=SURVIVORS), *said)

        assert set(ranks.call(set_active_ranks, (True, False, True), ranks=SURVIVORS).values()) == {(True, False, True)}
        for played in (3, 4):
            require_round(ranks, case, played, SURVIVORS)
        if number == signal.SIGKILL:
            return
        # The victim wakes up between its halves and goes on where it was, while the others play on without it.
        ranks.signal(VICTIM, signal.SIGCONT)
        ranks.submit(VICTIM, timed_out, go_on, case, HALVES[len(before) :])
        for played in (2, 3, 4):
            require_round(ranks, case, played, SURVIVORS)
        woken = ranks.result(VICTIM)
        assert isinstance(woken, Timeout), woken
        assert woken.rank == VICTIM
        assert woken.missing
        assert set(woken.missing) <= set(SURVIVORS)
        everybody = (True,) * SIZE
        assert set(ranks.call(set_active_ranks, everybody).values()) == {everybody}
        require_round(ranks, case, 3, (0, 1, 2))
