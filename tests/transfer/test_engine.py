"""The Python interface of the transfer engine, over the simulated network."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0
LOST_S = 5.0
"""The silence after which a peer is lost: a living one may get no processor for seconds."""


def threads() -> set[str]:
    """The numbers of this process's threads. An earlier test's own may end at any time."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.fixture
def network() -> pt.SimNetwork:
    return pt.SimNetwork(seed=5)


def build(network: pt.SimNetwork, nics: int = 2) -> pt.Engine:
    return pt.Engine.builder().group(pt.DeviceGroup.sim(network, nics)).build()


@pytest.fixture
def pair(network: pt.SimNetwork) -> Iterator[tuple[pt.Engine, pt.Engine]]:
    with build(network) as a, build(network) as b:
        yield a, b


def test_a_write_between_buffers_is_awaited(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    source, target = bytearray(range(256)) * 1024, bytearray(300_000)
    (src, _), (_dst, desc) = a.reg_mr(source), b.reg_mr(target)

    async def transfer() -> None:
        arrived = b.expect_imm_count(3, 1, deadline_s=LONG_S)
        await a.submit_single_write(len(source), 3, (src, 0), (desc, 17))
        await asyncio.wait_for(asyncio.ensure_future(_as_task(arrived)), LONG_S)

    asyncio.run(transfer())
    assert target[17 : 17 + len(source)] == source
    assert b.imm_count(3) == 1


async def _as_task(transfer: pt.Transfer) -> None:
    await transfer


def test_tensors_arrays_and_allocations(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    tensor, array = torch.arange(1000, dtype=torch.int32), np.zeros(1000, dtype=np.int32)
    (src, _), (dst, desc) = a.reg_mr(tensor), b.reg_mr(array)
    assert (len(src), len(dst), len(desc), desc.device, desc.num_nics) == (4000, 4000, 4000, "cpu", 2)
    a.submit_single_write(4000, None, (src, 0), (desc, 0)).wait(LONG_S)
    assert (torch.from_numpy(array) == tensor).all()
    own, own_desc = b.alloc_mr(64)
    own.write(8, b"abc")
    assert own.read(7, 5) == b"\0abc\0"
    assert own_desc.peer == b.name == b.main_address().peer
    address, _ = b.reg_mr(own.address, 64)
    assert address.address == own.address


def test_pages_scatter_and_barrier(network: pt.SimNetwork, pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    src, own = a.alloc_mr(4096)
    src.write(0, bytes(range(256)) * 16)
    dst, desc = b.alloc_mr(4096)
    pages = a.submit_paged_writes(100, 1, (src, pt.Pages([3, 0], 100)), (desc, pt.Pages([1, 7], 200, offset=4)))
    pages.wait(LONG_S)
    assert dst.read(204, 100) == src.read(300, 100)
    assert dst.read(1404, 100) == src.read(0, 100)
    group, connected = a.add_peer_group([a.main_address(), b.main_address()], deadline_s=LONG_S)
    connected.wait(LONG_S)
    assert len(group) == 2
    dsts = [pt.ScatterDst(10, 0, (desc, 4000)), pt.ScatterDst(10, 10, (own, 4000))]
    a.submit_scatter(group, 2, src, dsts).wait(LONG_S)
    a.submit_barrier(group, 2, [desc, own]).wait(LONG_S)
    for engine in (a, b):
        engine.expect_imm_count(2, 2, deadline_s=LONG_S).wait(LONG_S)
    assert (dst.read(4000, 10), src.read(4000, 10)) == (bytes(range(10)), bytes(range(10, 20)))
    with build(network) as stranger, pytest.raises(ValueError, match="not in the group"):
        a.submit_barrier(group, 2, [stranger.alloc_mr(8)[1]])


def test_messages(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    received: queue.Queue[tuple[str, bytes]] = queue.Queue()
    b.submit_recvs(64, 2, lambda sender, data: received.put((sender.peer, data)))
    sent = [a.submit_send(b.main_address(), f"{number}".encode(), deadline_s=LONG_S) for number in range(50)]
    for transfer in sent:
        transfer.wait(LONG_S)
    found = [received.get(timeout=LONG_S) for _ in range(50)]
    assert sorted(found) == sorted((a.name, f"{number}".encode()) for number in range(50))
    with pytest.raises(pt.TransferFailed, match="64 bytes") as caught:
        a.submit_send(b.main_address(), bytes(65)).wait(LONG_S)
    [failure] = caught.value.failures
    assert (failure.peer, failure.nic, failure.may_land) == (b.name, 0, False)
    with pytest.raises(ValueError, match="bytes: "):
        a.submit_send(b.main_address(), bytes(a.max_message() + 1))
    buffers = (bytearray(b"bytearray"), memoryview(b"_view_")[1:5], np.arange(3, dtype=np.uint8)[::2])
    for data in buffers:
        a.submit_send(b.main_address(), data, deadline_s=LONG_S).wait(LONG_S)
    assert {received.get(timeout=LONG_S)[1] for _ in buffers} == {b"bytearray", b"view", b"\0\2"}
    with pytest.raises(ValueError, match="data: str came; bytes or another buffer is needed"):
        a.submit_send(b.main_address(), "text")  # type: ignore[arg-type]


def test_callbacks_and_flags(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    (src, _), (_dst, desc) = a.alloc_mr(8), b.alloc_mr(8)
    told: queue.Queue[BaseException | None] = queue.Queue()
    flag = pt.Flag()
    a.submit_single_write(8, None, (src, 0), (desc, 0), done=told.put).wait(LONG_S)
    assert told.get(timeout=LONG_S) is None
    transfers = [a.submit_single_write(8, None, (src, 0), (desc, 0), done=flag) for _ in range(10)]
    for transfer in transfers:
        transfer.wait(LONG_S)
        assert transfer.done()
        transfer.result()
    assert (flag.pending, flag.failed) == (0, 0)
    late = b.expect_imm_count(9, 5, deadline_s=0.01, done=told.put)
    with pytest.raises(pt.CountMissed, match="0 of 5"):
        late.wait(LONG_S)
    assert isinstance(told.get(timeout=LONG_S), pt.CountMissed)
    late.add_done_callback(told.put)
    assert isinstance(told.get(timeout=LONG_S), pt.CountMissed)
    assert "imm" not in repr(late)


def test_a_transfer_says_how_long_it_has_been_over(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    (src, _), (_dst, desc) = a.alloc_mr(8), b.alloc_mr(8)
    counted = b.expect_imm_count(9, 1, deadline_s=LONG_S)
    assert counted.seconds_since_end is None
    begin = time.perf_counter()
    a.submit_single_write(8, 9, (src, 0), (desc, 0)).wait(LONG_S)
    counted.wait(LONG_S)
    first, second = counted.seconds_since_end, counted.seconds_since_end
    assert first is not None
    assert second is not None
    assert 0 <= first < second < time.perf_counter() - begin


def test_a_lost_peer_and_a_cancelled_transfer(network: pt.SimNetwork) -> None:
    events: queue.Queue[tuple[str, str | None]] = queue.Queue()
    builder = pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).heartbeat(0.05, LOST_S).grace(0.2)
    a = builder.on_peer_event(lambda peer, down: events.put((peer, down))).build()
    b = build(network, 1)
    (src, _), (_dst, desc) = a.alloc_mr(8), b.alloc_mr(8)
    a.submit_single_write(8, None, (src, 0), (desc, 0)).wait(LONG_S)
    assert events.get(timeout=LONG_S) == (b.name, None)
    network.kill(b.main_address())
    stuck = a.submit_single_write(8, None, (src, 0), (desc, 0), deadline_s=LONG_S)
    with pytest.raises(TimeoutError):
        stuck.wait(0.0)
    assert stuck.cancel()
    with pytest.raises(pt.TransferFailed, match="cancelled"):
        stuck.wait(LONG_S)
    assert not stuck.cancel()
    name, reason = events.get(timeout=LONG_S)
    assert name == b.name
    assert reason is not None
    a.close()
    b.close()


def test_descriptors_travel(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, _ = pair
    _handle, desc = a.alloc_mr(8)
    address = a.main_address()
    assert pt.MrDesc.from_bytes(desc.to_bytes()) == desc == pickle.loads(pickle.dumps(desc))
    assert pt.NetAddr.from_bytes(address.to_bytes()) == address == pickle.loads(pickle.dumps(address))
    assert len({address, *a.addresses()}) == 2
    for wrong in (b"", b"PTMR", desc.to_bytes()[:-1], address.to_bytes()):
        with pytest.raises(ValueError, match="data: "):
            pt.MrDesc.from_bytes(wrong)


def test_mistakes_are_value_errors(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    (src, _), (_dst, desc) = a.alloc_mr(8), b.alloc_mr(8)
    with pytest.raises(ValueError, match="src: bytes 1 to 9 came; the region has 8"):
        a.submit_single_write(8, None, (src, 1), (desc, 0))
    with pytest.raises(ValueError, match="deadline_s: -1"):
        a.submit_single_write(8, None, (src, 0), (desc, 0), deadline_s=-1)
    with pytest.raises(ValueError, match="done: "):
        a.submit_single_write(8, None, (src, 0), (desc, 0), done=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="writable"):
        a.reg_mr(b"read-only")
    with pytest.raises(ValueError, match="contiguous"):
        a.reg_mr(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="length: 9 came; the memory has 8"):
        a.reg_mr(bytearray(8), 9)
    with pytest.raises(ValueError, match="length: None"):
        a.reg_mr(4096)
    with pytest.raises(ValueError, match="device: 'cuda:1' came; the memory is on 'cpu'"):
        a.reg_mr(bytearray(8), device="cuda:1")
    with pytest.raises(ValueError, match="device: "):
        a.reg_mr(4096, 8, "tpu")
    with pytest.raises(ValueError, match="device: Cuda"):
        a.reg_mr(4096, 8, "cuda:1")
    with pytest.raises(ValueError, match="group: none"):
        pt.Engine.builder().build()


def test_registered_memory_outlives_its_names(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    source = bytearray(b"x" * 4096)
    src, _ = a.reg_mr(source)
    with pytest.raises(BufferError):
        source.extend(b"more")
    (_dst, desc) = b.alloc_mr(4096)
    written = a.submit_single_write(4096, None, (src, 0), (desc, 0))
    del src
    gc.collect()
    written.wait(LONG_S)
    handle, _ = a.reg_mr(source)
    a.dereg_mr(handle)
    with pytest.raises(ValueError, match="registration has ended"):
        handle.read(0, 1)


def test_a_word_is_hot_only_while_steps_run(pair: tuple[pt.Engine, pt.Engine]) -> None:
    _, b = pair
    seen: queue.Queue[tuple[int, int]] = queue.Queue()
    watcher = b.alloc_uvm_watcher(lambda old, new: seen.put((old, new)), pace_us=20)
    watcher.store(1)
    assert seen.get(timeout=LONG_S) == (0, 1)
    for pace_us in (None, 0, 500):
        watcher.set_pace(pace_us)
        watcher.store(2)
        assert seen.get(timeout=LONG_S) == (1, 2)
        watcher.pause()
        watcher.store(3)
        watcher.store(1)
        watcher.store(4)
        watcher.set_pace(20)
        assert seen.get(timeout=LONG_S) == (2, 4)
        watcher.store(1)
        assert seen.get(timeout=LONG_S) == (4, 1)
    assert seen.empty()


def test_a_hot_word_starts_writes_while_python_holds_its_lock(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    source, target = bytearray(b"in time!"), bytearray(8)
    (src, _), (_dst, desc) = a.reg_mr(source), b.reg_mr(target)
    word = a.alloc_uvm_watcher(pace_us=50)
    prepared = a.prepare_writes([(8, (src, 0), (desc, 0))])
    waiting = a.submit_when(word, 1, prepared, 9, deadline_s=LONG_S)
    # PyDLL, other than CDLL, keeps the lock during a call, and the interpreter gives it to no other thread meanwhile.
    sleep, before = ctypes.PyDLL(None).usleep, sys.getswitchinterval()
    try:
        sys.setswitchinterval(1000)
        word.store(1)
        for _ in range(int(LONG_S * 1000)):
            if target == source:
                break
            sleep(1000)
    finally:
        sys.setswitchinterval(before)
    assert target == source
    waiting.wait(LONG_S)


def test_watchers_mirrors_resets_and_metrics(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    seen: queue.Queue[tuple[int, int]] = queue.Queue()
    watcher = b.alloc_uvm_watcher(lambda old, new: seen.put((old, new)))
    watcher.store(3)
    assert seen.get(timeout=LONG_S) == (0, 3)
    assert watcher.address % 4096 == 0
    words, desc = b.alloc_mr(64)
    b.mirror_imm(1, words, 8)
    a.submit_barrier(None, 1, [desc]).wait(LONG_S)
    b.expect_imm_count(1, 1, deadline_s=LONG_S).wait(LONG_S)
    assert words.load_word(8) == 1
    b.submit_reset_imm(1, [a.main_address()], deadline_s=LONG_S).wait(LONG_S)
    assert (b.imm_count(1), words.load_word(8)) == (0, 0)
    b.unmirror_imm(1)
    assert "putget_transfer_immediates_total 1" in b.metrics_text()
    assert b.reset_imm(1) == 0


def test_only_the_secret_connects(network: pt.SimNetwork) -> None:
    def make(secret: bytes) -> pt.Engine:
        return pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).secret(secret).build()

    with make(b"one") as a, make(b"one") as b, make(b"two") as c:
        a.add_peer_group([b.main_address()])[1].wait(LONG_S)
        with pytest.raises(pt.TransferFailed, match="secret"):
            a.add_peer_group([c.main_address()])[1].wait(LONG_S)


def test_libfabric_has_the_same_interface() -> None:
    def make() -> pt.Engine:
        return pt.Engine.builder().group(pt.DeviceGroup.libfabric("tcp", ["127.0.0.1"])).build()

    try:
        a, b = make(), make()
    except pt.Unavailable as error:
        pytest.skip(str(error))
    source, target = bytearray(b"over tcp"), bytearray(8)
    (src, _), (_dst, desc) = a.reg_mr(source), b.reg_mr(target)
    a.submit_single_write(8, 1, (src, 0), (desc, 0)).wait(LONG_S)
    b.expect_imm_count(1, 1, deadline_s=LONG_S).wait(LONG_S)
    assert target == source
    a.close()
    b.close()
    with pytest.raises(pt.Unavailable, match="libfabric"):
        pt.Engine.builder().group(pt.DeviceGroup.libfabric("carrier_pigeon", [None])).build()


@pytest.mark.parametrize("old_name", [False, True])
def test_ranks_of_one_host_need_no_library(old_name: bool) -> None:
    def make() -> pt.Engine:
        group = pt.DeviceGroup.libfabric("shm", [None]) if old_name else pt.DeviceGroup.host()
        return pt.Engine.builder().group(group).build()

    with make() as a, make() as b:
        source, target = bytearray(os.urandom(200_000)), bytearray(200_000)
        (src, _), (_dst, desc) = a.reg_mr(source), b.reg_mr(target)
        (own, _), (ended, old) = a.alloc_mr(100), b.alloc_mr(100)
        a.submit_single_write(200_000, 1, (src, 0), (desc, 0)).wait(LONG_S)
        b.expect_imm_count(1, 1, deadline_s=LONG_S).wait(LONG_S)
        assert target == source
        b.dereg_mr(ended)
        with pytest.raises(pt.TransferFailed, match="not registered"):
            a.submit_single_write(100, 2, (own, 0), (old, 0)).wait(LONG_S)
        a.submit_single_write(100, 1, (own, 0), (desc, 50)).wait(LONG_S)
        b.expect_imm_count(1, 2, deadline_s=LONG_S).wait(LONG_S)
        assert target == source[:50] + bytes(100) + source[150:]
    with pytest.raises(ValueError, match="nics"):
        pt.Engine.builder().group(pt.DeviceGroup.host(0)).build()


def test_verbs_says_what_is_missing() -> None:
    with pytest.raises(pt.Unavailable, match="verbs"):
        pt.Engine.builder().group(pt.DeviceGroup.verbs(["carrier_pigeon"])).build()
    with pytest.raises(ValueError, match=r"device: .*mlx5_0:PORT"):
        pt.Engine.builder().group(pt.DeviceGroup.verbs(["mlx5_0:port"])).build()


def test_an_engine_ends_with_its_last_name(network: pt.SimNetwork) -> None:
    before = threads()
    engine = build(network)
    own = threads() - before
    assert own
    del engine
    gc.collect()
    end = time.monotonic() + LONG_S
    while own & threads():  # Linux may still show one that has been joined
        assert time.monotonic() < end
        time.sleep(0.001)
    closed = build(network)
    closed.close()
    closed.close()
    with pytest.raises(pt.EngineClosed):
        closed.main_address()
    assert repr(closed) == "<Engine closed>"


def test_a_callback_may_close_its_engine(network: pt.SimNetwork) -> None:
    engine = build(network)
    closed = threading.Event()

    def close(_error: BaseException | None) -> None:
        engine.close()
        closed.set()

    engine.expect_imm_count(1, 0, done=close)
    assert closed.wait(LONG_S)


def test_a_program_ends_without_closing() -> None:
    program = (
        "import putget_transfer as pt\n"
        "network = pt.SimNetwork()\n"
        "engine = pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build()\n"
        "engine.expect_imm_count(1, 1, done=lambda error: print(type(error).__name__))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "EngineClosed\n", "")
