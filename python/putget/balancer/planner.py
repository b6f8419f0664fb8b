"""Plans where experts lie, from what they had to do. The planner itself is native (putget_balancer.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np

from putget import _abi, _abi_balancer
from putget._arguments import as_count, as_flag, as_kind, as_list, as_number, shown
from putget.balancer.placement import Placement, as_load


def rebalance(
    load: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    previous: Placement | None = None,
    max_moves: int | None = None,
    min_gain: float | None = None,
    dead_ranks: Iterable[int] | None = None,
    host_store: bool = False,
) -> Placement:
    """Plans replicas and placement of the experts of all layers, so that the ranks' largest load is small.

    Experts with much load get replicas, which share it evenly. If `num_groups` divides by `num_nodes`, all replicas of
    a group's experts lie on one node, as many groups on each (hierarchical). Otherwise experts lie anywhere (global).
    The first plan is that of DeepSeek's load balancer (EPLB, github.com/deepseek-ai/EPLB). Exchanges of slots and of
    replicas then lower its largest load, so the result is never worse than the first plan. The same arguments give the
    same bits on every rank: ranks that know the same loads need not talk.

    Args:
        load: integers or floats [num_layers, num_experts], or [num_experts] for one layer; tokens of each expert, or
            any other weight: an array, nested lists, or a tensor on any device. A layer of zeros is planned as if all
            its experts were alike.
        num_replicas: slots of all ranks, as many on each.
        num_groups: groups of consecutive experts, as group-limited routing has them; 1 if there are none.
        num_nodes: hosts; ranks of one host are consecutive.
        num_gpus: ranks.
        previous: the placement in force. The plan keeps as much of it as costs at most 0.01 of max/mean, and slots keep
            what stays on their rank.
        max_moves: the most experts that ranks have to get in one layer; needs `previous`. Experts that have lost their
            last slot with a rank are placed in any case, and empty slots are filled; both count.
        min_gain: a layer whose max/mean would fall by less keeps its part of `previous`; needs `previous`.
        dead_ranks: ranks whose slots stay empty (-1).
        host_store: whether an expert that no live rank holds in `previous` can come from elsewhere.

    Returns:
        The placement.

    Raises:
        ValueError: An argument is of another type; loads are negative, NaN or infinite; slots are fewer than experts,
            or do not divide by the ranks; ranks do not divide by the nodes, or experts by the groups; `previous` has
            other sizes; an expert of `previous` lies on dead ranks alone and there is no host store. Nothing has
            changed then.
    """
    weight = as_load(load, None, None)
    num_layers, num_experts = weight.shape
    num_replicas = as_count("num_replicas", num_replicas, 1, _abi_balancer.MAX_SLOTS)
    num_gpus = as_count("num_gpus", num_gpus, 1, _abi_balancer.MAX_GPUS)
    before = _previous(previous, num_layers, num_experts, num_replicas)
    if previous is None and (max_moves is not None or min_gain is not None):
        name = "max_moves" if max_moves is not None else "min_gain"
        raise ValueError(f"{name} is given without previous: there is nothing to move from")
    dead = _dead(dead_ranks, num_gpus)
    plan = np.empty((num_layers, num_replicas), np.int32)
    most = _abi_balancer.NO_LIMIT
    args = _abi_balancer.BalanceArgs(
        num_layers=num_layers,
        num_experts=num_experts,
        num_replicas=num_replicas,
        num_groups=as_count("num_groups", num_groups, 1, _abi_balancer.MAX_SLOTS),
        num_nodes=as_count("num_nodes", num_nodes, 1, _abi_balancer.MAX_GPUS),
        num_gpus=num_gpus,
        max_moves=most if max_moves is None else as_count("max_moves", max_moves, 0, most - 1),
        host_store=int(as_flag("host_store", host_store)),
        min_gain=0.0 if min_gain is None else as_number("min_gain", min_gain, 0),
        load=weight.ctypes.data,
        previous=None if before is None else before.ctypes.data,
        dead=None if dead is None else dead.ctypes.data,
        physical_to_logical=plan.ctypes.data,
    )
    _abi.call("putget_balance", ctypes.byref(args))
    return Placement.of(plan, num_experts)


def _previous(
    previous: Placement | None, num_layers: int, num_experts: int, num_replicas: int
) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    if previous is None:
        return None
    as_kind("previous", previous, Placement)
    found = (previous.num_layers, previous.num_experts, previous.num_replicas)
    if found != (num_layers, num_experts, num_replicas):
        raise ValueError(
            f"previous has {found[0]} layers, {found[1]} experts and {found[2]} slots; "
            f"load and num_replicas have {num_layers}, {num_experts} and {num_replicas}"
        )
    return np.ascontiguousarray(previous.physical_to_logical, np.int32)


def _dead(dead_ranks: Iterable[int] | None, num_gpus: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    if dead_ranks is None:
        return None
    dead = np.zeros(num_gpus, np.uint8)
    for rank in as_list("dead_ranks", dead_ranks):
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < num_gpus:
            raise ValueError(f"dead_ranks has rank {shown(rank)}, allowed are 0 to {num_gpus - 1}")
        dead[rank] = 1
    return dead
