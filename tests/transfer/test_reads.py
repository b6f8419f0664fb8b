"""Reads, long messages and callback threads from Python."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0


def build(group: pt.DeviceGroup) -> pt.Engine:
    return pt.Engine.builder().group(group).callback_threads(2).build()


@pytest.fixture(params=["sim", "host", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[pt.Engine, pt.Engine]]:
    network = pt.SimNetwork(seed=3)
    groups = {
        "sim": lambda: pt.DeviceGroup.sim(network, 2),
        "host": lambda: pt.DeviceGroup.host(),
        "tcp": lambda: pt.DeviceGroup.libfabric("tcp", ["127.0.0.1"]),
    }
    group = groups[request.param]
    with build(group()) as a, build(group()) as b:
        yield a, b


def test_reads_bring_bytes_and_the_peer_counts(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    source = np.random.default_rng(1).integers(0, 255, 300_000, dtype=np.uint8)
    target = np.zeros(300_000, np.uint8)
    (_src, desc), (dst, _) = b.reg_mr(source), a.reg_mr(target)
    a.submit_read(200_000, 4, (desc, 10), (dst, 33)).wait(LONG_S)
    assert (target[33:200_033] == source[10:200_010]).all()
    assert not target[:33].any()
    assert not target[200_033:].any()
    pages = pt.Pages(np.arange(19, -1, -1), 1000)
    a.submit_paged_reads(1000, 4, (desc, pages), (dst, pt.Pages(range(20), 1000))).wait(LONG_S)
    assert (target[:20_000].reshape(20, 1000) == source[:20_000].reshape(20, 1000)[::-1]).all()
    items = [(100, (desc, 5), (dst, 250_000)), (50, (desc, 900), (dst, 260_000))]
    a.submit_reads(4, items).wait(LONG_S)
    assert (target[250_000:250_100] == source[5:105]).all()
    assert (target[260_000:260_050] == source[900:950]).all()
    a.submit_prepared(a.prepare_reads(items), 4).wait(LONG_S)
    a.submit_prepared(a.prepare_paged_reads(1000, (desc, pages), (dst, pages)), 4).wait(LONG_S)
    b.expect_imm_count(4, 5, deadline_s=LONG_S).wait(LONG_S)
    for mistake, matched in [((200, (desc, 299_900), (dst, 0)), "src"), ((200, (desc, 0), (dst, 299_900)), "dst")]:
        with pytest.raises(ValueError, match=matched):
            a.submit_read(mistake[0], None, mistake[1], mistake[2])
    with pytest.raises(ValueError, match=r"src: .*, -1\) came"):
        a.submit_read(1, None, (desc, -1), (dst, 0))


def test_long_messages_say_who_sent_them(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    received: queue.Queue[tuple[pt.NetAddr, bytes]] = queue.Queue()
    b.submit_recvs(1 << 20, 2, lambda sender, data: received.put((sender, data)), pool=5, per_peer=1)
    for length in (0, 70_000, 1 << 20):
        message = bytes(range(256)) * (length // 256) + bytes(length % 256)
        a.submit_send(b.main_address(), message, pool=5, deadline_s=LONG_S).wait(LONG_S)
        sender, data = received.get(timeout=LONG_S)
        assert sender == a.main_address()
        assert data == message
    with pytest.raises(pt.TransferFailed, match="1048576 bytes"):
        a.submit_send(b.main_address(), bytes((1 << 20) + 1), pool=5).wait(LONG_S)


def test_a_wait_is_not_behind_a_callback_of_somebody_else(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    (src, _), (_dst, desc) = a.alloc_mr(8), b.alloc_mr(8)
    gate, entered = threading.Event(), threading.Semaphore(0)

    def slow(_error: BaseException | None) -> None:
        entered.release()
        gate.wait(LONG_S)

    busy = [a.submit_single_write(8, None, (src, 0), (desc, 0), done=slow) for _ in range(2)]
    for _ in busy:
        assert entered.acquire(timeout=LONG_S)
    # Both threads that call Python are taken.
    a.submit_single_write(8, None, (src, 0), (desc, 0)).wait(LONG_S)
    told: queue.Queue[BaseException | None] = queue.Queue()
    a.submit_single_write(8, None, (src, 0), (desc, 0), done=told.put).wait(LONG_S)
    assert told.empty()
    gate.set()
    assert told.get(timeout=LONG_S) is None
