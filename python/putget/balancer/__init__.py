"""Expert-parallel load balancing: which rank holds which expert, and which replica a token uses."""

from putget.balancer import formats
from putget.balancer.blobs import Blob, ExpertBlobs
from putget.balancer.choice import ReplicaChoice
from putget.balancer.history import LoadHistory
from putget.balancer.placement import Placement
from putget.balancer.planner import rebalance

__all__ = ["Blob", "ExpertBlobs", "LoadHistory", "Placement", "ReplicaChoice", "formats", "rebalance"]
