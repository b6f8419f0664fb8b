"""The C ABI of putget_probe.h: kernels that measure a machine. The only module here that loads a shared library."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_double, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

from putget import BackendUnavailable, PutgetError, Workspace

ABI_VERSION = 3
MAGIC = 0x70757467
MAX_RANKS = 128
MAX_PROBED_RANKS = 32  # by probes of rows
DEVICES = ("cpu", "cuda")
WRITE, READ, SEND = range(3)
_INVALID, _UNAVAILABLE = 1, 2


class _Versioned(Structure):
    """Starts with its size and a magic number. A number that does not fit is refused: ctypes would take its low bits.

    Raises:
        ValueError: A value does not fit; the message names the field.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(size=ctypes.sizeof(self), magic=MAGIC, **values)
        for name, value in values.items():
            if isinstance(value, int) and (getattr(self, name) or 0) != value:
                raise ValueError(
                    f"{name} is {value}, which does not fit into {8 * getattr(type(self), name).size} bits"
                )


class ProbeMemory(_Versioned):
    """``putget_probe_memory``."""

    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("ep_size", c_uint32),
        ("ep_rank", c_uint32),
        ("num_bytes", c_uint64),
        ("base", c_void_p * MAX_RANKS),
    ]


class CopyArgs(_Versioned):
    """``putget_probe_copy_args``."""

    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("kind", c_uint32),
        ("num_sms", c_uint32),
        ("bytes_per_peer", c_uint64),
        ("stream", c_void_p),
    ]


class RowsArgs(_Versioned):
    """``putget_probe_rows_args``."""

    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("kind", c_uint32),
        ("slots_by", c_uint32),
        ("slots", c_void_p),
        ("rows", c_void_p),
        ("out", c_void_p),
        ("state", c_void_p),
        ("stream", c_void_p),
        ("offset", c_uint64),
        ("num_tokens", c_uint32),
        ("row_bytes", c_uint32),
        ("first_slot", c_uint32),
        ("slots_of_rank", c_uint32),
        ("num_rows", c_void_p),
        ("landing", c_uint64),
        ("blocks", c_uint32),
        ("threads", c_uint32),
        ("segment_bytes", c_uint32),
        ("splits", c_uint32),
        ("senders", c_uint32),
        ("reserved", c_uint32),
    ]


class DomainsArgs(_Versioned):
    """``putget_probe_domains_args``."""

    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("scheme", c_uint32),
        ("ep_size", c_uint32),
        ("domain_size", c_uint32),
        ("num_experts", c_uint32),
        ("top_k", c_uint32),
        ("num_tokens", c_uint32),
        ("row_bytes", c_uint32),
        ("back_row_bytes", c_uint32),
        ("private_tokens", c_uint32),
        ("chunk_rows", c_uint32),
        ("seed", c_uint64),
        ("first_write_ns", c_uint64),
        ("in_domain_ns", c_uint64),
        ("latency_ns", c_uint64),
        ("post_ns", c_uint64),
        ("write_ns", c_uint64),
        ("bytes_per_ns", c_double),
        ("dispatch_ns", POINTER(c_uint64)),
        ("combine_ns", POINTER(c_uint64)),
        ("dispatch_bytes", c_uint64),
        ("combine_bytes", c_uint64),
        ("dispatch_writes", c_uint64),
        ("combine_writes", c_uint64),
    ]


_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "putget_probe_abi_version": ([], c_uint32),
    "putget_probe_last_error": ([], ctypes.c_char_p),
    "putget_probe_flag_bytes": ([c_uint32], c_uint64),
    "putget_probe_load": ([POINTER(ProbeMemory)], ctypes.c_int),
    "putget_probe_copy": ([POINTER(ProbeMemory), POINTER(CopyArgs)], ctypes.c_int),
    "putget_probe_rows": ([POINTER(ProbeMemory), POINTER(RowsArgs)], ctypes.c_int),
    "putget_probe_domains": ([POINTER(DomainsArgs)], ctypes.c_int),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the library of probes.

    Raises:
        BackendUnavailable: It is not there, or of another version.
    """
    path = Path(__file__).with_name("libputget_probe.so")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailable(f"cannot load putget's library of probes {path}: {error}") from error
    for name, (argtypes, restype) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = argtypes, restype
    version = loaded.putget_probe_abi_version()
    if version != ABI_VERSION:
        raise BackendUnavailable(f"{path} has ABI version {version}, this package needs {ABI_VERSION}")
    return loaded


def call(function: str, *arguments: Any) -> None:
    """Calls a function that returns a status.

    Raises:
        ValueError: An argument was refused; the message names it.
        BackendUnavailable: This machine or build lacks something.
        PutgetError: The operating system or the driver refused.
    """
    status = getattr(library(), function)(*arguments)
    if status == 0:
        return
    words = library().putget_probe_last_error().decode(errors="replace")
    raise {_INVALID: ValueError, _UNAVAILABLE: BackendUnavailable}.get(status, PutgetError)(words)


def memory_of(workspace: Workspace) -> ProbeMemory:
    """A workspace as probes take it; their kernels are loaded.

    Raises:
        PutgetError: As ``call``.
    """
    comm, device = workspace.comm, workspace.device
    memory = ProbeMemory(
        device=DEVICES.index(device.type),
        ordinal=device.index or 0,
        ep_size=comm.size,
        ep_rank=comm.rank,
        num_bytes=workspace.num_bytes,
    )
    for rank in range(comm.size):
        memory.base[rank] = workspace.memory.address(rank)
    call("putget_probe_load", ctypes.byref(memory))
    return memory


def current_stream(device: torch.device) -> int | None:
    """The stream that work is enqueued on; None on the CPU, where it runs at once."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else None
