"""The C ABI of putget.h, putget_moe.h, putget_domains.h and putget_balancer.h. The only module that loads a library."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from putget import config
from putget.errors import BackendUnavailable, PutgetError

ABI_VERSION = 21
MAGIC = 0x70757467
MAX_RANKS = 128
MAX_TOP_K = 32
MAX_PARTS = 256  # blocks of one kernel
MAX_PAYLOADS = 8
MAX_ROW_BYTES = 1 << 26
MAX_TOKENS = (1 << 22) - 1  # of one rank
MAX_MEMORY_BYTES = 1 << 46
MAX_SMS = 1 << 16
MAX_STATS = 1 << 16  # numbers that a rank tells in a dispatch
MAX_ROWS = (1 << 31) - 1  # around experts
RANK_WORDS = MAX_RANKS // 32

OK, INVALID, UNAVAILABLE, SYSTEM, FAULT = range(5)
DEVICE_CPU, DEVICE_CUDA = range(2)
FAULT_NONE, FAULT_PEER_TIMEOUT, FAULT_CAPACITY, FAULT_MISUSE, FAULT_INTERRUPTED = range(5)
MISUSE_NO_OPEN_ROUND, MISUSE_TOKEN_COUNT, MISUSE_PEER_RELEASED, MISUSE_NOT_STARTED, MISUSE_NOT_FINISHED = range(1, 6)
MISUSE_PEER_COMBINED, MISUSE_BAD_MESSAGE = 6, 7
WIRE_SAME, WIRE_FP8 = range(2)
BOTH, START, FINISH = range(3)
BY_SLOT, BY_SOURCE = range(2)
SHARE_DESCRIPTOR, SHARE_FABRIC = range(2)
STAGING_HOST, STAGING_DEVICE = range(2)
SILU, GELU = range(2)
PHASES = ("dispatch", "combine", "release")


class Checked(Structure):
    """ctypes keeps the lowest bits of an int that is too large for its field; these structures refuse it.

    Raises:
        ValueError: A value does not fit; the message names the field.
    """

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        named.update(zip((field[0] for field in self._fields_), values, strict=False))
        for name, value in named.items():
            if isinstance(value, int) and (getattr(self, name) or 0) != value:
                bits = 8 * getattr(type(self), name).size
                raise ValueError(f"{name} is {value}, which does not fit into {bits} bits")


class Versioned(Checked):
    """Structures start with their size and a magic number: another version of the library refuses them."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.size = ctypes.sizeof(self)
        self.magic = MAGIC


class Launch(Checked):
    _fields_ = [
        ("blocks", c_uint32),
        ("threads", c_uint32),
        ("segment_bytes", c_uint32),
        ("splits", c_uint32),
        ("senders", c_uint32),
        ("sentinel_rows", c_uint32),
        ("path", c_uint32),
    ]


class Config(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("ep_size", c_uint32),
        ("ep_rank", c_uint32),
        ("num_experts", c_uint32),
        ("top_k", c_uint32),
        ("max_tokens_per_rank", c_uint32),
        ("num_payloads", c_uint32),
        ("row_bytes", c_uint32 * MAX_PAYLOADS),
        ("output_elements", c_uint32),
        ("output_type", c_uint32),
        ("num_sms", c_uint32),
        ("wire_type", c_uint32),
        ("timeout_ns", c_uint64),
        ("warmup_timeout_ns", c_uint64),
        ("dispatch", Launch),
        ("combine", Launch),
        ("finish_num_sms", c_uint32),
        ("num_stats", c_uint32),
        ("domain_begin", c_uint32),
        ("domain_ranks", c_uint32),
    ]


class Layout(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("ended", c_uint64),
        ("finished", c_uint64),
        ("arrived", c_uint64),
        ("topk_ids", c_uint64),
        ("topk_weights", c_uint64),
        ("payload", c_uint64 * MAX_PAYLOADS),
        ("output", c_uint64),
        ("sentinel", c_uint64),
        ("combine_row_bytes", c_uint64),
        ("total_bytes", c_uint64),
        ("stats", c_uint64),
    ]


class MemoryConfig(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("ep_size", c_uint32),
        ("ep_rank", c_uint32),
        ("share_kind", c_uint32),
        ("domain_ranks", c_uint32),
        ("bytes", c_uint64),
    ]


class Share(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("kind", c_uint32),
        ("descriptor", c_int32),
        ("bytes", c_uint64),
        ("fabric", c_uint8 * 64),
    ]


class Tables(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("expert_to_rank", c_void_p),
        ("target_ranks", c_void_p),
        ("target_slots", c_void_p),
        ("num_tokens", c_void_p),
        ("invalid_ids", c_void_p),
    ]


class DispatchArgs(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("topk_ids", c_void_p),
        ("topk_weights", c_void_p),
        ("payload", c_void_p * MAX_PAYLOADS),
        ("num_valid_tokens", c_void_p),
        ("stream", c_void_p),
        ("num_tokens", c_uint32),
        ("max_rows", c_uint32),
        ("ids_are_64bit", c_uint32),
        ("half", c_uint32),
        ("expert_load", c_void_p),
        ("stats", c_void_p),
    ]


class CombineArgs(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("rows", c_void_p),
        ("row_slot_bytes", c_uint64),
        ("row_source_bytes", c_uint64),
        ("out", c_void_p),
        ("addend", c_void_p),
        ("stream", c_void_p),
        ("num_tokens", c_uint32),
        ("half", c_uint32),
        ("busiest_tokens", c_uint32),
        ("max_rows", c_uint32),
        ("positions", c_void_p),
        ("weights", c_void_p),
    ]


class Fault(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("kind", c_uint32),
        ("phase", c_uint32),
        ("epoch", c_uint32),
        ("rank", c_uint32),
        ("missing", c_uint32 * RANK_WORDS),
        ("lost", c_uint32 * RANK_WORDS),
        ("source", c_uint32),
        ("rows", c_uint32),
        ("allowed", c_uint32),
        ("misuse", c_uint32),
    ]


class EngineConfig(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("library", ctypes.c_char_p),
        ("provider", ctypes.c_char_p),
        ("nics", POINTER(ctypes.c_char_p)),
        ("num_nics", c_uint32),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("gpu", c_int32),
        ("secret", c_void_p),
        ("secret_bytes", c_uint64),
        ("engine", c_void_p),
    ]


class DomainsConfig(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("workspace", c_uint32),
        ("generation", c_uint32),
        ("domain_of", c_void_p),
        ("target_ranks", c_void_p),
        ("target_slots", c_void_p),
        ("active", c_void_p),
        ("wire_type", c_uint32),
        ("staging", c_uint32),
    ]


class Gpu(Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("magic", c_uint32),
        ("name", c_char * 128),
        ("uuid", c_uint8 * 16),
        ("cluster_uuid", c_uint8 * 16),
        ("clique", c_uint32),
        ("compute_major", c_uint32),
        ("compute_minor", c_uint32),
        ("num_sms", c_uint32),
        ("total_bytes", c_uint64),
        ("posix_descriptors", c_uint32),
        ("fabric_handles", c_uint32),
        ("peers", c_uint32),
        ("reserved", c_uint32),
    ]


INTERRUPT_CHECK = ctypes.CFUNCTYPE(ctypes.c_int)

# name -> (argument types); every function returns a status unless it is in _OTHER_RESULTS
_FUNCTIONS: dict[str, list[Any]] = {
    "putget_abi_version": [],
    "putget_ablated": [],
    "putget_last_error": [],
    "putget_set_interrupt_check": [INTERRUPT_CHECK],
    "putget_layout_of": [POINTER(Config), POINTER(Layout)],
    "putget_memory_create": [POINTER(MemoryConfig), POINTER(c_void_p)],
    "putget_memory_export": [c_void_p, POINTER(Share)],
    "putget_memory_import": [c_void_p, c_uint32, POINTER(Share)],
    "putget_memory_start": [c_void_p, c_uint32, POINTER(c_uint32)],
    "putget_memory_renew": [c_void_p],
    "putget_memory_epoch": [c_void_p, POINTER(c_uint32)],
    "putget_memory_mix": [c_void_p],
    "putget_memory_count_tables_apart": [c_void_p, c_void_p],
    "putget_memory_base": [c_void_p, c_uint32, POINTER(c_void_p)],
    "putget_read_fault": [c_void_p, POINTER(Fault)],
    "putget_sentinel_begin": [c_uint32, c_uint32, c_uint64],
    "putget_memory_destroy": [c_void_p],
    "putget_create": [POINTER(Config), c_void_p, POINTER(Tables), POINTER(c_void_p)],
    "putget_dispatch": [c_void_p, POINTER(DispatchArgs)],
    "putget_combine": [c_void_p, POINTER(CombineArgs)],
    "putget_sums_experts": [c_void_p, c_uint32, POINTER(c_uint32)],
    "putget_release": [c_void_p, c_void_p],
    "putget_launches": [c_void_p, c_uint32, c_void_p, POINTER(Launch), POINTER(Launch)],
    "putget_destroy": [c_void_p],
    "putget_network_local": [c_uint32, c_uint64, POINTER(c_void_p)],
    "putget_network_engine": [POINTER(EngineConfig), POINTER(c_void_p)],
    "putget_network_transport": [c_void_p, c_uint32, POINTER(c_void_p)],
    "putget_network_destroy": [c_void_p],
    "putget_domains_bytes": [POINTER(Config), POINTER(DomainsConfig)] + 3 * [POINTER(c_uint64)],
    "putget_domains_create": [POINTER(DomainsConfig), c_void_p, c_void_p, c_void_p, c_void_p],
    "putget_domains_card": [c_void_p, POINTER(c_uint8), POINTER(c_uint64)],
    "putget_domains_connect": [c_void_p, c_uint32, POINTER(c_uint8), c_uint64],
    "putget_domains_start": [c_void_p],
    "putget_domains_leave": [c_void_p],
    "putget_domains_end": [c_void_p, POINTER(c_uint32)],
    "putget_domains_run": [c_void_p],
    "putget_moe_layout_of": [c_void_p, c_void_p],  # the structures: putget._abi_moe
    "putget_moe_group": [c_void_p, c_void_p],
    "putget_moe_finalize": [c_void_p, c_void_p, c_void_p],
    "putget_moe_expand": [c_void_p],
    "putget_moe_by_source": [c_void_p],
    "putget_moe_count_routes": [c_void_p],
    "putget_moe_compact": [c_void_p],
    "putget_moe_send_pairs": [c_void_p],
    "putget_moe_place_pairs": [c_void_p],
    "putget_moe_sum_pairs": [c_void_p],
    "putget_moe_activate": [c_void_p],
    "putget_moe_product": [c_void_p],
    "putget_moe_networks": [c_void_p],
    "putget_gpu_count": [POINTER(c_uint32)],
    "putget_gpu_report": [c_uint32, POINTER(Gpu)],
    "putget_balance": [c_void_p],  # the structures: putget._abi_balancer
    "putget_choose": [c_void_p],
    "putget_landing_bytes": [c_uint32, c_uint32, c_uint64],
    "putget_landing_create": [c_void_p, c_void_p, c_void_p],
    "putget_landing_post": [
        *(c_void_p, c_void_p, c_uint32, c_void_p, c_uint32),
        *(c_void_p, c_uint32, POINTER(c_uint32)),
    ],
    "putget_landing_move": [c_void_p, c_uint64, c_void_p],
    "putget_landing_take": [c_void_p, c_void_p, c_void_p],
    "putget_landing_step": [c_void_p, c_uint64, c_void_p],
    "putget_landing_planned": [c_void_p, c_uint32],
    "putget_landing_progress_of": [c_void_p, c_void_p],
    "putget_landing_destroy": [c_void_p],
    "putget_choose_words": [c_uint32, c_uint32, c_uint32, c_uint32, c_uint32],
    "putget_replicas": [c_void_p],
    "putget_replicas_words": [c_uint32, c_uint32],
    "putget_host_pages_map": [c_void_p],
    "putget_host_pages_unmap": [c_void_p, c_uint64],
}
_OTHER_RESULTS: dict[str, Any] = {
    "putget_abi_version": c_uint32,
    "putget_ablated": c_uint32,
    "putget_last_error": ctypes.c_char_p,
    "putget_set_interrupt_check": None,
    "putget_sentinel_begin": c_uint64,
    "putget_choose_words": c_uint64,
    "putget_landing_bytes": c_uint64,
    "putget_landing_destroy": None,
    "putget_replicas_words": c_uint64,
    "putget_memory_destroy": None,
    "putget_network_destroy": None,
    "putget_destroy": None,
}


def library_path() -> Path:
    """Where the native library is expected."""
    return config.library_override() or Path(__file__).with_name("libputget.so")


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the native library.

    Raises:
        BackendUnavailable: It is not there, or of another ABI version.
    """
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailable(f"cannot load putget's native library {path}: {error}") from error
    for name, argtypes in _FUNCTIONS.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise BackendUnavailable(f"{path} has no function {name}: it is of another version") from None
        function.argtypes = argtypes
        function.restype = _OTHER_RESULTS.get(name, ctypes.c_int)
    version = loaded.putget_abi_version()
    if version != ABI_VERSION:
        raise BackendUnavailable(f"{path} has ABI version {version}, this package needs {ABI_VERSION}")
    return loaded


def last_error() -> str:
    """The words of the last failed call of this thread."""
    return str(library().putget_last_error().decode(errors="replace"))


def raise_status(status: int) -> None:
    """Turns a status other than OK into an exception.

    Raises:
        ValueError: The arguments were refused.
        BackendUnavailable: Something is missing on this machine or in this build.
        PutgetError: The operating system or the driver refused.
    """
    if status == INVALID:
        raise ValueError(last_error())
    if status == UNAVAILABLE:
        raise BackendUnavailable(last_error())
    raise PutgetError(last_error())


def call(name: str, *args: Any) -> None:
    """Calls a function that returns a status; see ``raise_status`` for what it raises."""
    status = getattr(library(), name)(*args)
    if status != OK:
        raise_status(status)
