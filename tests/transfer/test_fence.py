"""The fence from Python: whom it shuts out, and what ends with it."""

from __future__ import annotations

import queue
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
        if events.empty():
            assert bytes(target) == b"\x5c" * PAGE
            assert b.imm_count(1) == count


def test_mistakes_and_those_who_were_never_there() -> None:
    group = sim()
    with pt.Engine.builder().group(group()).build() as a, pt.Engine.builder().group(tcp()()).build() as elsewhere:
        with pytest.raises(ValueError, match="peer"):
            a.fence(elsewhere.main_address())
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
