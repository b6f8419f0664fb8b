"""putget: one-sided dispatch and combine for mixture-of-experts inference. Dispatch puts, combine gets."""

from putget import _log
from putget._version import __version__
from putget.alltoall import AllToAll
from putget.core.expert_major import ExpertMajor, ExpertMajorMemory, FlatRows
from putget.core.received import Received
from putget.errors import (
    BackendUnavailable,
    CapacityExceeded,
    ExpertsLost,
    ForkedChild,
    InvalidExpertIds,
    PeerLeft,
    PeerTimeout,
    ProtocolMisuse,
    PutgetError,
    QuorumLost,
)
from putget.group.communicator import Communicator
from putget.group.domains import Network
from putget.memory.workspace import Workspace
from putget.payload import Payload
from putget.sizing import workspace_bytes

_log.follow_environment()

__all__ = [
    "AllToAll",
    "BackendUnavailable",
    "CapacityExceeded",
    "Communicator",
    "ExpertMajor",
    "ExpertMajorMemory",
    "ExpertsLost",
    "FlatRows",
    "ForkedChild",
    "InvalidExpertIds",
    "Network",
    "Payload",
    "PeerLeft",
    "PeerTimeout",
    "ProtocolMisuse",
    "PutgetError",
    "QuorumLost",
    "Received",
    "Workspace",
    "__version__",
    "workspace_bytes",
]
