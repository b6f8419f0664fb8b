"""The structures of putget_balancer.h."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int32, c_uint32, c_uint64, c_void_p

from putget._abi import Versioned

NO_LIMIT = (1 << 32) - 1
CHOICES = ("nearest", "round_robin", "hash", "balanced", "activated")
MAX_GPUS, MAX_SLOTS = 4096, 1 << 16  # of a placement
MAX_CELLS = 128  # of a landing area
MAX_ORDERS = 256
HOST_NEAR_NODE, HOST_HUGE_ALLOWED, HOST_FILLED_HERE = 1, 2, 4


class BalanceArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("num_layers", c_uint32),
        ("num_experts", c_uint32),
        ("num_replicas", c_uint32),
        ("num_groups", c_uint32),
        ("num_nodes", c_uint32),
        ("num_gpus", c_uint32),
        ("max_moves", c_uint32),
        ("host_store", c_uint32),
        ("min_gain", c_double),
        ("load", c_void_p),
        ("previous", c_void_p),
        ("dead", c_void_p),
        ("physical_to_logical", c_void_p),
    )


class ReplicasArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("num_experts", c_uint32),
        ("width", c_uint32),
        ("num_ranks", c_uint32),
        ("slots_per_rank", c_uint32),
        ("rank", c_uint32),
        ("ranks_per_node", c_uint32),
        ("physical_to_logical", c_void_p),
        ("tables", c_void_p),
    )


class ChooseArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_uint32),
        ("how", c_uint32),
        ("num_tokens", c_uint32),
        ("top_k", c_uint32),
        ("num_experts", c_uint32),
        ("width", c_uint32),
        ("num_ranks", c_uint32),
        ("slots_per_rank", c_uint32),
        ("rank", c_uint32),
        ("seed", c_uint32),
        ("ids_are_64bit", c_uint32),
        ("topk_ids", c_void_p),
        ("tables", c_void_p),
        ("seed_word", c_void_p),
        ("num_valid_tokens", c_void_p),
        ("out", c_void_p),
        ("memory", c_void_p),
        ("stream", c_void_p),
    )


class HostPages(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("descriptor", c_int32),
        ("numa_node", c_int32),
        ("fill", c_uint32),
        ("got", c_uint32),
        ("bytes", c_uint64),
        ("alignment", c_uint64),
        ("address", c_void_p),
    )


class BlobPart(Structure):
    _fields_ = (("slots", c_void_p), ("slot_bytes", c_uint64), ("offset", c_uint64))


class LandingConfig(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("cells", c_uint32),
        ("num_parts", c_uint32),
        ("num_sms", c_uint32),
        ("first", c_uint32),
        ("reserved", c_uint32),
        ("blob_bytes", c_uint64),
        ("parts", c_void_p),
        ("landed", c_void_p),
        ("tables", c_void_p),
        ("gathering", c_void_p),
        ("num_tables", c_uint32),
        ("by_thread", c_uint32),
    )


class Table(Structure):
    _fields_ = (("words", c_void_p), ("next", c_void_p), ("num_words", c_uint64))


class Gathering(Structure):
    _fields_ = (
        ("told", c_void_p),
        ("stats", c_void_p),
        ("load", c_void_p),
        ("before", c_void_p),
        ("of_window", c_void_p),
        ("sums", c_void_p),
        ("state", c_void_p),
        ("num_experts", c_uint32),
        ("num_loads", c_uint32),
        ("num_stats", c_uint32),
        ("interval", c_uint32),
    )


class PutOrder(Structure):
    _fields_ = (
        ("first_part", c_uint32),
        ("end_part", c_uint32),
        ("slot", c_uint32),
        ("dst", c_uint32),
        ("arrival", c_uint32),
    )


class TakeOrder(Structure):
    _fields_ = (
        ("first_part", c_uint32),
        ("end_part", c_uint32),
        ("slot", c_uint32),
        ("src", c_uint32),
        ("arrival", c_uint32),
    )


class LandingProgress(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("batch", c_uint32),
        ("put", c_uint32),
        ("taken", c_uint32),
        ("agreed", c_uint32),
        ("wrong", c_uint32),
        ("written", c_uint32),
        ("gathered", c_uint32),
        ("reserved", c_uint32),
    )
