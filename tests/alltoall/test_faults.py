"""Ranks that die, stop or never come: nobody hangs, the others are told whom they miss, and go on without it.

Every test starts processes of its own and kills or stops some at a chosen point. A body either answers or raises within
its deadline; the harness fails the test otherwise.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import putget
from tests.harness import Rank, RankProcesses, fresh_ranks
from tests.harness.cases import APART, SENTINEL, Case, Round
from tests.harness.compare import Outcome, check_round, play_round

SIZE = 4
ALL = (True,) * SIZE
TIMEOUT_S = 1.5
WARMUP_S = 4.0
# The time that a loaded machine with two cores may take beyond the deadline.
SLACK_S = 30.0

ROUNDS = tuple(Round(i, (3, 8 - i % 8, i % 6, 5), ending=("zero_copy", "flat")[i % 2]) for i in range(10))
CASE = Case(SIZE, ROUNDS, num_experts=9, top_k=3, payloads=(((40,), torch.uint8), ((3,), torch.float32)))


@dataclass(frozen=True)
class Timeout:
    """A PeerTimeout, as a test compares it."""

    phase: str
    rank: int
    epoch: int
    missing: tuple[int, ...]
    text: str
    seconds: float


ON_BOTH = pytest.mark.parametrize(
    "ranks", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timed])], indirect=True
)


# Starting processes on GPUs takes seconds: there only what tests/gpu/test_lost_processes.py and test_deadlines.py leave
# out.
@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    device = str(getattr(request, "param", "cpu"))
    if device == "cuda" and torch.cuda.device_count() < SIZE:
        pytest.skip(f"needs {SIZE} GPUs: faults are of processes")
    with fresh_ranks(SIZE, device) as processes:
        yield processes


# Bodies: each runs one step on one rank; the object is in the rank's state.


def construct(rank: Rank, options: dict[str, Any] | None = None) -> None:
    deadlines = {"timeout_s": TIMEOUT_S, "warmup_timeout_s": WARMUP_S}
    rank.state["a2a"] = rank.all_to_all(**{**CASE.options(), **deadlines, **(options or {})})


def play_one(rank: Rank, case: Case, index: int) -> Outcome:
    return play_round(rank.state["a2a"], rank, case, index)


def play_many(rank: Rank, case: Case, pause: float = 0.0) -> list[Outcome]:
    outcomes = []
    for index in range(len(case.rounds)):
        outcomes.append(play_round(rank.state["a2a"], rank, case, index))
        time.sleep(pause)
    return outcomes


def dispatch(rank: Rank, index: int) -> None:
    play_round(rank.state["a2a"], rank, replace(CASE, rounds=open_rounds()), index, check=False)


def open_rounds() -> tuple[Round, ...]:
    return tuple(replace(played, ending="open") for played in CASE.rounds)


def combine(rank: Rank, index: int) -> torch.Tensor:
    a2a = rank.state["a2a"]
    combined = a2a.combine(CASE.expert_rows(index, rank.rank).to(rank.device))
    a2a.check()
    return combined.cpu()


def combine_and_go_on(rank: Rank, index: int) -> None:
    """A combine, and where it came to its end, the next dispatch."""
    combine(rank, index)
    dispatch(rank, index + 1)


def release(rank: Rank) -> None:
    rank.state["a2a"].release()


def set_active_ranks(rank: Rank, mask: tuple[bool, ...]) -> tuple[bool, ...]:
    rank.state["a2a"].set_active_ranks(mask)
    return rank.state["a2a"].active_ranks


def check(rank: Rank) -> None:
    rank.state["a2a"].check()


def close(rank: Rank) -> tuple[float, str]:
    started = time.monotonic()
    raised = ""
    try:
        rank.state["a2a"].close()
    except putget.PeerTimeout as error:
        raised = str(error)
    rank.state["a2a"].close()
    return time.monotonic() - started, raised


def timed_out(rank: Rank, body: Any, *args: Any) -> Timeout | str:
    """Runs a step that must time out; on CUDA the next call tells."""
    started = time.monotonic()
    try:
        body(rank, *args)
        if "a2a" in rank.state:
            rank.state["a2a"].check()
    except putget.PeerTimeout as error:
        return Timeout(error.phase, error.rank, error.epoch, error.missing, str(error), time.monotonic() - started)
    return "no time-out"


def refused(rank: Rank, body: Any, *args: Any) -> tuple[str, float]:
    started = time.monotonic()
    try:
        body(rank, *args)
    except ValueError as error:
        return str(error), time.monotonic() - started
    return "accepted", time.monotonic() - started


# State that the tests share.


def without(*missing: int) -> tuple[bool, ...]:
    return tuple(rank not in missing for rank in range(SIZE))


def require_that_it_misses(got: Timeout | str, rank: int, missing: tuple[int, ...], phase: str, epoch: int) -> None:
    assert isinstance(got, Timeout), got
    assert (got.phase, got.rank, got.epoch, got.missing) == (phase, rank, epoch, missing)
    assert TIMEOUT_S * 0.9 <= got.seconds < WARMUP_S + SLACK_S
    for word in (phase, f"rank {rank}", str(epoch), *map(str, missing)):
        assert word in got.text


def require_timeout(
    ranks: RankProcesses, missing: tuple[int, ...], phase: str, epoch: int, body: Any, *args: Any
) -> None:
    """All others run the step, and all of them must miss exactly these ranks."""
    survivors = [rank for rank in range(SIZE) if rank not in missing]
    for rank, got in ranks.call(timed_out, body, *args, ranks=survivors, timeout=30).items():
        require_that_it_misses(got, rank, missing, phase, epoch)


def require_timeout_in_combine(ranks: RankProcesses, victim: int, flags: int) -> None:
    """Round 1 (epoch 2), which the victim does not end. Whoever gets rows needs it in any case.

    With sentinel rows, who has none of the victim's combines, and misses it in the next dispatch.
    """
    survivors = [rank for rank in range(SIZE) if rank != victim]
    waiting = {rank for rank in survivors if flags == APART or CASE.needs(1, rank, victim)}
    assert waiting
    for rank, got in ranks.call(timed_out, combine_and_go_on, 1, ranks=survivors, timeout=30).items():
        phase, epoch = ("combine", 2) if rank in waiting else ("dispatch", 3)
        require_that_it_misses(got, rank, (victim,), phase, epoch)


def require_round(ranks: RankProcesses, index: int, mask: tuple[bool, ...] = ALL) -> None:
    """The active ranks play a round that must come out right."""
    case = replace(CASE, active=mask)
    members = [rank for rank in range(SIZE) if mask[rank]]
    check_round(case, index, ranks.call(play_one, case, index, ranks=members))


def shrink(ranks: RankProcesses, *missing: int) -> None:
    """The survivors agree to go on alone, and do."""
    mask = without(*missing)
    members = [rank for rank in range(SIZE) if mask[rank]]
    assert set(ranks.call(set_active_ranks, mask, ranks=members).values()) == {mask}
    for index in (2, 3, 4):
        require_round(ranks, index, mask)


def start(ranks: RankProcesses, flags: bool = SENTINEL, timeout_s: float = TIMEOUT_S) -> None:
    tuning = putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=flags))
    ranks.call(construct, {"tuning": tuning, "timeout_s": timeout_s})
    require_round(ranks, 0)


SIGNALS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])


def wake(ranks: RankProcesses, number: signal.Signals, victim: int, step: Any = play_one, *args: Any) -> None:
    """A stopped rank wakes up while the others play on: it disturbs nobody, times out, and comes back.

    It goes on where it was: with `step`, or with a round.
    """
    if number == signal.SIGKILL:
        return
    mask = without(victim)
    survivors = [rank for rank in range(SIZE) if mask[rank]]
    case = replace(CASE, active=mask)
    for rank in survivors:
        ranks.submit(rank, play_many, case, 0.1)
    time.sleep(0.3)
    ranks.signal(victim, signal.SIGCONT)
    ranks.submit(victim, timed_out, step, *(args or (CASE, 2)))
    outcomes = ranks.results(survivors)
    for index in range(len(case.rounds)):
        check_round(case, index, {rank: of_rank[index] for rank, of_rank in outcomes.items()})
    woken = ranks.result(victim)
    assert isinstance(woken, Timeout), woken
    assert woken.rank == victim
    assert set(woken.missing) <= set(survivors)
    assert woken.missing
    assert set(ranks.call(set_active_ranks, ALL).values()) == {ALL}
    for index in (5, 6, 7):
        require_round(ranks, index)


@SIGNALS
@pytest.mark.parametrize("victim", [0, 2])
def test_before_its_dispatch(ranks: RankProcesses, number: signal.Signals, victim: int) -> None:
    start(ranks)
    ranks.signal(victim, number)
    require_timeout(ranks, (victim,), "dispatch", 2, dispatch, 1)
    shrink(ranks, victim)
    wake(ranks, number, victim)


@pytest.mark.parametrize(
    ("ranks", "number", "flags"),
    [
        pytest.param("cpu", signal.SIGKILL, SENTINEL, id="cpu-killed"),
        pytest.param("cpu", signal.SIGKILL, APART, id="cpu-killed-flags_apart"),
        pytest.param("cpu", signal.SIGSTOP, SENTINEL, id="cpu-stopped"),
        pytest.param("cuda", signal.SIGSTOP, SENTINEL, id="cuda-stopped", marks=[pytest.mark.gpu, pytest.mark.timed]),
    ],
    indirect=["ranks"],
)
def test_between_dispatch_and_combine(ranks: RankProcesses, number: signal.Signals, flags: int) -> None:
    start(ranks, flags)
    ranks.call(dispatch, 1)
    ranks.signal(2, number)
    require_timeout_in_combine(ranks, 2, flags)
    shrink(ranks, 2)
    wake(ranks, number, 2, combine_and_go_on, 1)


@SIGNALS
def test_inside_its_dispatch(ranks: RankProcesses, number: signal.Signals) -> None:
    """The rows of the victim are there and its flag is set, so the others see a whole round but for its combine."""
    start(ranks)
    ranks.submit_and_nap(1, timed_out, dispatch, 1)
    ranks.signal(1, number)
    ranks.call(dispatch, 1, ranks=[0, 2, 3])
    require_timeout_in_combine(ranks, 1, SENTINEL)
    shrink(ranks, 1)
    if number == signal.SIGSTOP:
        ranks.signal(1, signal.SIGCONT)
        # Whether its own dispatch saw all others before it was stopped or not, it must end.
        ranks.result(1)
    wake(ranks, number, 1, combine_and_go_on, 1)


@SIGNALS
def test_inside_its_combine(ranks: RankProcesses, number: signal.Signals) -> None:
    """The victim's rows can still be read, so the round is whole; the next one misses it."""
    start(ranks)
    ranks.call(dispatch, 1)
    ranks.submit_and_nap(1, timed_out, combine, 1)
    ranks.signal(1, number)
    ranks.call(combine, 1, ranks=[0, 2, 3])
    require_timeout(ranks, (1,), "dispatch", 3, dispatch, 2)
    shrink(ranks, 1)
    if number == signal.SIGSTOP:
        ranks.signal(1, signal.SIGCONT)
        ranks.result(1)
    wake(ranks, number, 1)


def test_after_release(ranks: RankProcesses) -> None:
    start(ranks)
    ranks.call(dispatch, 1)
    ranks.call(release)
    ranks.signal(0, signal.SIGKILL)
    require_timeout(ranks, (0,), "dispatch", 3, dispatch, 2)
    shrink(ranks, 0)


def test_a_rank_that_does_not_end_its_round(ranks: RankProcesses) -> None:
    """Nobody may put into memory that rank 2 may still be reading."""
    start(ranks)
    ranks.call(dispatch, 1)
    ranks.call(release, ranks=[0, 1, 3])
    require_timeout(ranks, (2,), "dispatch", 3, dispatch, 2)
    assert set(ranks.call(set_active_ranks, ALL).values()) == {ALL}
    require_round(ranks, 2)


def test_never_dispatches(ranks: RankProcesses) -> None:
    """The first round has a deadline of its own."""
    ranks.call(construct, {"warmup_timeout_s": 3.0})
    ranks.signal(3, signal.SIGKILL)
    survivors = [0, 1, 2]
    for got in ranks.call(timed_out, dispatch, 0, ranks=survivors).values():
        assert isinstance(got, Timeout), got
        assert (got.phase, got.epoch, got.missing) == ("dispatch", 1, (3,))
        assert 2.5 < got.seconds < 3.0 + SLACK_S
    shrink(ranks, 3)


def test_never_constructs(ranks: RankProcesses) -> None:
    ranks.call(construct)
    ranks.call(close)
    survivors = [0, 1, 3]
    for rank, got in ranks.call(timed_out, construct, {"warmup_timeout_s": 2.0}, ranks=survivors).items():
        assert isinstance(got, Timeout), got
        assert (got.phase, got.rank, got.missing) == ("setup", rank, (2,))
        assert got.seconds < 2.0 + SLACK_S


def test_dies_in_the_constructor(ranks: RankProcesses) -> None:
    ranks.call(construct)
    ranks.call(close)
    ranks.signal(0, signal.SIGKILL)
    for got in ranks.call(timed_out, construct, {"warmup_timeout_s": 2.0}, ranks=[1, 2, 3]).values():
        assert isinstance(got, Timeout), got
        assert (got.phase, got.missing) == ("setup", (0,))
        assert got.seconds < 2.0 + SLACK_S


@pytest.mark.parametrize(
    "ranks", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timed])], indirect=True
)
def test_two_deaths_at_once_then_one_more(ranks: RankProcesses) -> None:
    start(ranks)
    ranks.signal(1, signal.SIGKILL)
    ranks.signal(3, signal.SIGKILL)
    require_timeout(ranks, (1, 3), "dispatch", 2, dispatch, 1)
    shrink(ranks, 1, 3)
    ranks.signal(0, signal.SIGKILL)
    got = ranks.call(timed_out, dispatch, 1, ranks=[2])[2]
    assert isinstance(got, Timeout), got
    assert got.missing == (0,)
    shrink(ranks, 0, 1, 3)


def test_a_time_out_is_remembered_until_the_ranks_agree_again(ranks: RankProcesses) -> None:
    """One time-out, not one a call: after the first, calls raise at once."""
    timeout_s = 8.0
    start(ranks, timeout_s=timeout_s)
    ranks.signal(2, signal.SIGKILL)
    require_timeout(ranks, (2,), "dispatch", 2, dispatch, 1)
    for body, args in ((dispatch, (1,)), (combine, (1,)), (check, ())):
        for got in ranks.call(timed_out, body, *args, ranks=[0, 1, 3]).values():
            assert isinstance(got, Timeout), (body, got)
            assert (got.missing, got.epoch) == ((2,), 2)
            assert got.seconds < timeout_s
    shrink(ranks, 2)
    ranks.call(check, ranks=[0, 1, 3])


def construct_second(rank: Rank) -> None:
    first = rank.state["a2a"]
    construct(rank, {"warmup_timeout_s": TIMEOUT_S})
    rank.state["second"], rank.state["a2a"] = rank.state["a2a"], first


def turn_to_second(rank: Rank) -> None:
    rank.state["a2a"] = rank.state["second"]


def test_waiting_leaves_the_core_to_others(ranks: RankProcesses) -> None:
    start(ranks)
    ranks.signal(2, signal.SIGKILL)
    for seconds, cpu_seconds in ranks.call(cost_of_time_out, 1, ranks=[0, 1, 3]).values():
        assert seconds >= TIMEOUT_S
        assert cpu_seconds < 0.4 * seconds


def cost_of_time_out(rank: Rank, index: int) -> tuple[float, float]:
    started, cpu_started = time.monotonic(), time.process_time()
    timed_out(rank, dispatch, index)
    return time.monotonic() - started, time.process_time() - cpu_started


def play_until_time_out(rank: Rank, case: Case) -> tuple[list[Outcome], Timeout]:
    """A body: one round after the other until somebody is missing."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(case.rounds):
        got = timed_out(rank, lambda rank: outcomes.append(play_one(rank, case, len(outcomes))))
        if isinstance(got, Timeout):
            return outcomes, got
    raise AssertionError("the rounds ended before the rank was stopped")


@SIGNALS
@pytest.mark.parametrize("seed", range(3))
def test_at_any_moment(ranks: RankProcesses, number: signal.Signals, seed: int) -> None:
    """The sums before and after are right."""
    generator = random.Random(seed)
    victim = generator.randrange(SIZE)
    survivors = [rank for rank in range(SIZE) if rank != victim]
    case = replace(CASE, rounds=CASE.rounds * 500)
    start(ranks)
    for rank in range(SIZE):
        ranks.submit(rank, play_until_time_out, case)
    time.sleep(generator.uniform(0.1, 0.4))
    ranks.signal(victim, number)
    for rank, (outcomes, got) in ranks.results(survivors).items():
        assert victim in got.missing
        assert rank not in got.missing
        for index, outcome in enumerate(outcomes):
            # The case without its repetitions is the same round, and the oracle has worked it out before.
            check_round(CASE, index % len(CASE.rounds), {rank: outcome})
    shrink(ranks, victim)
    if number == signal.SIGSTOP:
        ranks.signal(victim, signal.SIGCONT)
        _, woken = ranks.result(victim)
        assert set(woken.missing) <= set(survivors)
        ranks.call(set_active_ranks, ALL)
        require_round(ranks, 5)


@pytest.mark.parametrize(
    "ranks", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timed])], indirect=True
)
def test_a_fault_and_its_recovery_belong_to_one_workspace(ranks: RankProcesses) -> None:
    start(ranks)
    ranks.call(construct_second)
    ranks.signal(2, signal.SIGKILL)
    require_timeout(ranks, (2,), "dispatch", 2, dispatch, 1)
    shrink(ranks, 2)
    ranks.call(turn_to_second, ranks=[0, 1, 3])
    ranks.call(check, ranks=[0, 1, 3])
    require_timeout(ranks, (2,), "dispatch", 1, dispatch, 0)
    shrink(ranks, 2)
