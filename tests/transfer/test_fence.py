"""The fence from Python: whom it shuts out, and what ends with it."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0
PAGE = 64 << 10


def sim() -> Callable[[], pt.DeviceGroup]:
    network = pt.SimNetwork(seed=7)
    return lambda: pt.DeviceGroup.sim(network, 1)


def tcp() -> Callable[[], pt.DeviceGroup]:
    return lambda: pt.DeviceGroup.tcp(["127.0.0.1"])


def as_libfabric() -> Callable[[], pt.DeviceGroup]:
    return lambda: pt.DeviceGroup.libfabric("tcp", ["127.0.0.1"])


def may_land(write: pt.Transfer) -> bool:
    """Wait for a write; say whether it failed and may still land."""
    try:
        write.wait(LONG_S)
    except pt.TransferFailed as error:
        return any(failure.may_land for failure in error.failures)
    return False


@pytest.mark.parametrize("network", [sim, tcp, as_libfabric])
def test_after_a_fence_the_memory_is_the_owners(network: Callable[[], Callable[[], pt.DeviceGroup]]) -> None:
    group = network()
    events: queue.Queue[tuple[str, str | None]] = queue.Queue()
    noting = pt.Engine.builder().group(group()).on_peer_event(lambda peer, why: events.put((peer, why)))
    with pt.Engine.builder().group(group()).build() as a, noting.build() as b:
        target = bytearray(PAGE)
        (src, _), (_dst, desc) = a.reg_mr(bytearray(b"\xaa" * PAGE)), b.reg_mr(target)
        writes = [a.submit_single_write(PAGE, 1, (src, 0), (desc, 0), deadline_s=LONG_S) for _ in range(200)]
        b.expect_imm_count(1, 3, deadline_s=LONG_S).wait(LONG_S)
        assert events.get(timeout=LONG_S) == (a.name, None)
        b.fence(a.main_address()).wait(LONG_S)
        assert events.get(timeout=LONG_S) == (a.name, "this engine has fenced it")
        target[:] = b"\x5c" * PAGE
        count = b.imm_count(1)
        assert not any(may_land(write) for write in writes)
        assert events.empty()
        assert bytes(target) == b"\x5c" * PAGE
        assert b.imm_count(1) == count


@pytest.mark.parametrize("network", [sim, tcp])
def test_a_fenced_peer_stays_out_until_it_is_admitted(network: Callable[[], Callable[[], pt.DeviceGroup]]) -> None:
    group = network()
    with pt.Engine.builder().group(group()).build() as a, pt.Engine.builder().group(group()).build() as b:
        (src, _), (dst, desc) = a.reg_mr(bytearray(b"\xaa" * PAGE)), b.alloc_mr(PAGE)
        own = b.desc_for(dst, a.main_address())

        def write(to: pt.MrDesc) -> None:
            a.submit_single_write(PAGE, 1, (src, 0), (to, 0), deadline_s=LONG_S).wait(LONG_S)

        write(desc)
        write(own)
        b.expect_imm_count(1, 2, deadline_s=LONG_S).wait(LONG_S)
        before = time.time()
        b.fence(a.main_address()).wait(LONG_S)
        for _ in range(3):
            with pytest.raises(pt.Fenced, match=r"it fenced this engine \d+\.\d{3} s ago") as fenced:
                write(desc)
            (failure,) = fenced.value.failures
            assert failure.peer == b.name
            assert failure.fenced_at is not None
            assert before - 1 < failure.fenced_at < time.time() + 1
        assert b.imm_count(1) == 2
        b.admit(a.main_address())
        write(desc)
        b.expect_imm_count(1, 3, deadline_s=LONG_S).wait(LONG_S)
        assert b.imm_count(1) == 3
        # Its own keys are void for good.
        with pytest.raises(pt.TransferFailed, match="not registered"):
            write(own)
        write(b.desc_for(dst, a.main_address()))


def test_the_builder_says_who_comes_back() -> None:
    group = sim()
    with pytest.raises(ValueError, match=r'who: "always" came; "asked", "lost" and "auto" are allowed'):
        pt.Engine.builder().readmit("always")
    builder = pt.Engine.builder().group(group()).readmit("auto")
    with pt.Engine.builder().group(group()).build() as a, builder.build() as b:
        (src, _), (_dst, desc) = a.reg_mr(bytearray(PAGE)), b.alloc_mr(PAGE)
        a.submit_single_write(PAGE, 1, (src, 0), (desc, 0)).wait(LONG_S)
        b.expect_imm_count(1, 1, deadline_s=LONG_S).wait(LONG_S)
        b.fence(a.main_address()).wait(LONG_S)
        came_back = False
        while not came_back:
            # The first ones may have been given before the fence was known.
            with contextlib.suppress(pt.Fenced):
                a.submit_single_write(PAGE, 1, (src, 0), (desc, 0)).wait(LONG_S)
                came_back = True
        b.expect_imm_count(1, 2, deadline_s=LONG_S).wait(LONG_S)


def test_mistakes_and_those_who_were_never_there() -> None:
    group = sim()
    with pt.Engine.builder().group(group()).build() as a, pt.Engine.builder().group(tcp()()).build() as elsewhere:
        for call in (a.fence, a.admit, lambda peer: a.desc_for(a.alloc_mr(8)[0], peer)):
            with pytest.raises(ValueError, match="peer"):
                call(elsewhere.main_address())
            with pytest.raises(ValueError, match="peer: this engine's own address came"):
                call(a.main_address())
        flag = pt.Flag()
        with pt.Engine.builder().group(group()).build() as b:
            transfer = a.fence(b.main_address(), done=flag)
        transfer.wait(LONG_S)
        assert (flag.pending, flag.failed) == (0, 0)
        address = a.main_address()
    with pytest.raises(pt.EngineClosed):
        a.fence(address)


def test_a_refused_key_over_tcp_costs_no_other_write() -> None:
    group = tcp()
    with pt.Engine.builder().group(group()).build() as a, pt.Engine.builder().group(group()).build() as b:
        src, _ = a.reg_mr(bytearray(PAGE))
        (_kept, kept), (ended, stale) = b.alloc_mr(PAGE), b.alloc_mr(PAGE)
        b.dereg_mr(ended)
        others = [a.submit_single_write(PAGE, 1, (src, 0), (kept, 0), deadline_s=LONG_S) for _ in range(50)]
        with pytest.raises(pt.TransferFailed, match="not registered") as refused:
            a.submit_single_write(PAGE, 1, (src, 0), (stale, 0), deadline_s=LONG_S).wait(LONG_S)
        assert not refused.value.failures[0].may_land
        for other in others:
            other.wait(LONG_S)
        b.expect_imm_count(1, 50, deadline_s=LONG_S).wait(LONG_S)
        assert b.imm_count(1) == 50
