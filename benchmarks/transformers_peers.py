"""transformers' own ways to spread experts over ranks, for transformers_step.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import EPImplementationInterface

SPREAD = ("all_to_all", "all_reduce")


class Upstream:
    """A model whose experts run under one of them, until `end`.

    With "all_to_all" each rank has requests of its own; with "all_reduce" all ranks have all requests. Each rank has as
    many experts, which are views of the model's.
    """

    def __init__(self, model: Any, name: str, device: torch.device) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(device.type, (size, 1), mesh_dim_names=("experts", "alone"))
        same_batch = mesh["experts"] if name == "all_reduce" else mesh["alone"]
        make = EPImplementationInterface()[name]
        self.before: list[tuple[Any, dict[str, torch.nn.Parameter], int]] = []
        for experts in [layer.mlp.experts for layer in model.model.layers]:
            weights = dict(experts.named_parameters(recurse=False))
            self.before.append((experts, weights, experts.num_experts))
            count = experts.num_experts // size
            for key, weight in weights.items():
                own = weight.detach()[rank * count : (rank + 1) * count]
                setattr(experts, key, torch.nn.Parameter(own, requires_grad=False))
            experts.num_experts = count
            experts._is_expert_parallel = True  # its kernels leave out the id that stands for another rank's expert
            experts.forward = make(experts, mesh["experts"], same_batch)

    def end(self) -> None:
        """Make the model what it was."""
        for experts, weights, count in self.before:
            del experts.forward, experts._is_expert_parallel
            experts.num_experts = count
            for key, weight in weights.items():
                setattr(experts, key, weight)
