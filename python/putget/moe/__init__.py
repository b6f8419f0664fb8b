"""Mixture-of-experts layers around the all-to-all."""

from putget.moe.router import GroupLimitedRouting, Router, SoftmaxRouting

__all__ = ["GroupLimitedRouting", "Router", "SoftmaxRouting"]
