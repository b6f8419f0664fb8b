"""KV caches between processes: a decoder that is killed, or stopped and goes on, at each stage of a request.

The prefiller's pages come back in every case, and the decoder never takes for its own what is computed into them later.
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
import putget_transfer as pt
from putget_transfer import kv
from tests.transfer import kv_prefiller
from tests.transfer.kv_prefiller import LAYERS, TOKENS
from tests.transfer.kv_process import WAIT_S, Decoder

LATER = 0x5C
"""The value that is computed into pages after they have come back."""
COUNT = 40
"""Pages of a request."""


class Prefiller:
    """The prefill rank, in the test's process."""

    def __init__(self, network: str) -> None:
        self.engine = kv_prefiller.engine(network)
        self.memory, cache = kv_prefiller.cache(self.engine)
        self.prefiller = kv.Prefiller(cache, lease_s=3600)
        self.source = self.prefiller.source().hex()
        self.step, self.ends = 0, dict[str, list[str]]()

    def begin(self, name: str, value: int) -> None:
        self.step += 1
        self.memory[:, :COUNT] = value
        self.prefiller.begin_step(self.step, [(name, COUNT * TOKENS, [list(range(COUNT))])])

    def complete(self, name: str) -> None:
        self.prefiller.layer_done(LAYERS - 1)
        self.prefiller.finish(name, b"first")

    def bring(self, name: str, value: int, stage: str) -> None:
        """Bring a request's prefill to a stage."""
        if stage != "accepted":
            self.begin(name, value)
        if stage in ("layers", "computed"):
            self.prefiller.layer_done(1 if stage == "layers" else LAYERS - 1)

    def end(self, name: str) -> list[str]:
        """Wait until a request's pages come back; return all ends that were told of it."""
        limit = time.monotonic() + WAIT_S
        while name not in self.ends:
            for other, end in self.prefiller.poll():
                self.ends.setdefault(other, []).append(end)
            assert time.monotonic() < limit, f"the pages of {name} have not come back"
            time.sleep(0.001)
        return self.ends[name]

    def serve(self, decoder: Decoder, name: str, value: int) -> None:
        """Have a decoder ask, and serve it."""
        decoder.do("ask", name, self.source, COUNT)
        self.begin(name, value)
        self.complete(name)
        assert decoder.do("end", name) == f"arrived [{value}]"
        assert self.end(name) == ["sent"]


@pytest.fixture(params=["tcp", "host"])
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prefill(network: str) -> Iterator[Prefiller]:
    prefill = Prefiller(network)
    yield prefill
    prefill.engine.close()


@pytest.fixture
def start(network: str) -> Iterator[Callable[[], Decoder]]:
    started: list[Decoder] = []

    def one() -> Decoder:
        started.append(Decoder(network))
        return started[-1]

    yield one
    for process in started:
        process.end()


@pytest.mark.parametrize("stage", ["accepted", "begun", "layers", "computed"])
def test_a_killed_decoder_gives_the_pages_back(prefill: Prefiller, start: Callable[[], Decoder], stage: str) -> None:
    doomed, other = start(), start()
    doomed.do("ask", "r", prefill.source, COUNT)
    doomed.do("accepted", "r")
    prefill.bring("r", 7, stage)
    doomed.signal(signal.SIGKILL)
    if stage == "accepted":
        prefill.begin("r", 7)
    prefill.complete("r")
    assert prefill.end("r") == ["cancelled"]
    prefill.serve(other, "other", LATER)
    assert prefill.end("r") == ["cancelled"]
    assert 'requests_total{end="failed"} 1' in prefill.prefiller.metrics_text()
    assert 'requests_total{end="sent"} 1' in prefill.prefiller.metrics_text()
    assert prefill.prefiller.drain()


@pytest.mark.parametrize("stage", ["begun", "computed"])
def test_a_stopped_decoder_that_goes_on_takes_no_page_that_is_used_again(
    prefill: Prefiller, start: Callable[[], Decoder], stage: str
) -> None:
    decoder = start()
    for round_ in range(int(os.environ.get("PUTGET_TRANSFER_ROUNDS", "1"))):
        name, value = f"r{round_}", 1 + round_ % 80
        decoder.do("ask", name, prefill.source, COUNT)
        decoder.do("accepted", name)
        decoder.signal(signal.SIGSTOP)
        prefill.begin(name, value)
        if stage == "computed":
            prefill.prefiller.layer_done(LAYERS - 1)
        prefill.complete(name)
        assert prefill.end(name) == ["cancelled"]
        prefill.memory[...] = LATER
        decoder.signal(signal.SIGCONT)
        # It may have had all bytes in its network's buffers. Then they are the right ones.
        assert decoder.do("end", name).startswith(("failed", f"arrived [{value}]"))
        assert (prefill.memory == LATER).all(), np.count_nonzero(prefill.memory != LATER)
        # And it is served again at once.
        prefill.serve(decoder, f"again{round_}", 100 + value)


def test_a_cancel_that_meets_a_failure_ends_each_side_once(prefill: Prefiller, start: Callable[[], Decoder]) -> None:
    decoder = start()
    for round_ in range(int(os.environ.get("PUTGET_TRANSFER_ROUNDS", "20"))):
        name = f"r{round_}"
        decoder.do("ask", name, prefill.source, COUNT)
        decoder.do("accepted", name)
        prefill.bring(name, 7, "layers")
        decoder.say("cancel", name)
        prefill.prefiller.fail(name, "the batch was too large")
        assert decoder.answer() == "done"
        assert decoder.do("end", name).startswith("failed")
        assert prefill.end(name) == ["failed"]
    prefill.serve(decoder, "last", 9)
    assert all(len(ends) == 1 for ends in prefill.ends.values())


def test_another_secret_is_refused_at_the_first_message(network: str) -> None:
    def engine(secret: bytes) -> pt.Engine:
        group = pt.DeviceGroup.host(1) if network == "host" else pt.DeviceGroup.tcp(["127.0.0.1"])
        return pt.Engine.builder().group(group).secret(secret).connect_timeout(5.0).build()

    with engine(b"one") as own, engine(b"another") as stranger, engine(b"one") as friend:
        memory, cache = kv_prefiller.cache(own)
        memory[...] = 7
        prefiller = kv.Prefiller(cache)
        for side, arrives in ((stranger, False), (friend, True)):
            pages, target = kv_prefiller.cache(side)
            decoder = kv.Decoder(target)
            receive = decoder.request(decoder.sources([prefiller.source()]), "r", [[3, 4]], tokens=8)
            if not arrives:
                with pytest.raises(kv.ReceiveFailed, match="secret"):
                    receive.wait(WAIT_S)
                assert decoder.quarantined == 0
                assert not pages.any()
                continue
            prefiller.begin_step(1, [("r", 8, [[1, 2]])])
            prefiller.layer_done(LAYERS - 1)
            prefiller.finish("r")
            receive.wait(WAIT_S)
            assert (pages[:, [3, 4]] == 7).all()
