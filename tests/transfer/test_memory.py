"""Registered memory stays where it is; and the answer where nothing can keep it there."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0
LEN = 1 << 20
PROT_READ = mmap.PROT_READ
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@pytest.fixture(params=["sim", "host", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[pt.Engine, pt.Engine]]:
    network = pt.SimNetwork(seed=9)

    def build() -> pt.Engine:
        if request.param == "sim":
            group = pt.DeviceGroup.sim(network, 1)
        else:
            group = pt.DeviceGroup.host() if request.param == "host" else pt.DeviceGroup.tcp(["127.0.0.1"])
        return pt.Engine.builder().group(group).build()

    with build() as a, build() as b:
        yield a, b


def write(a: pt.Engine, desc: pt.MrDesc, length: int = LEN) -> None:
    source, _ = a.reg_mr(bytearray(b"\xaa" * length))
    a.submit_single_write(length, 1, (source, 0), (desc, 0), deadline_s=LONG_S).wait(LONG_S)


def is_refused(a: pt.Engine, desc: pt.MrDesc) -> bool:
    with pytest.raises(pt.TransferFailed) as caught:
        write(a, desc)
    [failure] = caught.value.failures
    return "is not registered (any more)" in failure.reason


RESIZES: dict[str, Callable[[torch.Tensor], object]] = {
    "storage.resize_(0)": lambda tensor: tensor.untyped_storage().resize_(0),
    "storage.resize_(more)": lambda tensor: tensor.untyped_storage().resize_(64 * LEN),
    "tensor.resize_(more)": lambda tensor: tensor.resize_(64 * LEN),
    "a view's storage": lambda tensor: tensor[16:32].untyped_storage().resize_(0),
    "as FSDP does it": lambda tensor: tensor._typed_storage()._resize_(0),  # type: ignore[no-untyped-call]
    "as torch.compile does it": lambda tensor: torch.ops.inductor.resize_storage_bytes_(tensor, 0),
    "out=": lambda tensor: torch.cat([tensor, tensor], out=tensor.new_empty(0).set_(tensor.untyped_storage())),
}


@pytest.mark.parametrize("what", RESIZES)
def test_a_registered_storage_cannot_be_resized(what: str, pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    tensor = torch.zeros(LEN, dtype=torch.uint8)
    handle, desc = b.reg_mr(tensor)
    # torch changes a tensor's shape before it finds that it cannot have the bytes.
    whole, place = tensor[:], tensor.data_ptr()
    with pytest.raises(RuntimeError, match="not resizable"):
        RESIZES[what](tensor)
    assert (tensor.data_ptr(), tensor.untyped_storage().nbytes()) == (place, LEN)
    write(a, desc)
    assert bool((whole == 0xAA).all())
    # Afterwards torch does as it likes.
    b.dereg_mr(handle)
    tensor.untyped_storage().resize_(0)
    others = [torch.zeros(LEN, dtype=torch.uint8) for _ in range(4)]
    assert is_refused(a, desc)
    assert not any(bool(other.any()) for other in others)


def test_a_storage_can_be_resized_again_once_all_its_registrations_have_ended() -> None:
    with pt.Engine.builder().group(pt.DeviceGroup.tcp(["127.0.0.1"])).build() as b:
        tensor = torch.zeros(LEN, dtype=torch.uint8)
        handles = [b.reg_mr(part)[0] for part in (tensor, tensor[:64], tensor.view(torch.int32))]
        for handle in handles:
            assert not tensor.untyped_storage().resizable()
            b.dereg_mr(handle)
        assert tensor.untyped_storage().resizable()
        # A storage that was never resizable stays so.
        numpy = torch.from_numpy(np.zeros(8))
        b.dereg_mr(b.reg_mr(numpy)[0])
        assert not numpy.untyped_storage().resizable()
        # A closed engine holds nothing.
        kept = b.reg_mr(tensor)
    del handles, kept
    gc.collect()
    assert tensor.untyped_storage().resizable()


@pytest.mark.parametrize("move", ["set_", "data", "deleted"])
def test_a_write_goes_where_the_storage_was_when_a_tensor_takes_another(
    move: str, pair: tuple[pt.Engine, pt.Engine]
) -> None:
    a, b = pair
    tensor = torch.zeros(LEN, dtype=torch.uint8)
    old = tensor.untyped_storage()
    place = tensor.data_ptr()
    handle, desc = b.reg_mr(tensor)
    if move == "set_":
        tensor.set_(torch.zeros(LEN, dtype=torch.uint8).untyped_storage())
    elif move == "data":
        tensor.data = torch.zeros(LEN, dtype=torch.uint8)
    else:
        del old, tensor
    gc.collect()
    others = [torch.zeros(LEN, dtype=torch.uint8) for _ in range(4)]
    write(a, desc)
    assert not any(bool(other.any()) for other in others)
    assert (handle.address, handle.read(LEN - 2, 2)) == (place, b"\xaa\xaa")
    if move != "deleted":
        assert not bool(tensor.any())
        assert bytes(old[:2]) == b"\xaa\xaa"


def into_shared_memory(tensor: torch.Tensor) -> object:
    return tensor.share_memory_()  # type: ignore[no-untyped-call]


def numpy_that_does_not_look(array: np.ndarray[Any, Any]) -> object:
    array.resize(64 * LEN, refcheck=False)
    return array


@pytest.mark.parametrize("move", [into_shared_memory, numpy_that_does_not_look])
def test_memory_that_moves_all_the_same_ends_its_registration(
    move: Callable[[Any], object], pair: tuple[pt.Engine, pt.Engine]
) -> None:
    a, b = pair
    memory: Any = torch.zeros(LEN, dtype=torch.uint8)
    if move is numpy_that_does_not_look:
        memory = np.zeros(LEN, dtype=np.uint8)
    handle, desc = b.reg_mr(memory)
    move(memory)
    others = [torch.zeros(LEN, dtype=torch.uint8) for _ in range(4)]
    assert is_refused(a, desc)
    assert not any(bool(other.any()) for other in others)
    with pytest.raises(ValueError, match="its memory has moved"):
        handle.read(0, 1)
    with pytest.raises(ValueError, match="src: its memory has moved"):
        b.submit_single_write(1, None, (handle, 0), (desc, 0))
    b.dereg_mr(handle)
    _kept, again = b.reg_mr(memory)
    write(a, again, 64)


# Far from where the kernel puts new mappings, so that no other thread's memory takes a place that was given up here.
PLACES = itertools.count(0x1000_0000_0000, 2 * LEN)
MAP_FIXED_NOREPLACE = 0x100000


def mapped(rights: int = 3) -> int:
    """Map fresh memory that nobody keeps, at addresses that are used once."""
    place = next(PLACES)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    assert libc.mmap(place, LEN, rights, flags, -1, 0) == place
    return place


UNDER: dict[str, Callable[[int], Any]] = {
    "address": lambda address: address,
    "ctypes": lambda address: (ctypes.c_char * LEN).from_address(address),
    "numpy": lambda address: np.frombuffer(
        memoryview((ctypes.c_char * LEN).from_address(address)).cast("B"), dtype=np.uint8
    ),
    "tensor": lambda address: torch.frombuffer((ctypes.c_char * LEN).from_address(address), dtype=torch.uint8),
    "memoryview": lambda address: memoryview((ctypes.c_char * LEN).from_address(address)),
}


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("gone", ["munmap", "mprotect"])
def test_a_write_to_memory_that_has_gone_ends_no_process(
    gone: str, under: str, pair: tuple[pt.Engine, pt.Engine]
) -> None:
    a, b = pair
    address = mapped()
    memory = UNDER[under](address)
    handle, desc = b.reg_mr(memory, LEN) if under == "address" else b.reg_mr(memory)
    write(a, desc)
    if gone == "munmap":
        libc.munmap(address, LEN)
    else:
        libc.mprotect(address, LEN, PROT_READ)
    assert is_refused(a, desc)
    _kept, good = b.alloc_mr(LEN)
    write(a, good)
    b.dereg_mr(handle)


@pytest.mark.parametrize("under", UNDER)
def test_memory_that_cannot_be_written_to_is_refused_as_a_target(under: str, pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    address = mapped()
    ctypes.memset(address, 0x55, LEN)
    libc.mprotect(address, LEN, PROT_READ)
    memory = UNDER[under](address)
    length = LEN if under == "address" else None
    with pytest.raises(ValueError, match=r"^memory: .*cannot be written"):
        b.reg_mr(memory, length)
    check_source(a, b, memory, length)


NOT_WRITABLE: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"\x55" * LEN,
    "memoryview": lambda: memoryview(bytearray(b"\x55" * LEN)).toreadonly(),
    "numpy": lambda: np.broadcast_to(np.full(LEN, 0x55, dtype=np.uint8), (LEN,)),
    "mmap": lambda: mmap.mmap(-1, LEN, prot=PROT_READ),
}


@pytest.mark.parametrize(("memory", "kind"), [(None, "NoneType"), ([1, 2], "list"), (1.5, "float")])
def test_an_object_that_is_no_memory_is_named(memory: Any, kind: str, pair: tuple[pt.Engine, pt.Engine]) -> None:
    with pytest.raises(TypeError, match=f"memory: {kind} came; an address, a tensor or a buffer is needed"):
        pair[0].reg_mr(memory)


@pytest.mark.parametrize("kind", NOT_WRITABLE)
def test_a_buffer_that_is_not_writable_is_refused_as_a_target(kind: str, pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    memory = NOT_WRITABLE[kind]()
    with pytest.raises(ValueError, match="a writable, contiguous buffer is needed"):
        b.reg_mr(memory)
    with pytest.raises(ValueError, match="a writable, contiguous buffer is needed"):
        b.reg_mrs([bytearray(8), memory])
    check_source(a, b, memory, None, b"\0" if kind == "mmap" else b"\x55")


def check_source(a: pt.Engine, b: pt.Engine, memory: Any, length: int | None, first: bytes = b"\x55") -> None:
    handle, desc = b.reg_mr(memory, length, read_only=True)
    there, there_desc = a.alloc_mr(LEN)
    b.submit_single_write(LEN, None, (handle, 0), (there_desc, 0)).wait(LONG_S)
    assert there.read(LEN - 1, 1) == first
    there.write(LEN - 1, b"\1")
    a.submit_read(LEN, None, (desc, 0), (there, 0)).wait(LONG_S)
    assert there.read(LEN - 1, 1) == first
    # Peers' writes are refused by the key, and this engine's own reads at once.
    assert is_refused(a, desc)
    with pytest.raises(ValueError, match="dst: memory that was registered read-only came"):
        b.submit_read(8, None, (there_desc, 0), (handle, 0))
    with pytest.raises(ValueError, match="read-only"):
        handle.write(0, b"x")
    assert handle.read(LEN - 1, 1) == first


FAULT = """
import ctypes, mmap, sys, threading
import putget_transfer as pt
import torch

group = pt.DeviceGroup.host if sys.argv[1] == "host" else lambda: pt.DeviceGroup.tcp(["127.0.0.1"])
a, b = (pt.Engine.builder().group(group()).build() for _ in range(2))
source, _ = a.alloc_mr(16 << 20)
source.write(0, b"\\xaa" * (16 << 20))
stop = False

def write(desc):
    while not stop:
        transfer = a.submit_single_write(16 << 20, None, (source, 0), (desc, 0))
        try:
            transfer.wait(60)
        except pt.TransferFailed:
            pass

for _ in range(10):
    tensor = torch.zeros(16 << 20, dtype=torch.uint8)
    handle, desc = b.reg_mr(tensor)
    stop, writer = False, threading.Thread(target=write, args=[desc])
    writer.start()
    refused = 0
    for _ in range(200):
        try:
            tensor.untyped_storage().resize_(0)
        except RuntimeError:
            refused += 1
    b.dereg_mr(handle)
    tensor.untyped_storage().resize_(0)
    other = torch.zeros(16 << 20, dtype=torch.uint8)
    stop = True
    writer.join()
    assert (refused, bool(other.any())) == (200, False)
print("alive")
"""


@pytest.mark.parametrize("network", ["host", "tcp"])
def test_resizes_while_a_peer_writes_touch_no_other_tensor(network: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FAULT, network], capture_output=True, text=True, timeout=10 * LONG_S, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "alive\n", "")
