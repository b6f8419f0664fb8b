"""Experts that every token goes to. They need nobody's rows, so they can run while rows travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from putget.moe.experts import Bf16Experts, Fp8Experts
from putget.moe.kernels import gated_activation


@dataclass(frozen=True)
class _OneGroup:
    """All rows belong to one expert: see ``putget.moe.experts.Groups``."""

    offsets: Tensor
    num_rows: Tensor


class SharedExperts(nn.Module):
    """One gated feed-forward network for all tokens of this rank; several shared experts are one that is as much wider.

    Args:
        experts: The network, as experts that are one.
    """

    _ramp: Tensor

    def __init__(self, experts: Bf16Experts | Fp8Experts) -> None:
        super().__init__()
        self.experts = experts
        self.register_buffer(
            "_ramp", torch.arange(2, dtype=torch.int32, device=experts.gate_up.device), persistent=False
        )

    def forward(self, payloads: Sequence[Tensor]) -> Tensor:
        """[num_tokens, hidden_size] bfloat16 of the rows as they are dispatched.

        Args:
            payloads: What ``Experts.prepare`` made of them.
        """
        experts = self.experts
        if isinstance(experts, Bf16Experts):
            between = linear(payloads[0], experts.gate_up[0])
            return linear(gated_activation(between, experts.gate), experts.down[0])
        num_tokens = len(payloads[0])
        offsets = self._ramp * num_tokens
        output: Tensor = experts(payloads, _OneGroup(offsets, offsets[1:]), num_tokens)
        return output
