"""Peers that do not come, on CUDA: one time-out per graph, faults that name who and where, and life after it.

The missing rank is simply not told to call; tests/gpu/test_lost_processes.py kills and stops processes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import putget
from tests.gpu.graphs import GraphRound, capture
from tests.gpu.ranks import Ranks
from tests.gpu.test_graphs import CAPACITY, case_of, open_object, prepare_graphs, replay_round
from tests.harness import Rank
from tests.harness.cases import Case, Round
from tests.harness.compare import Outcome, check_round, play_round

pytestmark = pytest.mark.timed

TIMEOUT_S = 1.0
DEADLINES = {"timeout_s": TIMEOUT_S, "warmup_timeout_s": 10.0}
LAYERS = 60


@dataclass(frozen=True)
class Fault:
    """A rank's report of a time-out.

    Attributes:
        seconds: from the launch to the end of this rank's kernels.
        launch_seconds: how long the launching calls themselves took.
        raised: (type name, phase, rank, epoch, missing) of what the calls after it raised, by call.
        num_tokens: received.num_tokens, if the body dispatched.
        ids_of_missing: received.topk_ids of the missing rank.
    """

    seconds: float
    launch_seconds: float
    raised: dict[str, tuple[Any, ...] | None]
    num_tokens: list[int] | None = None
    ids_of_missing: torch.Tensor | None = None


def raised_by(call: Any) -> tuple[Any, ...] | None:
    try:
        call()
    except putget.PeerTimeout as error:
        return (type(error).__name__, error.phase, error.rank, error.epoch, error.missing)
    return None


def calls_after(rank: Rank, case: Case) -> dict[str, tuple[Any, ...] | None]:
    """The public calls that must raise now, and a matrix product that must not."""
    a2a: putget.AllToAll = rank.state["a2a"]
    sent = [one.to(rank.device) for one in flat(case, rank.rank)]
    raised = {
        "dispatch": raised_by(lambda: a2a.dispatch(*sent)),
        "combine": raised_by(a2a.combine),
        "check": raised_by(a2a.check),
    }
    ones = torch.ones(64, 64, device=rank.device)
    assert float((ones @ ones).sum()) == 64.0**3
    return raised


def flat(case: Case, rank: int) -> list[torch.Tensor]:
    sent = case.sent(0, rank)
    return [sent.topk_ids, sent.topk_weights, *sent.payloads]


def wait_for_kernels(rank: Rank, start: float) -> float:
    torch.cuda.current_stream(rank.device).synchronize()
    return time.monotonic() - start


def lonely_dispatch(rank: Rank, case: Case, missing: int) -> Fault:
    """A body: a dispatch that the missing rank does not answer."""
    a2a: putget.AllToAll = rank.state["a2a"]
    sent = [one.to(rank.device) for one in flat(case, rank.rank)]
    torch.cuda.current_stream(rank.device).synchronize()
    start = time.monotonic()
    received = a2a.dispatch(*sent)
    launched = time.monotonic() - start
    seconds = wait_for_kernels(rank, start)
    num_tokens, ids = received.num_tokens.tolist(), received.topk_ids[missing].cpu()
    return Fault(seconds, launched, calls_after(rank, case), num_tokens, ids)


def lonely_combine(rank: Rank, case: Case) -> Fault:
    """A body: the combine of a round that all ranks dispatched and that the missing rank does not end."""
    a2a: putget.AllToAll = rank.state["a2a"]
    torch.cuda.current_stream(rank.device).synchronize()
    start = time.monotonic()
    a2a.combine()
    launched = time.monotonic() - start
    return Fault(wait_for_kernels(rank, start), launched, calls_after(rank, case))


def only_dispatch(rank: Rank, case: Case) -> None:
    """A body: a dispatch, seen through to its end."""
    rank.state["a2a"].dispatch(*[one.to(rank.device) for one in flat(case, rank.rank)])
    torch.cuda.current_stream(rank.device).synchronize()


def play_first(rank: Rank, case: Case) -> Outcome:
    """A body: the case's first round, eagerly."""
    return play_round(rank.state["a2a"], rank, case, 0, check=False)


def capture_model(rank: Rank) -> None:
    """A body for one rank at a time: a graph of many layers."""
    one: GraphRound = rank.state["graphs"][8]

    def record() -> None:
        for _ in range(LAYERS):
            one.record()

    rank.state["model"] = capture(rank, record)


def lonely_replay(rank: Rank, case: Case) -> Fault:
    """A body: the graph of many layers, replayed without the missing rank."""
    torch.cuda.current_stream(rank.device).synchronize()
    start = time.monotonic()
    rank.state["model"].replay()
    launched = time.monotonic() - start
    return Fault(wait_for_kernels(rank, start), launched, calls_after(rank, case))


def replay_model(rank: Rank) -> None:
    """A body: the same with everybody there."""
    rank.state["model"].replay()
    torch.cuda.current_stream(rank.device).synchronize()
    rank.state["a2a"].check()


def close_quietly(rank: Rank) -> tuple[Any, ...] | None:
    """A body: closes the object whose fault was already raised; says what close() raised all the same."""
    a2a = rank.state["objects"].pop()
    return raised_by(a2a.close)


def full_case(ep_size: int) -> Case:
    return case_of(ep_size, (Round(11, (8,) * ep_size),))


def expect_fault(fault: Fault, rank: int, phase: str, epoch: int, missing: int, timeout_s: float = TIMEOUT_S) -> None:
    wanted = ("PeerTimeout", phase, rank, epoch, (missing,))
    assert fault.raised == {"dispatch": wanted, "combine": wanted, "check": wanted}
    assert timeout_s * 0.9 <= fault.seconds < timeout_s * 2
    assert fault.launch_seconds < TIMEOUT_S / 2


def test_a_dispatch_without_one_peer(peers: Ranks) -> None:
    case, missing = full_case(peers.size), peers.size - 1
    peers.call(open_object, "a2a", case, DEADLINES)
    check_round(case, 0, peers.call(play_first, case), check=False)
    there = range(missing)
    faults = peers.call(lonely_dispatch, case, missing, ranks=there)
    for rank, fault in faults.items():
        expect_fault(fault, rank, "dispatch", epoch=2, missing=missing)
        assert fault.num_tokens is not None
        assert fault.num_tokens[missing] == 0
        assert fault.ids_of_missing is not None
        assert bool((fault.ids_of_missing == -1).all())
    assert set(peers.call(close_quietly).values()) == {None}


def test_a_combine_without_one_peer(peers: Ranks) -> None:
    case, missing = full_case(peers.size), 0
    peers.call(open_object, "a2a", case, DEADLINES)
    check_round(case, 0, peers.call(play_first, case), check=False)
    peers.call(only_dispatch, case)
    for rank, fault in peers.call(lonely_combine, case, ranks=range(1, peers.size)).items():
        expect_fault(fault, rank, "combine", epoch=2, missing=missing)
    assert set(peers.call(close_quietly).values()) == {None}


def test_the_first_round_has_its_own_deadline(peers: Ranks) -> None:
    """The missing rank has opened the object and never starts."""
    case, missing = full_case(peers.size), peers.size - 1
    # It is the deadline of set-up too, which takes longer beside other work.
    first_s = 4 * TIMEOUT_S
    peers.call(open_object, "a2a", case, {"timeout_s": 0.2, "warmup_timeout_s": first_s})
    for rank, fault in peers.call(lonely_dispatch, case, missing, ranks=range(missing)).items():
        expect_fault(fault, rank, "dispatch", epoch=1, missing=missing, timeout_s=first_s)


def close_first(rank: Rank, case: Case) -> tuple[Any, ...] | None:
    """A body: a lonely dispatch whose fault nobody has seen when close() comes."""
    a2a = rank.state["objects"].pop()
    a2a.dispatch(*[one.to(rank.device) for one in flat(case, rank.rank)])
    torch.cuda.current_stream(rank.device).synchronize()
    return raised_by(a2a.close)


def test_close_raises_what_nobody_has_seen(peers: Ranks) -> None:
    case, missing = full_case(peers.size), peers.size - 1
    peers.call(open_object, "a2a", case, DEADLINES)
    peers.call(play_first, case)
    for rank, raised in peers.call(close_first, case, ranks=range(missing)).items():
        assert raised == ("PeerTimeout", "dispatch", rank, 2, (missing,))
    assert peers.call(close_quietly, ranks=[missing]) == {missing: None}


def test_one_timeout_per_graph_of_many_layers(peers: Ranks) -> None:
    case, missing = full_case(peers.size), peers.size - 1
    peers.call(open_object, "a2a", case, DEADLINES)
    peers.call(prepare_graphs, case, (8,))
    for rank in range(peers.size):
        peers.call(capture_model, ranks=[rank])
    peers.call(replay_model)
    for rank, fault in peers.call(lonely_replay, case, ranks=range(missing)).items():
        expect_fault(fault, rank, "dispatch", epoch=LAYERS + 2, missing=missing)
    assert set(peers.call(close_quietly).values()) == {None}


def go_on_with(rank: Rank, mask: tuple[bool, ...]) -> tuple[bool, ...]:
    """A body for the ranks of the mask."""
    a2a: putget.AllToAll = rank.state["a2a"]
    a2a.set_active_ranks(mask)
    return a2a.active_ranks


@pytest.mark.parametrize("lost", [0, -1], ids=["first_rank", "last_rank"])
def test_survivors_go_on_and_old_graphs_obey(peers: Ranks, lost: int) -> None:
    """Graphs captured before the loss give right results without the lost rank, and with it once it is back."""
    size, missing = peers.size, lost % peers.size
    mask = tuple(rank != missing for rank in range(size))
    there = [rank for rank in range(size) if mask[rank]]
    case = case_of(size, tuple(Round(30 + index, (CAPACITY,) * size) for index in range(3)))
    peers.call(open_object, "a2a", case, DEADLINES)
    peers.call(prepare_graphs, case, (8, CAPACITY))
    for rank in range(size):
        peers.call(capture_all, ranks=[rank])
    check_round(case, 0, peers.call(replay_round, case, 0), check=False)
    for rank, fault in peers.call(lonely_replay, case, ranks=there).items():
        assert fault.raised["check"] == ("PeerTimeout", "dispatch", rank, 4, (missing,))
    assert set(peers.call(go_on_with, mask, ranks=there).values()) == {mask}
    survivors = replace(case, active=mask)
    for index in range(3):
        outcomes = peers.call(replay_round, case, index, ranks=there)
        check_round(survivors, index, outcomes, check=False)
    check_round(survivors, 0, peers.call(play_first, case, ranks=there), check=False)
    everybody = (True,) * size
    assert set(peers.call(go_on_with, everybody).values()) == {everybody}
    for index in range(3):
        check_round(case, index, peers.call(replay_round, case, index), check=False)


def capture_all(rank: Rank) -> None:
    """A body for one rank at a time: the graphs of single rounds, and the one of many layers."""
    for graph in rank.state["graphs"].values():
        graph.capture()
    capture_model(rank)
