"""One rank's conclusions from its peers' words about missing ranks: the peers are sockets of the test."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from putget.errors import PeerTimeout
from putget.group.agreement import Agreement, Attempt
from putget.group.mesh import Mesh
from putget.group.peers import Peer

OWN = 1
PEERS = (0, 2, 3)
TIMEOUT_S = 20.0  # nothing here waits for it
Words = list[tuple[int, dict[str, Any]]]


class Wire:
    """Rank 1 of four, and the other ends of its connections."""

    def __init__(self) -> None:
        pairs = {peer: socket.socketpair() for peer in PEERS}
        self.mesh = Mesh(OWN, {peer: ours for peer, (ours, _) in pairs.items()}, one_host=True)
        self.agreement = Agreement(self.mesh)
        self.ends = {peer: Peer(theirs) for peer, (_, theirs) in pairs.items()}

    def say(self, words: Words) -> None:
        for peer, fields in words:
            self.ends[peer].send(fields, [], 1.0)

    def heard(self, peer: int, kind: str) -> dict[str, Any]:
        """The last message of a kind that rank 1 has sent to a peer."""
        self.ends[peer].receive_all()
        return next(fields for fields in reversed(self.ends[peer].agreement) if kind in fields)

    def missing(self, begin: Callable[[Attempt], None], timeout_s: float = TIMEOUT_S) -> tuple[int, ...]:
        """The ranks that an attempt of all four misses; ``begin`` is called once it has told its join."""
        wait = self.mesh.wait

        def wait_behind(look: Any, missing: Any, deadline: Any, *args: Any) -> None:
            begin(deadline._attempt)
            wait(look, missing, deadline, *args)

        self.mesh.wait = wait_behind  # type: ignore[method-assign]
        with pytest.raises(PeerTimeout) as caught, self.agreement.attempt(0, [0, 1, 2, 3], 5, timeout_s):
            pass
        self.mesh.wait = wait  # type: ignore[method-assign]
        return caught.value.missing


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.mesh.close()
    for end in wire.ends.values():
        end.close()


def join(number: int, members: list[int], given_up: list[int], answers: list[int]) -> dict[str, Any]:
    return {
        "join": number,
        "workspace": 0,
        "members": members,
        "epoch": 5,
        "step_at": 0,
        "given_up": given_up,
        "answers": answers,
    }


def left(missing: list[int], answers: list[int]) -> dict[str, Any]:
    return {"left": 1, "missing": missing, "answers": answers}


ALL_JOIN: Words = [(peer, join(1, [0, 1, 2, 3], [], [])) for peer in PEERS]


def others(peer: int) -> list[int]:
    return [other for other in PEERS if other != peer]


@pytest.mark.parametrize("late", [False, True], ids=["in_time", "behind_the_deadline"])
@pytest.mark.parametrize("woken", PEERS)
def test_of_two_that_miss_each_other_the_first_is_believed(wire: Wire, woken: int, late: bool) -> None:
    """A rank that wakes up hears that it was given up, and gives up the others: rank 1 finds both words at once."""

    def begin(attempt: Attempt) -> None:
        wire.say([*ALL_JOIN, (woken, left(others(woken), others(woken)))])
        wire.say([(peer, left([woken], [])) for peer in others(woken)])
        attempt.deadline.at -= 100 * late

    assert wire.missing(begin) == (woken,)


@pytest.mark.parametrize("late", [False, True], ids=["in_time", "behind_the_deadline"])
@pytest.mark.parametrize("woken", PEERS)
def test_an_answer_waits_for_the_word_before_it(wire: Wire, woken: int, late: bool) -> None:
    def begin(attempt: Attempt) -> None:
        wire.say([*ALL_JOIN, (woken, left(others(woken), others(woken)))])
        attempt.deadline.at -= 100 * late
        hold = attempt._is_held

        def hold_and_go_on(*args: Any) -> bool:
            is_held = hold(*args)
            if is_held:
                wire.say([(others(woken)[0], left([woken], []))])
            return is_held

        attempt._is_held = hold_and_go_on  # type: ignore[method-assign]

    assert wire.missing(begin) == (woken,)


@pytest.mark.parametrize("late", [False, True], ids=["in_time", "behind_the_deadline"])
def test_an_answer_to_a_word_that_never_comes_is_believed(wire: Wire, late: bool) -> None:
    def begin(attempt: Attempt) -> None:
        wire.say([*ALL_JOIN, (0, left([3], [3]))])
        attempt.deadline.at -= 100 * late

    started = time.monotonic()
    assert wire.missing(begin, timeout_s=1.0) == (3,)
    assert time.monotonic() - started >= 0.5  # half of the deadline, and at most 3 s


def test_a_word_that_answers_nobody_of_the_members_is_believed_at_once(wire: Wire) -> None:
    started = time.monotonic()
    assert wire.missing(lambda _: wire.say([*ALL_JOIN, (0, left([3], [2]))])) == (3,)
    assert time.monotonic() - started < TIMEOUT_S / 2


@pytest.mark.parametrize("woken", PEERS)
@pytest.mark.parametrize("is_old", [False, True], ids=["fresh", "from_before"])
def test_of_two_that_no_longer_want_each_other_the_first_is_believed(wire: Wire, woken: int, is_old: bool) -> None:
    """Rank 1 comes late: it finds what the others want since."""
    wishes: Words = [(woken, join(2, sorted([OWN, woken]), others(woken), others(woken)))]
    wishes += [(peer, join(2, sorted([OWN, *others(woken)]), [woken], [])) for peer in others(woken)]
    if is_old:
        wire.say(wishes)
    assert wire.missing(lambda _: None if is_old else wire.say(wishes)) == (woken,)


def test_whoever_gives_up_says_whom_it_answers(wire: Wire) -> None:
    """Also when it reads those words only behind its deadline, as a rank does that wakes up."""

    def begin(attempt: Attempt) -> None:
        wire.say([*ALL_JOIN, (2, left([OWN], [])), (3, left([OWN], []))])
        attempt.deadline.at -= 100

    assert wire.missing(begin) == (2, 3)
    assert wire.heard(0, "left") == {"left": 1, "missing": [2, 3], "answers": [2, 3]}


def test_whoever_wants_a_rank_again_has_not_given_it_up(wire: Wire) -> None:
    wire.say([(2, left([OWN], [])), (2, join(2, [0, 1, 2, 3], [], []))])

    def begin(attempt: Attempt) -> None:
        wire.say([(2, {"left": 2, "missing": [], "answers": []})])
        attempt.deadline.at -= 100

    assert wire.missing(begin) == (0, 2, 3)
    assert wire.heard(0, "left")["answers"] == []
