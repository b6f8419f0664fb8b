"""Memory that an engine still uses lives on (tests/native/held_engine.c); each thread has words of its own."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import putget
from putget.group import networks
from tests.harness import Rank, run_ranks
from tests.protocol.tags import ROOT
from tests.protocol.test_engine_library import HEADER, library
from tests.protocol.transports import INVALID, End, Write, eventually

PATIENCE_S = 60.0
SHORT_S = 0.5  # for a close that does not wait, though it should


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ctypes.CDLL:
    """The engine that networks load."""
    code = (ROOT / "tests" / "native" / "held_engine.c").read_text()
    path = library(tmp_path, "held_engine", code, f"-I{HEADER.parent}", "-pthread")
    monkeypatch.setattr(networks, "engine_library", lambda: str(path))
    return ctypes.CDLL(str(path))


def close_with_a_write_under_way(rank: Rank, engine: ctypes.CDLL, over: threading.Event) -> tuple[bool, bool]:
    """A body: rank 0 misses rank 1, goes on alone and closes; whether that waits for its write, and then ends."""
    a2a = rank.all_to_all(timeout_s=5.0, warmup_timeout_s=PATIENCE_S)
    ids, ones = torch.tensor([[0, 2]], dtype=torch.int32), torch.ones(1, 2)
    a2a.dispatch(ids, ones, torch.ones(1, 4))
    a2a.combine()
    if rank.rank == 1:
        assert over.wait(PATIENCE_S)
        a2a.close()
        return True, True
    engine.held_begin()
    with pytest.raises(putget.PeerTimeout):
        a2a.dispatch(ids, ones, torch.ones(1, 4))
    eventually("nothing is under way", lambda: engine.held_count() > 0)
    a2a.set_active_ranks([True, False])
    closing = threading.Thread(target=a2a.close)
    closing.start()
    closing.join(SHORT_S)
    waits = closing.is_alive()
    if waits:
        engine.held_end()
    over.set()
    closing.join(PATIENCE_S)
    return waits, not closing.is_alive()


def test_an_object_lives_until_its_writes_are_over(engine: ctypes.CDLL) -> None:
    """Also where a change of the active ranks has ended the part that they are of: they count in its memory."""
    network = putget.Network("tcp", domain_size=1)
    over = threading.Event()
    closed = run_ranks(2, close_with_a_write_under_way, engine, over, mode="thread", network=network)
    assert closed == [(True, True)] * 2


def close_with_a_write_that_is_never_over(rank: Rank, engine: ctypes.CDLL, misses: bool) -> str:
    """A body: rank 0 closes while a write is under way, of its last round or of one in which it misses rank 1."""
    a2a = rank.all_to_all(timeout_s=1.0, warmup_timeout_s=PATIENCE_S)
    ids, ones = torch.tensor([[0, 2]], dtype=torch.int32), torch.ones(1, 2)
    a2a.dispatch(ids, ones, torch.ones(1, 4))
    rank.meet()
    if rank.rank == 0:
        engine.held_begin()
    a2a.combine()
    rank.meet()
    told = ""
    if rank.rank == 0:
        if misses:
            with pytest.raises(putget.PeerTimeout):
                a2a.dispatch(ids, ones, torch.ones(1, 4))
        try:
            a2a.close()
        except putget.PeerTimeout as error:
            told = f"{error.phase} {error.missing}"
        told += f", {engine.live_regions(0)} regions live"
    rank.meet()
    a2a.close()
    return told


@pytest.mark.timed
@pytest.mark.parametrize(("misses", "told"), [(False, "close (1,)"), (True, "")])
def test_closing_ends_at_the_deadline(
    engine: ctypes.CDLL, misses: bool, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the rank, unless a call has; sources of the writes live on until these are over."""
    caplog.set_level(logging.CRITICAL, "putget")  # records would keep errors, and errors the ranks' frames
    network = putget.Network("tcp", domain_size=1)
    body, timeout = close_with_a_write_that_is_never_over, 30.0
    found = run_ranks(2, body, engine, misses, mode="thread", network=network, timeout=timeout)
    assert found == [f"{told}, 2 regions live", ""]
    engine.held_end()
    gc.collect()  # the ranks' networks end
    run_ranks(1, lambda rank: rank.all_to_all().close(), mode="thread")
    assert engine.live_regions(0) == 0


def exit_code(child: int) -> int:
    """That of a child, which is killed if it does not end."""
    found: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            found.append(os.waitstatus_to_exitcode(status))
        return bool(pid)

    try:
        eventually("the child has not ended", has_ended)
    finally:
        if not found:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return found[0]


@pytest.mark.timed
def test_a_forked_child_leaves_kept_memory_alone(engine: ctypes.CDLL, caplog: pytest.LogCaptureFixture) -> None:
    """It has none of the threads that its parent's networks would end."""
    caplog.set_level(logging.CRITICAL, "putget")
    network = putget.Network("tcp", domain_size=1)
    run_ranks(2, close_with_a_write_that_is_never_over, engine, False, mode="thread", network=network, timeout=30.0)
    del network
    engine.held_end()
    gc.collect()
    child = os.fork()
    if child == 0:
        try:
            run_ranks(1, lambda rank: rank.all_to_all().close(), mode="thread", timeout=PATIENCE_S)
            os._exit(0)
        finally:
            os._exit(1)
    assert exit_code(child) == 0


@pytest.mark.usefixtures("engine")
def test_words_are_those_of_the_threads_own_call() -> None:
    """The thread that steps proxies may fail in a write while the rank's own thread sets up."""
    end = End(networks.EngineNetwork(0, 2, "tcp", ("127.0.0.1",), b"secret"), 0)
    write = Write(size=ctypes.sizeof(Write), target=5)

    def fail() -> str:
        assert end.table.write(end.table.self, ctypes.byref(write)) == INVALID
        return str(end.table.error(end.table.self).decode())

    assert end.table.remove_region(end.table.self, 7) == INVALID
    with ThreadPoolExecutor(1) as stepper:
        assert stepper.submit(fail).result(PATIENCE_S) == "no such target or sender"
    assert end.table.error(end.table.self) == b"no such region"
