"""Processes that are killed, stopped or never start, each on a GPU of its own; the others go on without them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from tests.gpu.ranks import have_processes
from tests.gpu.test_deadlines import (
    DEADLINES,
    TIMEOUT_S,
    Fault,
    capture_all,
    close_quietly,
    expect_fault,
    full_case,
    go_on_with,
    lonely_dispatch,
    lonely_replay,
    play_first,
)
from tests.gpu.test_graphs import CAPACITY, case_of, open_object, prepare_graphs, replay_round
from tests.harness import Rank, RankProcesses, fresh_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import check_round

pytestmark = pytest.mark.timed

# The largest group that this machine has GPUs for. Starting one takes seconds, so the smallest group, in which one rank
# is left, loses its other rank only once.
LARGEST = min(max(torch.cuda.device_count(), 2), 8)


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    """Rank processes that the test may kill."""
    size = int(getattr(request, "param", LARGEST))
    if not have_processes(size):
        pytest.skip(f"needs {size} GPUs: emulated ranks are threads, which cannot be killed")
    with fresh_ranks(size, "cuda") as ranks:
        yield ranks


def model_case(size: int) -> Case:
    return case_of(size, tuple(Round(50 + index, (CAPACITY,) * size) for index in range(3)))


def start_model(ranks: RankProcesses, case: Case) -> None:
    """Objects, graphs, and a first good round on all ranks. The next round has epoch 4."""
    ranks.call(open_object, "a2a", case, DEADLINES)
    ranks.call(prepare_graphs, case, (8, CAPACITY))
    ranks.call(capture_all)
    check_round(case, 0, ranks.call(replay_round, case, 0), check=False)


def go_on(ranks: RankProcesses, case: Case, victim: int) -> None:
    """The survivors agree, then replay their old graphs and call eagerly."""
    mask = tuple(rank != victim for rank in range(ranks.size))
    there = [rank for rank in range(ranks.size) if mask[rank]]
    assert set(ranks.call(go_on_with, mask, ranks=there).values()) == {mask}
    survivors = replace(case, active=mask)
    for index in range(len(case.rounds)):
        check_round(survivors, index, ranks.call(replay_round, case, index, ranks=there), check=False)
    check_round(survivors, 0, ranks.call(play_first, case, ranks=there), check=False)


def launch_model(rank: Rank) -> None:
    """A body: launches the graph of many layers and does not wait; the others are not coming yet."""
    rank.state["model"].replay()


@pytest.mark.parametrize(
    ("processes", "busy"),
    [(LARGEST, False), (2, True)] if LARGEST == 2 else [(LARGEST, False), (LARGEST, True), (2, True)],
    indirect=["processes"],
    ids=lambda value: f"ep{value}" if type(value) is int else ("while_its_kernel_waits" if value else "between_rounds"),
)
def test_a_killed_process(processes: RankProcesses, busy: bool) -> None:
    victim = processes.size - 1
    there = range(victim)
    case = model_case(processes.size)
    start_model(processes, case)
    if busy:
        processes.call(launch_model, ranks=[victim])
        time.sleep(0.1)
    processes.signal(victim, signal.SIGKILL)
    for rank, fault in processes.call(lonely_replay, case, ranks=there).items():
        expect_lost(fault, rank, victim, phases=("dispatch", "combine"))
    go_on(processes, case, victim)
    assert set(processes.call(close_quietly, ranks=there).values()) == {None}


def expect_lost(fault: Fault, rank: int, victim: int, phases: tuple[str, ...]) -> None:
    """A killed process may have got as far as its dispatch: the round in which it is missed may end a step later."""
    raised = fault.raised["check"]
    assert raised is not None
    name, phase, reporter, epoch, missing = raised
    assert (name, reporter, missing) == ("PeerTimeout", rank, (victim,))
    assert phase in phases
    assert epoch in (4, 5)
    assert fault.seconds < TIMEOUT_S * 2


def test_a_stopped_process_and_its_return(processes: RankProcesses) -> None:
    victim = 0
    there = range(1, processes.size)
    case = model_case(processes.size)
    start_model(processes, case)
    processes.signal(victim, signal.SIGSTOP)
    for rank, fault in processes.call(lonely_replay, case, ranks=there).items():
        expect_fault(fault, rank, "dispatch", epoch=4, missing=victim)
    go_on(processes, case, victim)
    # The victim wakes up knowing nothing: it goes on with its old rounds in memory that nobody reads, and times out.
    processes.submit(victim, lonely_dispatch, case, there[0])
    processes.signal(victim, signal.SIGCONT)
    survivors = replace(case, active=tuple(rank != victim for rank in range(processes.size)))
    began = time.monotonic()
    while time.monotonic() - began < TIMEOUT_S * 1.5:
        for index in range(len(case.rounds)):
            check_round(survivors, index, processes.call(replay_round, case, index, ranks=there), check=False)
    fault = processes.result(victim)
    raised = fault.raised["check"]
    assert raised is not None
    # Round 4 may still end: the others had announced their rows before they gave up on it.
    assert raised in [("PeerTimeout", "dispatch", victim, epoch, tuple(there)) for epoch in (4, 5)]
    assert set(processes.call(close_quietly, ranks=there).values()) == {None}


def meet(rank: Rank) -> None:
    """A body: makes the communicator, which needs everybody."""
    assert rank.comm.size == rank.size


def open_alone(rank: Rank, case: Case, options: dict[str, Any]) -> tuple[tuple[Any, ...], float]:
    """A body: a constructor that one rank never calls."""
    began = time.monotonic()
    with pytest.raises(putget.PeerTimeout) as caught:
        rank.all_to_all(**case.options(), **options)
    return (caught.value.phase, caught.value.rank, caught.value.missing), time.monotonic() - began


def test_a_process_that_never_opens(processes: RankProcesses) -> None:
    case, victim = full_case(processes.size), processes.size - 1
    processes.call(meet)
    options = {"timeout_s": 0.5, "warmup_timeout_s": 2.0}
    for rank, (raised, seconds) in processes.call(open_alone, case, options, ranks=range(victim)).items():
        assert raised == ("setup", rank, (victim,))
        assert seconds < 4.0
