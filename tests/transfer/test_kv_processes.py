"""KV caches between processes: a prefiller that is killed, or stopped and goes on, at each stage of a request.

Pages that have come back are filled with poison, and have to keep it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer import kv
from tests.transfer import kv_prefiller
from tests.transfer.kv_prefiller import GIVEN_UP, LAYERS, PAGES, TOKENS
from tests.transfer.kv_process import WAIT_S, Prefill

POISON = 0x5C
COUNT = 40
"""Pages of a request."""
STAGES = ["accepted", "begun", "layers", "computed"]


class Decode:
    """The decode rank, in the test's process."""

    def __init__(self, network: str) -> None:
        self.engine = kv_prefiller.engine(network)
        self.memory, cache = kv_prefiller.cache(self.engine)
        self.decoder = kv.Decoder(cache, max_requests=16, confirm_s=1.0)

    def ask(self, prefiller: Prefill, name: str, pages: list[int]) -> kv.Receive:
        sources = self.decoder.sources([prefiller.source])
        return self.decoder.request(sources, name, [pages], tokens=COUNT * TOKENS, segment_tokens=32, deadline_s=600)

    def poll_until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not what():
            self.decoder.poll()
            assert time.monotonic() < end
            time.sleep(0.001)


@pytest.fixture(params=["tcp", "host"])
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decode(network: str) -> Iterator[Decode]:
    decode = Decode(network)
    yield decode
    decode.engine.close()


@pytest.fixture
def start(network: str) -> Iterator[Callable[[], Prefill]]:
    started: list[Prefill] = []

    def one() -> Prefill:
        started.append(Prefill(network))
        return started[-1]

    yield one
    for process in started:
        process.end()


def bring(prefiller: Prefill, name: str, value: int, stage: str) -> None:
    """Bring a request's prefill to a stage."""
    if stage != "accepted":
        prefiller.do("begin", name, value, COUNT)
    if stage in ("layers", "computed"):
        prefiller.do("layers", name, 2 if stage == "layers" else LAYERS)


def complete(prefiller: Prefill, name: str, value: int, stage: str) -> None:
    """Do the rest of it."""
    if stage == "accepted":
        prefiller.do("begin", name, value, COUNT)
    prefiller.do("layers", name, LAYERS)
    prefiller.do("finish", name)


@pytest.mark.parametrize("stage", ["unheard", *STAGES])
def test_a_killed_prefiller_fails_its_request_alone(decode: Decode, start: Callable[[], Prefill], stage: str) -> None:
    doomed, other = start(), start()
    pages = list(range(COUNT))
    if stage == "unheard":
        doomed.signal(signal.SIGSTOP)
        receive = decode.ask(doomed, "r", pages)
    else:
        receive = decode.ask(doomed, "r", pages)
        decode.poll_until(lambda: receive.state == "accepted")
        bring(doomed, "r", 7, stage)
    doomed.signal(signal.SIGKILL)
    with pytest.raises(kv.ReceiveFailed):
        receive.wait(WAIT_S)
    assert decode.decoder.quarantined == 0
    # The same pages, from another one.
    decode.memory[...] = POISON
    again = decode.ask(other, "again", pages)
    decode.poll_until(lambda: again.state == "accepted")
    stage = "accepted" if stage == "unheard" else stage
    bring(other, "again", 9, stage)
    complete(other, "again", 9, stage)
    again.wait(WAIT_S)
    assert again.context == b"first\0\0\0"
    assert (decode.memory[:, :COUNT] == 9).all()
    assert (decode.memory[:, COUNT:] == POISON).all()
    assert other.do("released", "again") == "sent"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_prefiller_that_goes_on_changes_no_page_in_use(
    decode: Decode, start: Callable[[], Prefill], stage: str
) -> None:
    prefiller = start()
    pages = list(range(COUNT))
    for round_ in range(int(os.environ.get("PUTGET_TRANSFER_ROUNDS", "1"))):
        name, value = f"r{round_}", 1 + round_ % 80
        receive = decode.ask(prefiller, name, pages)
        decode.poll_until(lambda receive=receive: receive.state == "accepted")
        bring(prefiller, name, value, stage)
        prefiller.signal(signal.SIGSTOP)
        # It goes on with this when it is continued.
        for words in (("begin", name, value, COUNT),) if stage == "accepted" else ():
            prefiller.say(*words)
        prefiller.say("layers", name, LAYERS)
        prefiller.say("finish", name)
        with pytest.raises(kv.ReceiveFailed):
            receive.wait(WAIT_S)
        assert decode.decoder.quarantined == 0
        decode.memory[...] = POISON
        prefiller.signal(signal.SIGCONT)
        for _ in range(3 if stage == "accepted" else 2):
            assert prefiller.answer() == "done"
        # Nothing of it is under way any more: its pages have come back.
        assert prefiller.do("released", name) in GIVEN_UP
        assert (decode.memory == POISON).all(), f"round {round_}: {np.count_nonzero(decode.memory != POISON)} bytes"
        # And it is served again at once.
        again = decode.ask(prefiller, f"again{round_}", pages)
        decode.poll_until(lambda again=again: again.state == "accepted")
        prefiller.do("begin", f"again{round_}", 100 + value, COUNT)
        complete(prefiller, f"again{round_}", 100 + value, "begun")
        again.wait(WAIT_S)
        assert (decode.memory[:, :COUNT] == 100 + value).all()


def test_other_requests_go_on_beside_a_stopped_prefiller(decode: Decode, start: Callable[[], Prefill]) -> None:
    stopped, other = start(), start()
    half = PAGES // 2
    assert half < COUNT
    receive = decode.ask(stopped, "r", list(range(COUNT)))
    decode.poll_until(lambda: receive.state == "accepted")
    stopped.signal(signal.SIGSTOP)
    sources = decode.decoder.sources([other.source])
    for at in range(20):
        name, own = f"other{at}", [COUNT + at % 4]
        going = decode.decoder.request(sources, name, [own], tokens=TOKENS)
        decode.poll_until(lambda going=going: going.state == "accepted")
        other.do("begin", name, 20 + at, 1)
        complete(other, name, 20 + at, "begun")
        going.wait(WAIT_S)
        assert (decode.memory[:, own] == 20 + at).all()
    with pytest.raises(kv.ReceiveFailed):
        receive.wait(WAIT_S)
