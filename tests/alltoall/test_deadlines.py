"""One thread's wait at one step has one deadline, however many ranks are lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.alltoall.test_faults import SIZE, Timeout, combine, construct, dispatch, require_round, timed_out
from tests.harness import RankProcesses, fresh_ranks


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    with fresh_ranks(SIZE) as processes:
        yield processes


@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_lost_ranks_have_one_deadline_together(ranks: RankProcesses, step: str) -> None:
    """A rank that waits for one after the other does not begin anew with each."""
    timeout_s = 6.0
    ranks.call(construct, {"timeout_s": timeout_s})
    require_round(ranks, 0)
    if step == "combine":
        ranks.call(dispatch, 1)
    for victim in (1, 2, 3):
        ranks.signal(victim, signal.SIGKILL)
    got = ranks.call(timed_out, dispatch if step == "dispatch" else combine, 1, ranks=[0], timeout=30)[0]
    assert isinstance(got, Timeout), got
    assert (got.phase, got.missing) == (step, (1, 2, 3))
    assert 0.9 * timeout_s < got.seconds < 2.5 * timeout_s
