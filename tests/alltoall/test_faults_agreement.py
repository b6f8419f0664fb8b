"""Closing an object when ranks are lost, and agreeing on who goes on: masks that differ, members late or gone."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import putget
from tests.alltoall.test_faults import (
    ALL,
    CASE,
    SIGNALS,
    SIZE,
    SLACK_S,
    TIMEOUT_S,
    WARMUP_S,
    Timeout,
    close,
    construct,
    construct_second,
    dispatch,
    play_one,
    refused,
    require_round,
    require_timeout,
    set_active_ranks,
    shrink,
    start,
    timed_out,
    turn_to_second,
    without,
)
from tests.harness import Rank, RankProcesses, fresh_ranks, run_ranks
from tests.harness.compare import check_round
from tests.harness.processes import thread_states


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    with fresh_ranks(SIZE) as processes:
        yield processes


@SIGNALS
@pytest.mark.parametrize("opened", [False, True], ids=["between_rounds", "in_a_round"])
def test_close_with_a_dead_peer_is_prompt(ranks: RankProcesses, number: signal.Signals, opened: bool) -> None:
    start(ranks)
    if opened:
        ranks.call(dispatch, 1)
    ranks.signal(2, number)
    for seconds, raised in ranks.call(close, ranks=[0, 1, 3]).values():
        assert seconds < TIMEOUT_S + SLACK_S
        assert raised == ""


def test_close_raises_only_what_nobody_has_seen(ranks: RankProcesses) -> None:
    start(ranks)
    ranks.signal(2, signal.SIGKILL)
    require_timeout(ranks, (2,), "dispatch", 2, dispatch, 1)
    for seconds, raised in ranks.call(close, ranks=[0, 1, 3]).values():
        assert seconds < TIMEOUT_S + SLACK_S
        assert raised == ""


def test_killed_while_closing(ranks: RankProcesses) -> None:
    start(ranks)
    for rank in (0, 1, 3):
        ranks.submit(rank, close)
    ranks.signal(2, signal.SIGKILL)
    for seconds, _ in ranks.results([0, 1, 3]).values():
        assert seconds < TIMEOUT_S + SLACK_S


def test_masks_that_differ_are_refused_on_all_ranks(ranks: RankProcesses) -> None:
    start(ranks)
    for rank in range(SIZE):
        ranks.submit(rank, refused, set_active_ranks, ALL if rank == 1 else without(3))
    answers = ranks.results(range(3))
    for message, seconds in answers.values():
        assert "mask" in message
        assert seconds < WARMUP_S + SLACK_S
    # Rank 3 is no member of its own mask, which is a mistake of its own.
    assert "mask" in ranks.result(3)[0]
    for rank in range(SIZE):
        ranks.submit(rank, set_active_ranks, ALL)
    ranks.results(range(SIZE))
    require_round(ranks, 1)


def test_a_member_of_the_mask_that_never_calls(ranks: RankProcesses) -> None:
    start(ranks)
    ranks.signal(2, signal.SIGKILL)
    for rank, got in ranks.call(timed_out, set_active_ranks, ALL, ranks=[0, 1, 3]).items():
        assert isinstance(got, Timeout), got
        assert (got.phase, got.rank, got.missing) == ("set_active_ranks", rank, (2,))
        assert got.seconds < WARMUP_S + SLACK_S
    shrink(ranks, 2)


def test_a_late_member_of_the_mask_is_waited_for(ranks: RankProcesses) -> None:
    start(ranks, timeout_s=30.0)
    for rank in (0, 1, 3):
        ranks.submit(rank, set_active_ranks, ALL)
    time.sleep(1.0)
    ranks.submit(2, set_active_ranks, ALL)
    ranks.results(range(SIZE))
    require_round(ranks, 1)


def names_of(ranks: RankProcesses, mask: tuple[bool, ...], callers: list[int]) -> dict[int, tuple[int, ...] | str]:
    """The ranks that each caller of set_active_ranks misses."""
    found: dict[int, tuple[int, ...] | str] = {}
    for rank, got in ranks.call(timed_out, set_active_ranks, mask, ranks=callers).items():
        found[rank] = got.missing if isinstance(got, Timeout) else got
    return found


def test_a_stopped_member_alone_is_named(ranks: RankProcesses) -> None:
    start(ranks)
    ranks.signal(2, signal.SIGSTOP)
    assert names_of(ranks, ALL, [0, 1, 3]) == {0: (2,), 1: (2,), 3: (2,)}
    shrink(ranks, 2)


def keep_sockets_open(rank: Rank) -> int:
    """A body: leaves a child that was forked without Python's knowledge, so that nothing closed its descriptors."""
    child = int(ctypes.CDLL(None).fork())
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def test_a_dead_member_whose_sockets_a_child_keeps_open_alone_is_named(ranks: RankProcesses) -> None:
    start(ranks)
    child = ranks.call(keep_sockets_open, ranks=[2])[2]
    try:
        ranks.signal(2, signal.SIGKILL)
        assert names_of(ranks, ALL, [0, 1, 3]) == {0: (2,), 1: (2,), 3: (2,)}
        shrink(ranks, 2)
    finally:
        os.kill(child, signal.SIGKILL)


# Ranks that answer each other end as one group; on a machine with more to do than cores an answer takes its time.
PATIENT_S = 4.0


def drop_missing_and_try_again(rank: Rank, delay: float, pause: float) -> tuple[list[tuple[int, ...]], list[bool]]:
    """A body: the loop that an engine may write. Returns whom it dropped, call by call, and the mask of the end."""
    time.sleep(delay)
    mask = [True] * rank.size
    dropped = []
    while True:
        try:
            rank.state["a2a"].set_active_ranks(mask)
        except putget.PeerTimeout as error:
            dropped.append(error.missing)
            mask = [wanted and peer not in error.missing for peer, wanted in enumerate(mask)]
            time.sleep(pause)
        else:
            return dropped, mask


@pytest.mark.parametrize(
    ("delays", "pauses"),
    [
        pytest.param((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), id="at_once"),
        pytest.param((0.0, 0.8, 0.0, 0.4), (0.0, 0.0, 0.0, 0.0), id="one_after_the_other"),
        pytest.param((0.6, 0.0, 0.0, 0.3), (0.0, 0.9, 0.0, 0.0), id="slow_to_try_again"),
    ],
)
def test_survivors_that_drop_whom_they_miss_end_as_one_group(
    ranks: RankProcesses, delays: tuple[float, ...], pauses: tuple[float, ...]
) -> None:
    start(ranks, timeout_s=PATIENT_S)
    ranks.signal(2, signal.SIGSTOP)
    for rank in (0, 1, 3):
        ranks.submit(rank, drop_missing_and_try_again, delays[rank], pauses[rank])
    for dropped, mask in ranks.results([0, 1, 3]).values():
        assert dropped == [(2,)]
        assert tuple(mask) == without(2)
    for index in (2, 3):
        require_round(ranks, index, without(2))


def test_two_stopped_members_of_which_one_has_joined(ranks: RankProcesses) -> None:
    """The words of a stopped rank stand in its peers' sockets: they are neither an answer nor a wish of its own."""
    start(ranks, timeout_s=PATIENT_S)
    ranks.signal(2, signal.SIGSTOP)
    ranks.submit(3, join_and_stop, (0, 1, 2), SIZE - 1, True)
    require_stopped(ranks, 3)
    for rank in (0, 1):
        ranks.submit(rank, drop_missing_and_try_again, 0.0, 0.0)
    for dropped, mask in ranks.results([0, 1]).values():
        assert dropped == [(2,), (3,)]
        assert tuple(mask) == without(2, 3)
    require_round(ranks, 2, without(2, 3))


def join_and_stop(rank: Rank, told: tuple[int, ...], messages: int, at_once: bool = False) -> None:
    """A body: says so many messages of an agreement on all ranks to some peers, then stops for good: as it is about to
    say more, or at once; or where it would give up itself, after the others, whom it hears, but who do not all hear it.
    """
    agreement = rank.comm._agreement
    peers = agreement.mesh.peers
    left = [messages]

    def limit(peer: int, send: Any) -> Any:
        def limited(fields: dict[str, Any], *args: Any) -> None:
            if left[0] == 0 or "left" in fields:
                os.kill(os.getpid(), signal.SIGSTOP)
            if peer in told:
                left[0] -= 1
                send(fields, *args)
                if left[0] == 0 and at_once:
                    os.kill(os.getpid(), signal.SIGSTOP)

        return limited

    for peer, connection in peers.items():
        connection.send = limit(peer, connection.send)  # type: ignore[method-assign]
    rank.state["a2a"].set_active_ranks(ALL)


def require_stopped(ranks: RankProcesses, rank: int) -> None:
    """Waits until a rank has stopped itself."""
    pid, deadline = ranks._processes[rank].pid, time.monotonic() + 30
    assert pid is not None
    while thread_states(pid) != {"T"}:
        assert time.monotonic() < deadline, f"rank {rank} goes on"
        time.sleep(0.01)


@pytest.mark.parametrize("messages", [1, 2, 3])
def test_a_member_that_stops_between_two_of_its_messages(ranks: RankProcesses, messages: int) -> None:
    """Rank 0 alone hears its join, then its confirmation, and so on: nobody takes rank 0 for what rank 2 is."""
    start(ranks, timeout_s=PATIENT_S)
    ranks.submit(2, join_and_stop, (0,), messages)
    for rank in (0, 1, 3):
        ranks.submit(rank, drop_missing_and_try_again, 0.2, 0.0)
    for dropped, mask in ranks.results([0, 1, 3]).values():
        assert dropped == [(2,)]
        assert tuple(mask) == without(2)
    require_round(ranks, 2, without(2))


def test_masks_that_differ_on_two_workspaces_are_not_mixed(ranks: RankProcesses) -> None:
    start(ranks)
    ranks.call(construct_second)
    ranks.call(turn_to_second, ranks=[1])
    for rank, (message, _) in ranks.call(refused, set_active_ranks, ALL).items():
        assert "workspace" in message, rank


def test_a_quorum_is_held_before_any_effect(ranks: RankProcesses) -> None:
    start(ranks)
    for _, (message, seconds) in ranks.call(refused, set_active_ranks_with_quorum, without(1, 2), 3).items():
        assert "quorum" in message or "own rank" in message
        assert seconds < SLACK_S
    require_round(ranks, 1)
    ranks.signal(2, signal.SIGKILL)
    require_timeout(ranks, (2,), "dispatch", 3, dispatch, 2)
    ranks.call(set_active_ranks_with_quorum, without(2), 3, ranks=[0, 1, 3])
    require_round(ranks, 3, without(2))


def set_active_ranks_with_quorum(rank: Rank, mask: tuple[bool, ...], quorum: int) -> None:
    rank.state["a2a"].set_active_ranks(mask, quorum=quorum)


def test_an_error_about_a_quorum_has_both_numbers() -> None:
    error = putget.QuorumLost(2, 3)
    assert (error.num_ranks, error.quorum) == (2, 3)
    assert isinstance(error, ValueError)
    assert isinstance(error, putget.PutgetError)


@pytest.mark.parametrize("quorum", [0, -1, 3, 2.0, "2", True])
def test_a_quorum_is_a_number_of_ranks(quorum: Any) -> None:
    for message in run_ranks(2, refused_quorum, quorum, mode="thread"):
        assert "quorum" in message
        assert repr(quorum) in message


def refused_quorum(rank: Rank, quorum: Any) -> str:
    with rank.all_to_all() as a2a, pytest.raises(ValueError, match="quorum") as caught:
        a2a.set_active_ranks([True, True], quorum=quorum)
    return str(caught.value)


def fork_a_child(rank: Rank) -> int:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def test_a_death_is_seen_at_once_though_a_forked_child_lives(ranks: RankProcesses) -> None:
    start(ranks)
    child = ranks.call(fork_a_child, ranks=[2])[2]
    try:
        ranks.signal(2, signal.SIGKILL)
        for got in ranks.call(timed_out, set_active_ranks, ALL, ranks=[0, 1, 3]).values():
            assert isinstance(got, Timeout), got
            assert got.missing == (2,)
            assert "within" not in got.text  # the connection told it, no deadline
        shrink(ranks, 2)
    finally:
        os.kill(child, signal.SIGKILL)


def share(rank: Rank) -> None:
    """A body: an object on a workspace that has room for others."""
    workspace = putget.Workspace(rank.comm, 1 << 20, rank.device, timeout_s=TIMEOUT_S, warmup_timeout_s=TIMEOUT_S)
    rank.state["workspace"] = workspace
    construct(rank, {"workspace": workspace})


def disturb(rank: Rank, step: str, over: Path) -> None:
    """A body: rank 1 does not wait in a step of the next constructor, and another one comes behind that."""
    mesh = rank.comm._mesh
    exchange = mesh.exchange

    def disturbed(what: str, *args: Any, **options: Any) -> Any:
        if what != step:
            return exchange(what, *args, **options)
        mesh.exchange = exchange  # type: ignore[method-assign]
        if rank.rank == 1:
            try:
                return exchange(what, *args, **options | {"timeout_s": 0.01})
            finally:
                over.touch()
        deadline = time.monotonic() + 30
        while not over.exists():
            assert time.monotonic() < deadline, "rank 1 waits"
            time.sleep(0.01)
        time.sleep(0.5)  # the others hear of it before, if they listen
        return exchange(what, *args, **options)

    mesh.exchange = disturbed  # type: ignore[method-assign]


# Another layout, played like CASE.
OTHER = replace(CASE, max_tokens_per_rank=CASE.max_tokens_per_rank + 1)


def construct_other_layout(rank: Rank) -> None:
    first = rank.state["a2a"]
    options = {"workspace": rank.state["workspace"], "max_tokens_per_rank": OTHER.max_tokens_per_rank}
    construct(rank, options)
    rank.state["second"], rank.state["a2a"] = rank.state["a2a"], first


@pytest.mark.parametrize("step", ["mix", "mixed"])
def test_a_second_layout_that_came_to_some_ranks_only_is_healed(
    ranks: RankProcesses, step: str, tmp_path: Path
) -> None:
    """Rank 1 times out in one of the two steps in which ranks mix layouts; the others pass it."""
    ranks.call(share)
    require_round(ranks, 0)
    ranks.call(disturb, step, tmp_path / "over", ranks=[0, 1])
    came = ranks.call(timed_out, construct_other_layout)
    assert isinstance(came[1], Timeout), came
    assert set(ranks.call(set_active_ranks, ALL).values()) == {ALL}
    for index in (1, 2, 3):
        require_round(ranks, index)
    ranks.call(construct_other_layout)
    ranks.call(turn_to_second)
    for index in (4, 5):
        check_round(OTHER, index, ranks.call(play_one, OTHER, index))


def test_no_round_before_the_ranks_have_met_again(ranks: RankProcesses, tmp_path: Path) -> None:
    ranks.call(share)
    require_round(ranks, 0)
    ranks.call(disturb, "mix", tmp_path / "over", ranks=[0, 1])
    ranks.call(timed_out, construct_other_layout)
    for message in ranks.call(refused_round).values():
        assert "set_active_ranks" in message
    set_again = ranks.call(set_active_ranks, ALL)
    assert set(set_again.values()) == {ALL}
    require_round(ranks, 1)


def refused_round(rank: Rank) -> str:
    with pytest.raises(putget.PutgetError) as caught:
        dispatch(rank, 1)
    return str(caught.value)
