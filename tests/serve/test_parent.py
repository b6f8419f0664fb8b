"""Words between a rank and the process that started it."""

from __future__ import annotations

import multiprocessing
import queue
from typing import Any

import pytest

from putget_serve.parent import Parent


@pytest.fixture
def ends() -> Any:
    """The other end of the pipe, and the rank's."""
    ours, theirs = multiprocessing.Pipe()
    yield ours, Parent(theirs)
    ours.close()


def test_a_new_process_hears_where_ranks_meet(ends: Any) -> None:
    ours, parent = ends
    ours.send(("meet", "file", 3))
    assert parent.wait_for_meeting() == ("file", 3)
    assert ours.recv() == ("loaded",)


def test_only_the_decision_about_the_own_attempt_counts(ends: Any) -> None:
    ours, parent = ends
    ours.send(("go", 1, False))
    ours.send(("go", 2, True))
    assert parent.agree(2, None) is True
    ours.send(("go", 3, False))
    assert parent.agree(3, "no room") is False
    assert [ours.recv(), ours.recv()] == [("can", 2, None), ("can", 3, "no room")]


def test_a_rank_that_serves_is_called_for_each_meeting() -> None:
    ours, theirs = multiprocessing.Pipe()
    parent, heard = Parent(theirs), queue.SimpleQueue[tuple[str, int]]()
    parent.on_meeting = lambda file, number: heard.put((file, number))
    ours.send(("meet", "file", 1))
    assert heard.get() == ("file", 1)
    ours.close()


def test_without_a_parent_nobody_can_go_on(ends: Any) -> None:
    ours, parent = ends
    ours.close()
    assert parent.agree(1, None) is False
    assert parent.agree(2, None) is False
