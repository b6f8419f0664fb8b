"""Closing an object when ranks are lost, and agreeing on who goes on: masks that differ, members late or gone."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.harness import RankProcesses, fresh_ranks
from tests.test_faults import (
    ALL,
    SIGNALS,
    SIZE,
    SLACK_S,
    TIMEOUT_S,
    WARMUP_S,
    Timeout,
    close,
    dispatch,
    refused,
    require_round,
    require_timeout,
    set_active_ranks,
    shrink,
    start,
    timed_out,
    without,
)


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
    start(ranks)
    for rank in (0, 1, 3):
        ranks.submit(rank, set_active_ranks, ALL)
    time.sleep(TIMEOUT_S / 2)
    ranks.submit(2, set_active_ranks, ALL)
    ranks.results(range(SIZE))
    require_round(ranks, 1)
