"""Around the experts: kernels between dispatch, grouped GEMMs and combine, routers, and a whole layer."""

from putget.moe.experts import layer_payloads
from putget.moe.fused import fused_layer
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
    "fused_layer",
    "gated_activation",
    "layer_payloads",
]
