"""KV caches: decoders and receives that are dropped in a full engine, in a fork, and where there is no thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt
from putget_transfer import kv

WAIT_S = 60.0
FULL_S = 20.0
"""How long the engine is full: a message waits for longer."""
POOL = 77
"""Nobody receives there."""


class Full:
    """A request, and an engine in which nothing else can be under way."""

    def __init__(self) -> None:
        network = pt.SimNetwork(5)

        def cache(builder: pt.Builder) -> tuple[pt.Engine, kv.KvCache]:
            engine = builder.group(pt.DeviceGroup.sim(network, 1)).build()
            pages = np.zeros([16, 8, 32], dtype=np.uint8)
            return engine, kv.KvCache(
                engine, {"layer": pages}, layout="BNC", page_tokens=8, num_kv_heads=1, packed=False
            )

        self.prefill_engine, source = cache(pt.Engine.builder())
        self.decode_engine, target = cache(pt.Engine.builder().max_submissions(2))
        self.prefiller, self.decoder = kv.Prefiller(source), kv.Decoder(target, max_requests=4)
        self.sources = self.decoder.sources([self.prefiller.source()])
        self.receive = self.decoder.request(self.sources, "r", [[0, 1]], tokens=16)
        end = time.monotonic() + WAIT_S
        while self.receive.state == "asked":
            assert time.monotonic() < end
            time.sleep(0.001)
        address = self.prefill_engine.main_address()
        send = self.decode_engine.submit_send
        self.sends = [send(address, b"x", pool=POOL, deadline_s=FULL_S) for _ in range(2)]

    def is_full(self) -> bool:
        return not any(send.done() for send in self.sends)


@pytest.fixture
def full() -> Iterator[Full]:
    full = Full()
    yield full
    full.prefill_engine.close()
    full.decode_engine.close()


def test_a_decoder_is_dropped_at_once_where_the_engine_is_full(full: Full) -> None:
    del full.receive, full.decoder
    assert full.is_full()
    full.prefill_engine.close()


def test_the_interpreter_goes_on_while_a_dropped_receive_waits(full: Full) -> None:
    asking, dropping = threading.Event(), threading.Event()

    def ask() -> None:
        asking.set()
        full.decoder.request(full.sources, "s", [[2, 3]], tokens=16)

    def drop() -> None:
        dropping.set()
        del full.receive

    threads = [threading.Thread(target=target) for target in (ask, drop)]
    for thread, begins in zip(threads, (asking, dropping), strict=True):
        thread.start()
        assert begins.wait(WAIT_S)
        for _ in range(20):
            time.sleep(0.01)
    assert full.is_full()
    full.prefill_engine.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


COMMON = """
import gc, os, resource, signal, sys, threading, time, weakref
import numpy as np
import putget_transfer as pt
from putget_transfer import kv

network = pt.SimNetwork(5)

def cache(builder):
    engine = builder.group(pt.DeviceGroup.sim(network, 1)).build()
    pages = np.zeros([16, 8, 32], dtype=np.uint8)
    options = {"layout": "BNC", "page_tokens": 8, "num_kv_heads": 1, "packed": False}
    return engine, pages, kv.KvCache(engine, {"layer": pages}, **options)

def in_a_fork(act):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it, if it waits for a lock
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

prefill_engine, sent, source = cache(pt.Engine.builder())
decode_engine, found, target = cache(pt.Engine.builder().max_submissions(2))
prefiller, decoder = kv.Prefiller(source), kv.Decoder(target, max_requests=4, confirm_s=3600)
sources = decoder.sources([prefiller.source()])
receives = [decoder.request(sources, "r", [[0, 1]], tokens=16)]
while receives[0].state == "asked":
    time.sleep(0.001)
"""

RECEIVE_IN_A_FORK = """
for _ in range(2):
    decode_engine.submit_send(prefill_engine.main_address(), b"x", pool=77, deadline_s=600)
# This one has the decoder's lock while it waits for room.
asking = threading.Thread(target=lambda: decoder.request(sources, "s", [[2, 3]], tokens=16))
asking.start()
time.sleep(0.3)
print("child", in_a_fork(receives.clear))
prefill_engine.close()
decode_engine.close()
asking.join()
"""


def run(script: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMMON + script, *arguments],
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
        check=False,
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    return ran.stdout


def test_a_receive_that_is_dropped_in_a_fork_waits_for_no_lock_of_its_parent() -> None:
    assert run(RECEIVE_IN_A_FORK) == "child 0\n"


WITHOUT_A_THREAD = """
if sys.argv[1] == "silent":
    del prefiller
found = weakref.ref(found)
del target
if os.getuid() == 0:
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    threading.Thread(target=time.sleep, args=(0,)).start()
except RuntimeError:
    receives.clear()
    del decoder
    end = time.monotonic() + (60 if sys.argv[1] == "answers" else 0.5)
    while found() is not None and time.monotonic() < end:
        decode_engine.metrics_text()
        time.sleep(0.01)
    print("held" if found() is not None else "given back")
else:
    print("there are threads")
prefill_engine.close()
decode_engine.close()
"""


@pytest.mark.parametrize(("source", "memory"), [("silent", "held"), ("answers", "given back")])
def test_a_dropped_decoder_without_a_thread_keeps_its_memory_until_sources_answer(source: str, memory: str) -> None:
    said = run(WITHOUT_A_THREAD, source)
    if said == "there are threads\n":
        pytest.skip("this system does not limit a user's threads")
    assert said == f"{memory}\n"
