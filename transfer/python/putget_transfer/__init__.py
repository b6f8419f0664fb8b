"""One-sided point-to-point transfers across hosts, completed by counting and never by order.

Method: "RDMA Point-to-Point Communication for LLM Systems". The names are those of the Rust crate.
"""

from pathlib import Path

from putget_transfer import _native
from putget_transfer._native import (
    Builder,
    CountMissed,
    DeviceGroup,
    Engine,
    EngineBusy,
    EngineClosed,
    EngineError,
    Failure,
    Fenced,
    Flag,
    ImmRange,
    MrDesc,
    MrHandle,
    NetAddr,
    Pages,
    PeerGroup,
    Prepared,
    ScatterDst,
    ScatterTemplate,
    SimNetwork,
    Topology,
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
    "EngineBusy",
    "EngineClosed",
    "EngineError",
    "Failure",
    "Fenced",
    "Flag",
    "ImmRange",
    "MrDesc",
    "MrHandle",
    "NetAddr",
    "Pages",
    "PeerGroup",
    "Prepared",
    "ScatterDst",
    "ScatterTemplate",
    "SimNetwork",
    "Topology",
    "Transfer",
    "TransferFailed",
    "Unavailable",
    "UvmWatcher",
    "include",
    "library",
]


def library() -> str:
    """Return the path of the library with the functions of `putget_transfer.h`.

    It is the compiled part of this package, so only a process that has Python in it can load it. A program
    without Python links what `cargo build --release -p putget_transfer_capi` makes.
    """
    return str(_native.__file__)


def include() -> str:
    """Return the folder of `putget_transfer.h`."""
    return str(Path(__file__).parent / "include")
