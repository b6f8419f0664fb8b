"""putget: one-sided dispatch and combine for mixture-of-experts inference. Dispatch puts, combine gets."""

from putget._version import __version__
from putget.alltoall import AllToAll
from putget.communicator import Communicator
from putget.domains import Network
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
from putget.expert_major import ExpertMajor, ExpertMajorMemory, FlatRows
from putget.options import ChosenLaunch, Launch, Tuning
from putget.payload import Payload
from putget.received import Received
from putget.sizing import workspace_bytes
from putget.workspace import Workspace

__all__ = [
    "AllToAll",
    "BackendUnavailable",
    "CapacityExceeded",
    "ChosenLaunch",
    "Communicator",
    "ExpertMajor",
    "ExpertMajorMemory",
    "ExpertsLost",
    "FlatRows",
    "ForkedChild",
    "InvalidExpertIds",
    "Launch",
    "Network",
    "Payload",
    "PeerLeft",
    "PeerTimeout",
    "ProtocolMisuse",
    "PutgetError",
    "QuorumLost",
    "Received",
    "Tuning",
    "Workspace",
    "__version__",
    "workspace_bytes",
]
