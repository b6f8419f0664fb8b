"""Numbers of objects over several domains: the same on all ranks, and one object's each."""

from __future__ import annotations

from typing import Any

import pytest

import putget
from putget.group.numbers import MOST_NUMBERS, Numbers
from tests.harness import Rank, run_ranks


def test_ranks_that_have_agreed_take_the_same_numbers() -> None:
    one, other = Numbers(), Numbers()
    one.take()  # for an object that the other rank could not make
    words = [one.said(), other.said()]
    one.agree(words)
    other.agree(words)
    assert [one.take(), one.take()] == [other.take(), other.take()] == [1, 2]


def test_no_object_gets_the_number_of_another_one_that_is_open_on_any_rank() -> None:
    one, other = Numbers(), Numbers()
    first = one.take()
    one.hold(first, None)
    other.next = one.next = MOST_NUMBERS - 1
    words = [one.said(), other.said()]
    one.agree(words)
    other.agree(words)
    assert [one.take(), one.take()] == [other.take(), other.take()] == [MOST_NUMBERS - 1, 1]
    one.hold(MOST_NUMBERS - 1, first)
    one.retire(MOST_NUMBERS - 1)
    one.agree([one.said()])
    one.next = MOST_NUMBERS
    assert one.take() == first


def take_behind_an_object_that_ends(rank: Rank) -> int:
    """An object of rank 0 is dropped after its word has been sent, before the words are compared."""
    numbers = rank.comm.numbers
    with rank.all_to_all() as a2a:
        if rank.rank == 0:
            numbers.hold(5, None)
        exchange = rank.comm.exchange_descriptors

        def exchange_and_drop(*args: Any, **options: Any) -> Any:
            said = exchange(*args, **options)
            numbers.retire(5)
            return said

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank.comm, "exchange_descriptors", exchange_and_drop)
            a2a.set_active_ranks([True, True])
        numbers.next = 5
        return numbers.take()


def test_an_object_that_ends_while_ranks_agree_counts_alike_on_all() -> None:
    assert run_ranks(2, take_behind_an_object_that_ends, mode="thread") == [6, 6]


def test_more_objects_than_numbers_are_refused() -> None:
    numbers = Numbers()
    assert sorted(numbers.take() for _ in range(MOST_NUMBERS)) == list(range(MOST_NUMBERS))
    with pytest.raises(putget.PutgetError, match="4096 objects of this communicator are open"):
        numbers.take()
