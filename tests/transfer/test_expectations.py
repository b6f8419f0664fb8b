"""Expectations with names, ranges of immediates, bounded submissions, and the C functions in the wheel, from Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0


@pytest.fixture
def network() -> pt.SimNetwork:
    return pt.SimNetwork(seed=9)


def build(network: pt.SimNetwork) -> pt.Engine:
    return pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build()


@pytest.fixture
def pair(network: pt.SimNetwork) -> Iterator[tuple[pt.Engine, pt.Engine]]:
    with build(network) as a, build(network) as b:
        yield a, b


def test_an_expectation_is_cancelled(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    waiting = b.expect_imm_count(4, 1, deadline_s=LONG_S, senders=[a.main_address()])
    assert waiting.cancel()
    with pytest.raises(pt.CountMissed, match="0 of 1 arrived before it was cancelled") as caught:
        waiting.wait(LONG_S)
    assert caught.value.missing == [a.name]
    assert not waiting.cancel()


def test_a_sender_that_leaves_is_named_at_once(network: pt.SimNetwork) -> None:
    with build(network) as target:
        sender = build(network)
        name = sender.name
        _memory, desc = target.alloc_mr(64)
        sender.submit_barrier(None, 1, [desc])
        target.expect_imm_count(1, 1, deadline_s=LONG_S).wait(LONG_S)
        waiting = target.expect_imm_count(1, 2, deadline_s=LONG_S, senders=[sender.main_address()])
        sender.close()
        with pytest.raises(pt.CountMissed, match=f"1 of 2 arrived before a sender went down.*{name}") as caught:
            waiting.wait(LONG_S / 2)
        assert caught.value.missing == [name]


def test_arrivals_are_taken(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    _memory, desc = b.alloc_mr(64)
    for _ in range(3):
        arrived = b.expect_imm_count(5, 1, deadline_s=LONG_S, take=True)
        a.submit_barrier(None, 5, [desc]).wait(LONG_S)
        arrived.wait(LONG_S)
        assert b.imm_count(5) == 0


def test_ranges_have_one_owner(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, _ = pair
    kv = a.reserve_imms("kv", 100, 50)
    assert (kv.owner, kv.first, len(kv), kv.imm(49)) == ("kv", 100, 50, 149)
    with pytest.raises(ValueError, match='149 to 158 came; 100 to 149 belong to "kv"'):
        a.reserve_imms("weights", 149, 10)
    with pytest.raises(ValueError, match="50 came"):
        kv.imm(50)
    assert a.reserve_imms("nodes", None, 10).first >= 150
    kv.release()
    kv.release()
    with pytest.raises(ValueError, match="released"):
        len(kv)
    assert a.reserve_imms("weights", 149, 10).first == 149


def test_submissions_are_bounded(network: pt.SimNetwork) -> None:
    with build(network) as target:
        _memory, desc = target.alloc_mr(64)
        for wait in (False, True):
            builder = pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).max_submissions(2, wait=wait)
            with builder.build() as source:
                network.cut(source.main_address(), target.main_address())
                under_way = [source.submit_barrier(None, 6, [desc], deadline_s=LONG_S) for _ in range(2)]
                with pytest.raises(pt.EngineBusy, match="2 operations"):
                    source.submit_barrier(None, 6, [desc], deadline_s=0.05)
                # A thread that waits for room leaves the interpreter to others.
                healer = threading.Timer(0.2, network.heal, (source.main_address(), target.main_address()))
                healer.start()
                if wait:
                    under_way.append(source.submit_barrier(None, 6, [desc], deadline_s=LONG_S))
                for transfer in under_way:
                    transfer.wait(LONG_S)
                healer.join()
    with pytest.raises(ValueError, match="max_submissions"):
        pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).max_submissions(0).build()


def test_the_package_has_the_c_functions() -> None:
    header = (Path(pt.include()) / "putget_transfer.h").read_text()
    library = ctypes.CDLL(pt.library())
    assert f"#define PT_ABI_VERSION {library.pt_abi_version()}\n" in header
    network = ctypes.c_void_p()
    assert library.pt_network_create(ctypes.c_uint64(3), ctypes.byref(network)) == 0
    library.pt_network_destroy(network)
    library.pt_last_error.restype = ctypes.c_char_p
    assert library.pt_engine_create(None, ctypes.byref(network)) == 1
    assert b"null" in library.pt_last_error()
