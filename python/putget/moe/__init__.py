"""Around the experts: kernels between dispatch, grouped GEMMs and combine, routers, and a whole layer."""

from putget.moe.kernels import expand, finalize, gated_activation
from putget.moe.layer import ExpertParallelMoE
from putget.moe.lost import LayerMetrics
from putget.moe.placed import SlotOptions
from putget.moe.router import GroupLimitedRouting, Router, SoftmaxRouting

__all__ = [
    "ExpertParallelMoE",
    "GroupLimitedRouting",
    "LayerMetrics",
    "Router",
    "SlotOptions",
    "SoftmaxRouting",
    "expand",
    "finalize",
    "gated_activation",
]
