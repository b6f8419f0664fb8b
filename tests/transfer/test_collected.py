"""An engine whose callbacks refer to its owner goes with its owner."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0


class Owner:
    """Has an engine, and is what the engine calls back."""

    def __init__(self, hold: Callable[[Owner], object]) -> None:
        builder = pt.Engine.builder().group(pt.DeviceGroup.tcp(["127.0.0.1"]))
        if hold is peer_events:
            builder = builder.on_peer_event(self.called)
        self.engine = builder.build()
        self.handle, self.desc = self.engine.alloc_mr(64)
        self.calls: list[object] = []
        self.kept = hold(self)

    def called(self, *arguments: object) -> None:
        self.calls.append(arguments)


def nothing(_owner: Owner) -> None:
    """The engine has no callback."""


def peer_events(owner: Owner) -> pt.Transfer:
    connected = owner.engine.add_peer_group([owner.engine.main_address()], deadline_s=LONG_S)[1]
    connected.wait(LONG_S)
    return connected


def receives(owner: Owner) -> None:
    owner.engine.submit_recvs(64, 2, owner.called)
    owner.engine.submit_send(owner.engine.main_address(), b"text", deadline_s=LONG_S).wait(LONG_S)


def watched_word(owner: Owner) -> pt.UvmWatcher:
    return owner.engine.alloc_uvm_watcher(owner.called)


def done_of_an_expectation(owner: Owner) -> pt.Transfer:
    return owner.engine.expect_imm_count(1, 1, deadline_s=1e9, done=owner.called)


def callback_of_a_transfer(owner: Owner) -> pt.Transfer:
    waits = owner.engine.expect_imm_count(1, 1, deadline_s=1e9)
    waits.add_done_callback(owner.called)
    return waits


def done_of_a_write_that_waits(owner: Owner) -> object:
    word = owner.engine.alloc_uvm_watcher()
    prepared = owner.engine.prepare_writes([(8, (owner.handle, 0), (owner.desc, 0))])
    return word, owner.engine.submit_when(word, 1, prepared, None, deadline_s=1e9, done=owner.called)


def reserved_immediates(owner: Owner) -> pt.ImmRange:
    owner.engine.submit_recvs(64, 2, owner.called)
    return owner.engine.reserve_imms("owner", None, 4)


def refused_submission(owner: Owner) -> None:
    with pytest.raises(ValueError, match="src"):
        owner.engine.submit_single_write(65, None, (owner.handle, 0), (owner.desc, 0), done=owner.called)
    with pytest.raises(ValueError, match="len"):
        owner.engine.submit_recvs(0, 1, owner.called)


def an_unfinished_builder(owner: Owner) -> pt.Builder:
    return pt.Engine.builder().on_peer_event(owner.called)


def threads() -> set[str]:
    """The numbers of this process's threads. An earlier test's own may end at any time."""
    return set(os.listdir("/proc/self/task"))


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "hold",
    [
        nothing,
        peer_events,
        receives,
        watched_word,
        done_of_an_expectation,
        callback_of_a_transfer,
        done_of_a_write_that_waits,
        reserved_immediates,
        refused_submission,
        an_unfinished_builder,
    ],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_threads_and_files_of_dropped_owners_go(hold: Callable[[Owner], object]) -> None:
    gc.collect()
    before, files_before = threads(), files()
    owners = [Owner(hold) for _ in range(3)]
    own = threads() - before
    assert len(own) >= 3
    gone = [weakref.ref(owner) for owner in owners]
    # An owner that is still used keeps its engine and its callbacks.
    gc.collect()
    engine, handle, desc = owners[0].engine, owners[0].handle, owners[0].desc
    engine.submit_single_write(8, None, (handle, 0), (desc, 0)).wait(LONG_S)
    del owners, engine, handle, desc
    end = time.monotonic() + LONG_S
    # Objects that another test left may go, too. A callback that is just returning may hold an owner a moment longer.
    while any(one() is not None for one in gone) or own & threads() or files() > files_before:
        assert time.monotonic() < end, ([one() for one in gone], own & threads(), files(), files_before)
        gc.collect()
        time.sleep(0.01)


def test_a_callback_is_called_as_long_as_somebody_has_its_engine() -> None:
    owner = Owner(nothing)
    owner.engine.submit_recvs(64, 2, owner.called)
    engine, calls = owner.engine, owner.calls
    told: list[object] = []
    waits = engine.expect_imm_count(1, 1, deadline_s=LONG_S, done=told.append)
    del owner
    gc.collect()
    engine.submit_send(engine.main_address(), b"text", deadline_s=LONG_S).wait(LONG_S)
    engine.close()
    with pytest.raises(pt.EngineClosed):
        waits.result()
    assert [arguments[1] for arguments in calls] == [b"text"]  # type: ignore[index]
    assert [type(error) for error in told] == [pt.EngineClosed]
