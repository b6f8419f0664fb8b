"""The structures of putget_balancer.h."""

from __future__ import annotations

from ctypes import c_double, c_int32, c_uint32, c_uint64, c_void_p

from putget._abi import Versioned

NO_LIMIT = (1 << 32) - 1
CHOICES = ("nearest", "round_robin", "hash", "balanced")
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


class ChooseArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("how", c_uint32),
        ("num_tokens", c_uint32),
        ("top_k", c_uint32),
        ("num_experts", c_uint32),
        ("width", c_uint32),
        ("num_ranks", c_uint32),
        ("slots_per_rank", c_uint32),
        ("rank", c_uint32),
        ("ranks_per_node", c_uint32),
        ("ids_are_64bit", c_uint32),
        ("reserved", c_uint32),
        ("topk_ids", c_void_p),
        ("slots", c_void_p),
        ("counts", c_void_p),
        ("seed", c_void_p),
        ("out", c_void_p),
        ("memory", c_void_p),
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
