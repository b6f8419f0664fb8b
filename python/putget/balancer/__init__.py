"""Expert-parallel load balancing: which rank holds which expert, and which replica a token uses.

The memory of experts is `putget.experts`, whose names are here too.
"""

from putget.balancer import formats
from putget.balancer.choice import ReplicaChoice
from putget.balancer.gathering import LoadGathering
from putget.balancer.history import LoadHistory
from putget.balancer.migrate import Landing, LandingProgress, Move
from putget.balancer.online import BalancedLayer, Balancer
from putget.balancer.options import MoveOptions, PlanOptions
from putget.balancer.placement import Placement
from putget.balancer.planner import rebalance
from putget.balancer.recorder import RoutingRecorder
from putget.experts.blobs import Blob, ExpertBlobs
from putget.experts.exchange import ExpertExchange, travelling_bytes
from putget.experts.host_pages import HostSettings, host_settings
from putget.experts.slots import ExpertSlots, SlotState
from putget.experts.store import HostStore
from putget.experts.store_report import HostStoreReport

__all__ = [
    "BalancedLayer",
    "Balancer",
    "Blob",
    "ExpertBlobs",
    "ExpertExchange",
    "ExpertSlots",
    "HostSettings",
    "HostStore",
    "HostStoreReport",
    "Landing",
    "LandingProgress",
    "LoadGathering",
    "LoadHistory",
    "Move",
    "MoveOptions",
    "Placement",
    "PlanOptions",
    "ReplicaChoice",
    "RoutingRecorder",
    "SlotState",
    "formats",
    "host_settings",
    "rebalance",
    "travelling_bytes",
]
