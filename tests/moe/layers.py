"""ExpertParallelMoE as tests make it."""

from __future__ import annotations

from typing import Any

import torch

from putget.moe import ExpertParallelMoE, GroupLimitedRouting
from tests.harness import Rank
from tests.moe.dense import Dense

# BF16: what lies between the products, the experts' rows, their weighted sum and the result are each rounded to 8 bits,
# that is by at most 2**-9 of themselves; the factors of a product of two add up. Five roundings, and room for rows that
# cancel each other.
BF16_TOLERANCE = 2.0**-6
# FP8: the reference has rows and weights as they are after rounding, but not what lies between the products. E4M3 has 3
# bits of mantissa: an element is wrong by at most 2**-4, and by 2**-5 or so on the average, of its own size.
FP8_TOLERANCE = 2.0**-4


def tolerance(dense: Dense) -> float:
    return FP8_TOLERANCE if dense.fp8 else BF16_TOLERANCE


def options_of(dense: Dense, **changes: Any) -> dict[str, Any]:
    """Arguments of ExpertParallelMoE for the shape of a dense layer."""
    return {
        "hidden_size": dense.hidden,
        "intermediate_size": dense.intermediate,
        "num_experts": dense.num_experts,
        "top_k": dense.top_k,
        "max_tokens_per_rank": 8,
        "routing": None if dense.groups is None else GroupLimitedRouting(*dense.groups),
        "router_bias": dense.groups is not None,
        "shared_intermediate_size": dense.shared,
        "weight_dtype": torch.float8_e4m3fn if dense.fp8 else torch.bfloat16,
        "gate": dense.gate,
        "timeout_s": 20.0,
        "warmup_timeout_s": 20.0,
        **changes,
    }


def make_layer(rank: Rank, dense: Dense, **changes: Any) -> ExpertParallelMoE:
    """The layer on this rank, with the dense layer's weights."""
    return ExpertParallelMoE.from_dense(rank.comm, dense.state(), **options_of(dense, device=rank.device, **changes))
