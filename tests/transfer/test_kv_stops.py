"""KV caches: prefillers that stand still for three timeouts while their pages have other owners, and then go on.

Several are stopped at once, each at a random moment of its request. The soak has 1,000 such rounds.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer import kv
from tests.transfer import kv_prefiller
from tests.transfer.kv_prefiller import GIVEN_UP, HEARTBEAT_S, LAYERS, TOKENS
from tests.transfer.kv_process import WAIT_S, Prefill

POISON = 0x5C
COUNT = 40
"""Pages of a request: two portions of two layers."""
STOPPED = 8
"""Prefillers that are stopped at once."""
STAND_S = 3 * HEARTBEAT_S[1]
LONGEST_S = 0.003


class Ranks:
    """A decode rank, a prefiller that is always well, and those that are stopped."""

    def __init__(self, network: str, stopped: int) -> None:
        self.random = random.Random(7)
        self.engine = kv_prefiller.engine(network)
        self.memory, cache = kv_prefiller.cache(self.engine, stopped * COUNT)
        self.memory[...] = POISON
        self.decoder = kv.Decoder(cache, max_requests=4 * stopped, confirm_s=1.0)
        self.well, *self.stopped = (Prefill(network) for _ in range(1 + stopped))
        self.ends = {"arrived": 0, "nothing came": 0, "a part came": 0}

    def end(self) -> None:
        for prefiller in (self.well, *self.stopped):
            prefiller.end()
        self.engine.close()

    def ask(self, prefiller: Prefill, name: str, pages: list[int]) -> kv.Receive:
        sources = self.decoder.sources([prefiller.source])
        receive = self.decoder.request(sources, name, [pages], tokens=COUNT * TOKENS, segment_tokens=32, deadline_s=600)
        end = time.monotonic() + WAIT_S
        while receive.state == "asked":
            assert time.monotonic() < end
            time.sleep(0.001)
        return receive

    def stop(self, prefiller: Prefill, name: str, value: int) -> list[str]:
        """Stop a prefiller within its request; return what it has to answer when it goes on, but for the end."""
        layers = [f"layers {name} {done}" for done in range(1, LAYERS + 1)]
        lines = [f"begin {name} {value} {COUNT}", *layers, f"finish {name}", f"released {name}"]
        done = self.random.randrange(len(lines))
        for line in lines[:done]:
            assert prefiller.do(line) == "done"
        if self.random.random() < 0.5:
            # It is stopped while it does the next thing.
            prefiller.say(lines[done])
            time.sleep(self.random.uniform(0, LONGEST_S))
            prefiller.signal(signal.SIGSTOP)
            rest = lines[done + 1 :]
        else:
            prefiller.signal(signal.SIGSTOP)
            rest = lines[done:]
        for line in rest:
            prefiller.say(line)
        return ["done"] * (len(lines) - 1 - done)

    def outcome(self, receive: kv.Receive, pages: list[int], value: int) -> str:
        try:
            receive.wait(WAIT_S)
        except kv.ReceiveFailed:
            came = (self.memory[:, pages] != POISON).any()
            return "a part came" if came else "nothing came"
        assert (self.memory[:, pages] == value).all()
        return "arrived"

    def serve(self, name: str, value: int) -> None:
        """Have the prefiller that is well compute a request."""
        for line in (f"begin {name} {value} {COUNT}", f"layers {name} {LAYERS}", f"finish {name}"):
            assert self.well.do(line) == "done"

    def round(self, number: int) -> None:
        """Stop all at once. Their pages are poisoned, and every other request's pages get another owner."""
        value, other = 1 + number % 80, 100 + number % 80
        split = np.array_split(self.random.sample(range(self.memory.shape[1]), self.memory.shape[1]), len(self.stopped))
        pages = [list(map(int, own)) for own in split]
        asked = [self.ask(one, f"{number}.{at}", pages[at]) for at, one in enumerate(self.stopped)]
        answers = [self.stop(one, f"{number}.{at}", value) for at, one in enumerate(self.stopped)]
        since = time.monotonic()
        for at, receive in enumerate(asked):
            self.ends[self.outcome(receive, pages[at], value)] += 1
        assert self.decoder.quarantined == 0
        self.memory[...] = POISON
        owners = {at: self.ask(self.well, f"{number}.{at}.other", pages[at]) for at in range(0, len(pages), 2)}
        # A prefiller that goes on sooner may not be down yet for all others.
        time.sleep(max(0.0, since + STAND_S - time.monotonic()))
        for one in self.stopped:
            one.signal(signal.SIGCONT)
        for at, receive in owners.items():
            self.serve(f"{number}.{at}.other", other)
            receive.wait(WAIT_S)
        for one, expected in zip(self.stopped, answers, strict=True):
            # With the last answer nothing of its request is under way: its pages have come back.
            assert [one.answer() for _ in expected] == expected
            assert one.answer() in ("sent", *GIVEN_UP)
        for at, own in enumerate(pages):
            right = other if at in owners else POISON
            wrong = np.count_nonzero(self.memory[:, own] != right)
            assert wrong == 0, f"round {number}: {wrong} bytes of request {at} have changed"
        self.memory[...] = POISON


@pytest.fixture(params=["tcp", "host"])
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(network: str) -> Iterator[Callable[[int], Ranks]]:
    """Ranks with so many prefillers to stop."""
    with ExitStack() as stack:

        def one(stopped: int) -> Ranks:
            ranks = Ranks(network, stopped)
            stack.callback(ranks.end)
            return ranks

        yield one


def test_nothing_that_a_stopped_prefiller_still_sends_changes_a_page_in_use(start: Callable[[int], Ranks]) -> None:
    ranks = start(4)
    ranks.round(0)


@pytest.mark.soak
def test_a_thousand_stops_change_no_page_in_use(start: Callable[[int], Ranks]) -> None:
    ranks = start(STOPPED)
    for number in range(-(-int(os.environ.get("PUTGET_TRANSFER_ROUNDS", "1000")) // STOPPED)):
        ranks.round(number)
    print(ranks.ends)
    # Otherwise they were not stopped within their requests.
    assert min(ranks.ends.values()) > 0
