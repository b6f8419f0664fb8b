"""ExpertParallelMoE as tests make it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from putget.moe import ExpertParallelMoE, GroupLimitedRouting, SlotOptions, networks
from tests.harness import Rank
from tests.harness.run import fill_allocator
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


SLOT_FIELDS = {field.name for field in fields(SlotOptions)}


def options_of(dense: Dense, **changes: Any) -> dict[str, Any]:
    """Arguments of ExpertParallelMoE for the shape of a dense layer; fields of SlotOptions come into `slots`."""
    slots = {name: changes.pop(name) for name in SLOT_FIELDS & changes.keys()}
    if slots:
        changes["slots"] = SlotOptions(**slots)
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
    networks.FEWEST_UNITS = 1  # a test's layer is small, and takes what large ones take; harness.run sets it back
    return ExpertParallelMoE.from_dense(rank.comm, dense.state(), **options_of(dense, device=rank.device, **changes))


@torch.no_grad()
def load_kernels(layer: ExpertParallelMoE, x: Tensor, expected_rows: tuple[int, ...]) -> None:
    """Runs what a call of the layer runs between its rounds; the rank meets the others behind it.

    On a GPU that ranks share, a kernel of a round may wait for another rank. If that rank loads a module meanwhile, or
    asks for new memory, it waits for the kernel: neither goes on. So both are done before the first round.

    Args:
        layer: Made with ``overlap_shared=False`` where ranks share a GPU: its second stream has memory of its own.
        x: As many tokens as calls have at most: products of another size may need another kernel.
        expected_rows: Rows that an expert has on average; FP8 kernels differ by them.
    """
    if x.device.type != "cuda":
        return
    capacity = layer.grouped_memory.capacity
    for _ in range(2):  # a first call may take another kernel than those behind it
        for tokens in range(1, len(x) + 1):
            _, _, payloads = layer.route(x[:tokens])
            layer.run_shared(payloads)
        arrived = tuple(payload.new_zeros((capacity, *payload.shape[1:])) for payload in payloads)
        for rows in expected_rows:
            layer.experts(arrived, _NoRows(len(layer.local_experts), x.device), rows)
    fill_allocator(x.device)
    torch.cuda.current_stream(x.device).synchronize()


class _NoRows:
    """Groups without rows."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
        self.num_rows = torch.zeros(num_experts, dtype=torch.int32, device=device)
        self.progress = torch.zeros(1024, dtype=torch.int32, device=device)
