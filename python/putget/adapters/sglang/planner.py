"""SGLang's ``--enable-eplb`` on putget's planner: ``rebalance_experts`` with SGLang's arguments and tables."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from putget.adapters.engines import announce_planner, require_arguments
from putget.balancer import Placement, formats, rebalance

MODULE = "sglang.srt.eplb.eplb_algorithms"
NAME = "rebalance_experts"
_LOCATION = "sglang.srt.eplb.expert_location"
_ELASTIC = "sglang.srt.elastic_ep.elastic_ep"
# Whether a choice of --eplb-algorithm keeps the replicas of a group's experts on one node. Algorithms that are not
# named look at the load of each step, and stay SGLang's own.
_HIERARCHICAL = {
    "deepseek": False,
    "deepseek_hierarchical": True,
    "elasticity_aware": False,
    "elasticity_aware_hierarchical": True,
}


def planner(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's ``rebalance_experts`` on putget's planner.

    Args:
        original: SGLang's own one, which is called for the algorithms that putget does not know.

    Raises:
        BackendUnavailable: It takes arguments that putget does not know.
    """

    def rebalance_experts(
        tokens_per_expert: Tensor,
        num_physical_experts: int,
        num_local_physical_experts: int,
        num_groups: int | None,
        num_nodes: int,
        algorithm: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if algorithm.name not in _HIERARCHICAL:
            return original(  # type: ignore[no-any-return]
                tokens_per_expert=tokens_per_expert,
                num_physical_experts=num_physical_experts,
                num_local_physical_experts=num_local_physical_experts,
                num_groups=num_groups,
                num_nodes=num_nodes,
                algorithm=algorithm,
            )
        num_ranks = num_physical_experts // num_local_physical_experts
        dead = _dead_ranks() if algorithm.name.startswith("elasticity_aware") else []
        groups, nodes = 1, 1
        if _HIERARCHICAL[algorithm.name] and not dead:
            groups, nodes = _groups(algorithm.name, num_groups, num_nodes), num_nodes
        load = tokens_per_expert.sum(dim=0).to("cpu", torch.float64).numpy()
        # SGLang reloads an expert that died with its ranks, so the plan may place it anywhere.
        plan = rebalance(
            load,
            num_physical_experts,
            groups,
            nodes,
            num_ranks,
            previous=_in_force(load.shape, num_physical_experts),
            dead_ranks=dead,
            host_store=True,
        )
        announce_planner("sglang", num_experts=load.shape[1], num_slots=num_physical_experts, num_ranks=num_ranks)
        tables = formats.to_vllm(plan, max_slots=plan.logical_to_physical.shape[2])
        # SGLang's form of a slot that nobody may use: it holds expert 0 and is in no expert's list.
        return tables[0].clamp_min(0), tables[1], tables[2]

    require_arguments("SGLang", original, rebalance_experts)
    return rebalance_experts


def _groups(algorithm: str, num_groups: int | None, num_nodes: int) -> int:
    if num_groups is None or num_groups % num_nodes:
        raise ValueError(
            f"--eplb-algorithm {algorithm}: the model has {num_groups} groups of experts for {num_nodes} nodes; "
            "groups must divide by the nodes, or choose --eplb-algorithm deepseek"
        )
    return num_groups


def _dead_ranks() -> list[int]:
    """The ranks that SGLang's elastic expert parallelism has lost."""
    state = importlib.import_module(_ELASTIC).ElasticEPStateManager.instance()
    if state is None:
        return []
    return [rank for rank, is_active in enumerate(state.active_ranks.tolist()) if not is_active]


def _in_force(shape: tuple[int, ...], num_physical_experts: int) -> Placement | None:
    """The placement that all ranks of SGLang use now; None at the start and after its sizes have changed."""
    module = sys.modules.get(_LOCATION)
    metadata = None if module is None else module.get_global_expert_location_metadata()
    if metadata is None:
        return None
    table = metadata.physical_to_logical_map_cpu
    if tuple(table.shape) != (shape[0], num_physical_experts) or int(metadata.num_logical_experts) != shape[1]:
        return None
    return Placement.of(table.numpy(), shape[1])
