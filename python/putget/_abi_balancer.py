"""The structures of putget_balancer.h."""

from __future__ import annotations

from ctypes import c_double, c_uint32, c_void_p

from putget._abi import Versioned

NO_LIMIT = (1 << 32) - 1


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
