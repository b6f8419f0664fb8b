"""Expert-parallel load balancing: which rank holds which expert, and which replica a token uses."""

from putget.balancer import formats
from putget.balancer.blobs import Blob, ExpertBlobs
from putget.balancer.choice import ReplicaChoice
from putget.balancer.history import LoadHistory
from putget.balancer.host_pages import HostSettings, host_settings
from putget.balancer.placement import Placement
from putget.balancer.planner import rebalance
from putget.balancer.store import HostStore
from putget.balancer.store_report import HostStoreReport

__all__ = [
    "Blob",
    "ExpertBlobs",
    "HostSettings",
    "HostStore",
    "HostStoreReport",
    "LoadHistory",
    "Placement",
    "ReplicaChoice",
    "formats",
    "host_settings",
    "rebalance",
]
