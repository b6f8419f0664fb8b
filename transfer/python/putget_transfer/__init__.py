"""One-sided point-to-point transfers across hosts, completed by counting and never by order.

Method: "RDMA Point-to-Point Communication for LLM Systems". The names are those of the Rust crate.
"""

from putget_transfer._native import (
    Builder,
    CountMissed,
    DeviceGroup,
    Engine,
    EngineClosed,
    EngineError,
    Failure,
    Flag,
    MrDesc,
    MrHandle,
    NetAddr,
    Pages,
    PeerGroup,
    ScatterDst,
    SimNetwork,
    Transfer,
    TransferFailed,
    Unavailable,
    UvmWatcher,
)

__all__ = [
    "Builder",
    "CountMissed",
    "DeviceGroup",
    "Engine",
    "EngineClosed",
    "EngineError",
    "Failure",
    "Flag",
    "MrDesc",
    "MrHandle",
    "NetAddr",
    "Pages",
    "PeerGroup",
    "ScatterDst",
    "SimNetwork",
    "Transfer",
    "TransferFailed",
    "Unavailable",
    "UvmWatcher",
]
