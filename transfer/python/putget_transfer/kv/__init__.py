"""KV caches between prefill and decode, on the transfer engine.

Method: section 4 of "RDMA Point-to-Point Communication for LLM Systems". The names are those of the Rust crate
`putget_transfer_kv`.
"""

import putget_transfer._native  # noqa: F401 - makes the compiled part below known
from putget_transfer.kv._cache import KvCache, Layer
from putget_transfer.kv._directory import Directory, DirectoryClient, Entry, Member
from putget_transfer.kv._native import (
    Cache,
    Decoder,
    Geometry,
    Plan,
    Prefiller,
    Receive,
    ReceiveFailed,
    SourcePlan,
    Sources,
    plan,
    strides,
)
from putget_transfer.kv._regions import Region

__all__ = [
    "Cache",
    "Decoder",
    "Directory",
    "DirectoryClient",
    "Entry",
    "Geometry",
    "KvCache",
    "Layer",
    "Member",
    "Plan",
    "Prefiller",
    "Receive",
    "ReceiveFailed",
    "Region",
    "SourcePlan",
    "Sources",
    "plan",
    "strides",
]
