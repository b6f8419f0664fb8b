"""vLLM's ``--enable-eplb`` on putget's planner: a policy with the arguments and tables of vLLM's default one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from putget import BackendUnavailable
from putget.adapters.engines import announce_planner, require_arguments, require_names
from putget.balancer import Placement, rebalance

MODULE = "vllm.distributed.eplb.policy"
_NEEDED = ("AbstractEplbPolicy", "EPLB_POLICIES")
_KEY = "default"  # the one policy that vLLM allows with asynchronous moves


def policy_class(module: ModuleType) -> type:
    """A policy with vLLM's base class and the arguments of its default policy.

    Args:
        module: ``vllm.distributed.eplb.policy``.

    Raises:
        BackendUnavailable: This vLLM has other names, arguments or abstract methods than putget knows.
    """
    require_names("vLLM", module, _NEEDED)
    if _KEY not in module.EPLB_POLICIES:
        raise BackendUnavailable(
            f"vLLM: {module.__name__}.EPLB_POLICIES has no {_KEY!r}, but {', '.join(module.EPLB_POLICIES)}"
        )
    kind = type("PutgetEplbPolicy", (module.AbstractEplbPolicy,), {"rebalance_experts": classmethod(rebalance_experts)})
    require_arguments("vLLM", module.EPLB_POLICIES[_KEY].rebalance_experts, kind.rebalance_experts)  # type: ignore[attr-defined]
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise BackendUnavailable(f"vLLM: a policy of this version has {', '.join(missing)}, which putget does not know")
    return kind


def put_in_place(module: ModuleType) -> None:
    """Puts putget's policy under vLLM's name "default".

    Raises:
        BackendUnavailable: As for `policy_class`; the policies stay as they are.
    """
    kind = policy_class(module)
    if module.EPLB_POLICIES[_KEY].__name__ != kind.__name__:
        module.EPLB_POLICIES[_KEY] = kind


def rebalance_experts(
    cls: Any,
    weight: Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: Tensor | None = None,
) -> Tensor:
    """Loads [layers, experts] in, experts of the slots, int64 [layers, num_replicas] on the CPU, out."""
    load = weight.to("cpu", torch.float64).numpy()
    previous = None
    # Elastic expert parallelism asks for another number of slots than there are; there is nothing to keep then.
    if old_global_expert_indices is not None and old_global_expert_indices.shape[1] == num_replicas:
        previous = Placement.of(old_global_expert_indices.cpu().numpy(), load.shape[1])
    # Groups that do not divide by the nodes bind no expert to a node, as in vLLM's own policy.
    groups, nodes = (num_groups, num_nodes) if num_groups % num_nodes == 0 else (1, 1)
    plan = rebalance(load, num_replicas, groups, nodes, num_ranks, previous=previous)
    announce_planner("vllm", num_experts=load.shape[1], num_slots=num_replicas, num_ranks=num_ranks)
    return torch.from_numpy(plan.physical_to_logical).to(torch.int64)
