"""Signals while a CPU rank waits for a peer: a handler that raises ends the wait, any other leaves it alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import putget
from putget.core.native_object import NativeObject
from tests.harness import Rank

TIMEOUT_S = 100.0  # nothing here takes so long but a wait that does not end
IDS = torch.zeros(1, 2, dtype=torch.int32)
ROW = torch.ones(1, 4)

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="handlers run in the main thread"
)


class Peer:
    """Rank 1, in a thread, does what it is told; rank 0 is the caller."""

    def __init__(self) -> None:
        self._comms = putget.Communicator.local(2)
        self._objects: dict[int, putget.AllToAll] = {}
        other = threading.Thread(target=self._construct, args=(1,), daemon=True)
        other.start()
        self._construct(0)
        other.join()

    def _construct(self, rank: int) -> None:
        place = Rank(rank, 2, torch.device("cpu"), _comm=self._comms[rank])
        self._objects[rank] = place.all_to_all(timeout_s=TIMEOUT_S, warmup_timeout_s=TIMEOUT_S)

    def __getitem__(self, rank: int) -> putget.AllToAll:
        return self._objects[rank]

    def close(self) -> None:
        for rank in range(2):
            self._objects[rank].close()
            self._comms[rank].close()


@pytest.fixture
def ranks() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def later(seconds: float, *calls: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        for call in calls:
            time.sleep(seconds)
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def send_as_it_waits(number: int) -> threading.Thread:
    """Sends a signal once the main thread has begun to wait: before, its handler would raise in Python code."""
    main = threading.main_thread().ident
    assert main is not None

    def wait() -> None:
        deadline = time.monotonic() + TIMEOUT_S / 4
        while sys._current_frames()[main].f_code is not NativeObject._run.__code__ and time.monotonic() < deadline:
            time.sleep(0.01)

    return later(0, wait, lambda: time.sleep(0.3), send(number))


def dispatch(a2a: putget.AllToAll) -> putget.Received:
    return a2a.dispatch(IDS, ROW[:, :2].contiguous(), ROW)


def combine_twice(a2a: putget.AllToAll) -> None:
    """Its token goes to rank 0 itself: so combine may wait for nobody, and the next dispatch for the peer's combine."""
    a2a.combine()
    dispatch(a2a)


def heal(ranks: Peer) -> None:
    """Both agree on the active ranks, and a round comes out right."""
    peer = later(0, lambda: ranks[1].set_active_ranks([True, True]))
    ranks[0].set_active_ranks([True, True])
    peer.join(TIMEOUT_S)
    peer = later(0, lambda: dispatch(ranks[1]), lambda: ranks[1].combine(torch.ones(2, 8, 4)))
    assert dispatch(ranks[0]).num_tokens.tolist() == [1, 1]
    assert ranks[0].combine(torch.ones(2, 8, 4)).tolist() == [[1.0] * 4]
    peer.join(TIMEOUT_S)


def test_control_c_ends_a_wait_at_once(ranks: Peer) -> None:
    began = time.monotonic()
    send_as_it_waits(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        dispatch(ranks[0])
    assert time.monotonic() - began < TIMEOUT_S / 4
    for call in (lambda: dispatch(ranks[0]), ranks[0].check, ranks[0].release):
        with pytest.raises(putget.PutgetError, match=r"round 1: rank 0 .* rank\(s\) 1.*signal.* call set_active_ranks"):
            call()
    heal(ranks)


def test_control_c_ends_the_wait_of_a_combine(ranks: Peer) -> None:
    peer = later(0, lambda: dispatch(ranks[1]))
    dispatch(ranks[0])
    peer.join(TIMEOUT_S)
    began = time.monotonic()
    send_as_it_waits(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        combine_twice(ranks[0])
    assert time.monotonic() - began < TIMEOUT_S / 4
    with pytest.raises(putget.PutgetError, match="signal"):
        ranks[0].check()
    heal(ranks)


def test_a_handler_may_raise_anything(ranks: Peer) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("enough")

    signal.signal(signal.SIGALRM, refuse)
    began = time.monotonic()
    send_as_it_waits(signal.SIGALRM)
    with pytest.raises(OSError, match="enough"):
        dispatch(ranks[0])
    assert time.monotonic() - began < TIMEOUT_S / 4
    heal(ranks)


def test_a_handler_that_does_not_raise_runs_and_leaves_the_wait_alone(ranks: Peer) -> None:
    seen: list[float] = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))

    def send_and_wait() -> None:
        """A signal that comes before the handler of the last one has run may be one with it."""
        before, until = len(seen), time.monotonic() + TIMEOUT_S / 4
        send(signal.SIGUSR1)()
        while len(seen) == before and time.monotonic() < until:
            time.sleep(0.01)

    peer = later(0.2, *[send_and_wait] * 3, lambda: None, lambda: dispatch(ranks[1]))
    assert dispatch(ranks[0]).num_tokens.tolist() == [1, 1]
    ended = time.monotonic()
    peer.join(TIMEOUT_S)
    assert len(seen) == 3
    assert seen[0] < ended  # it ran while the rank waited
    ranks[0].check()


def test_a_rank_in_another_thread_is_not_interrupted(ranks: Peer) -> None:
    caught: list[BaseException] = []
    arrived: list[list[int]] = []

    def wait() -> None:
        try:
            arrived.append(dispatch(ranks[1]).num_tokens.tolist())
        except BaseException as error:
            caught.append(error)

    def sleep() -> None:
        later(0.3, send(signal.SIGINT))
        time.sleep(TIMEOUT_S)

    peer = later(0, wait)
    with pytest.raises(KeyboardInterrupt):
        sleep()
    dispatch(ranks[0])
    peer.join(TIMEOUT_S)
    assert (caught, arrived) == ([], [[0, 0]])  # nobody has rows for rank 1
