"""transformers' experts as grouped products over rows by expert: no row is computed that did not come."""

from __future__ import annotations

from typing import Any

import torch

from putget.moe.kernels import Gate

# By the names of the classes behind transformers' hidden_act; "gelu" is the exact one, with erf.
_GATES: dict[str, Gate] = {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu"}


def gate_of(experts: Any, num_experts: int) -> Gate | None:
    """The gate of experts that putget's kernels compute; None of others, whose own forward has to.

    Those are down(act(gate(x)) * up(x)) over plain bfloat16 weights [num_experts, 2 * intermediate_size, hidden_size],
    the gate's rows first, and [num_experts, hidden_size, intermediate_size], without biases or norms.

    Args:
        experts: transformers' module, or None.
        num_experts: Those of this rank.
    """
    if not getattr(experts, "has_gate", False) or not getattr(experts, "is_concatenated", False):
        return None
    if any(getattr(experts, flag, True) for flag in ("has_bias", "has_post_expert_norm", "is_transposed")):
        return None
    if getattr(type(experts)._apply_gate, "__name__", "") != "_default_apply_gate":
        return None
    gate_up, down = experts.gate_up_proj, experts.down_proj
    for weight in (gate_up, down):
        if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.dtype != torch.bfloat16:
            return None
        if weight.dim() != 3 or len(weight) != num_experts or not weight.is_contiguous():
            return None
    intermediate, hidden = down.shape[2], down.shape[1]
    if tuple(gate_up.shape[1:]) != (2 * intermediate, hidden) or intermediate % 8 or hidden % 8:
        return None
    return _GATES.get(type(experts.act_fn).__name__)
