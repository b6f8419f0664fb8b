"""Tables of putget_transport.h for tests: both ends of each network that fills one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

from putget import _abi
from putget.group.networks import EngineNetwork, LocalNetwork, NativeNetwork

OK, INVALID, FULL, LOST, SYSTEM = range(5)
LONG_S = 60.0


class Write(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("imm", c_uint32),
        ("region", c_uint32),
        ("target", c_uint32),
        ("src_offset", c_uint64),
        ("dst_offset", c_uint64),
        ("bytes", c_uint64),
        ("over", POINTER(c_uint64)),
    ]


_function = ctypes.CFUNCTYPE
_Bytes = (POINTER(c_uint8), POINTER(c_uint64))


class Table(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("version", c_uint32),
        ("reserved", c_uint32),
        ("most_bytes", c_uint64),
        ("self", c_void_p),
        ("add_region", _function(c_int, c_void_p, c_void_p, c_uint64, c_int32, POINTER(c_uint32))),
        ("describe_region", _function(c_int, c_void_p, c_uint32, *_Bytes)),
        ("address", _function(c_int, c_void_p, *_Bytes)),
        ("add_peer", _function(c_int, c_void_p, POINTER(c_uint8), c_uint64, POINTER(c_uint32))),
        ("add_target", _function(c_int, c_void_p, c_uint32, POINTER(c_uint8), c_uint64, POINTER(c_uint32))),
        ("counter_word", _function(c_int, c_void_p, c_uint32, POINTER(POINTER(c_uint64)))),
        ("write", _function(c_int, c_void_p, POINTER(Write))),
        ("remove_region", _function(c_int, c_void_p, c_uint32)),
        ("error", _function(c_char_p, c_void_p)),
    ]


def eventually(what: str, holds: Callable[[], bool]) -> None:
    """Looks until it holds."""
    end = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0)


class Over:
    """A word that counts writes that are over."""

    def __init__(self) -> None:
        self.word = c_uint64(0)

    @property
    def over(self) -> int:
        return self.word.value & 0xFFFFFFFF

    @property
    def failed(self) -> int:
        return self.word.value >> 32


class End:
    """One rank's table, with what ctypes needs around its functions."""

    def __init__(self, network: NativeNetwork, rank: int) -> None:
        self.network = network
        found = c_void_p()
        _abi.call("putget_network_transport", network.handle, rank, ctypes.byref(found))
        self.table = ctypes.cast(found, POINTER(Table)).contents

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self.table, name)(self.table.self, *args)
        assert status == OK, f"{name}: {status}: {self.error()}"

    def error(self) -> str:
        words: bytes = self.table.error(self.table.self)
        return words.decode()

    def add_region(self, memory: bytearray) -> int:
        start = (c_uint8 * len(memory)).from_buffer(memory)
        region = c_uint32()
        self._call("add_region", ctypes.addressof(start), len(memory), -1, ctypes.byref(region))
        return region.value

    def remove_region(self, region: int) -> None:
        self._call("remove_region", region)

    def bytes_of(self, name: str, *args: int) -> bytes:
        """The bytes of `address` or `describe_region`; a call without room says how many they are."""
        length = c_uint64(0)
        status = getattr(self.table, name)(self.table.self, *args, None, ctypes.byref(length))
        assert status == INVALID
        assert length.value > 0
        place = (c_uint8 * length.value)()
        self._call(name, *args, place, ctypes.byref(length))
        return bytes(place)

    def add_peer(self, address: bytes) -> int:
        peer = c_uint32()
        place = (c_uint8 * len(address)).from_buffer_copy(address)
        self._call("add_peer", place, len(address), ctypes.byref(peer))
        return peer.value

    def add_target(self, peer: int, description: bytes) -> int:
        target = c_uint32()
        place = (c_uint8 * len(description)).from_buffer_copy(description)
        self._call("add_target", peer, place, len(description), ctypes.byref(target))
        return target.value

    def target_at(self, other: End, region: int) -> int:
        """The target for a region of the other end."""
        return self.add_target(self.add_peer(other.bytes_of("address")), other.bytes_of("describe_region", region))

    def counter(self, imm: int) -> Callable[[], int]:
        word = POINTER(c_uint64)()
        self._call("counter_word", imm, ctypes.byref(word))
        return lambda: int(word.contents.value)

    def try_write(
        self, over: Over, imm: int, target: int, length: int = 0, at: tuple[int, int, int] = (0, 0, 0)
    ) -> int:
        """One write; ``at``: region, offsets of source and destination. The status."""
        region, src, dst = at
        write = Write(ctypes.sizeof(Write), imm, region, target, src, dst, length, ctypes.pointer(over.word))
        return int(self.table.write(self.table.self, ctypes.byref(write)))

    def write(self, over: Over, imm: int, target: int, length: int = 0, at: tuple[int, int, int] = (0, 0, 0)) -> None:
        """One write that is taken, at once or once there is room."""
        status = FULL
        while status == FULL:
            status = self.try_write(over, imm, target, length, at)
        assert status == OK, self.error()


def two_ends(kind: str) -> tuple[End, End]:
    """Ends of ranks 0 and 1 of a network: "local", or a provider of the transfer engine."""
    if kind == "local":
        network = LocalNetwork(2)
        return End(network, 0), End(network, 1)
    nics = ("127.0.0.1",) if kind == "tcp" else ()
    first, second = (EngineNetwork(rank, 2, kind, nics, b"secret of this test") for rank in range(2))
    return End(first, 0), End(second, 1)
