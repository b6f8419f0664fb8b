"""The kernels around the experts in plain torch: the oracle of their tests. It imports torch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BLOCK = 128  # values that share a scale
_SMALLEST_BLOCK = 1e-30  # a block of smaller values, or of zeros, is scaled as if this were its largest one


@dataclass(frozen=True)
class Grouped:
    """Received rows grouped by local expert. See ``putget.ExpertMajor``, whose fields these are.

    Attributes:
        offsets: [num_local_experts + 1] int32.
        num_rows: [num_local_experts] int32.
        weights: [capacity] float32.
        source_rows: [capacity] int32.
        positions: [max_rows * ep_size, top_k] int32.
    """

    offsets: Tensor
    num_rows: Tensor
    weights: Tensor
    source_rows: Tensor
    positions: Tensor


def expert_major(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_tokens: Tensor,
    expert_to_rank: Tensor,
    ep_rank: int,
    alignment: int = 1,
) -> Grouped:
    """Groups what one rank received by its experts, in the order (expert, source rank, token, k).

    Args:
        topk_ids: [ep_size, max_rows, top_k] int32, as ``reference.Arrived`` has them.
        topk_weights: [ep_size, max_rows, top_k] float32.
        num_tokens: [ep_size] int.
        expert_to_rank: [num_experts] int, the rank of each expert.
        ep_rank: the rank that received.
        alignment: groups begin at multiples of this many rows.
    """
    ep_size, max_rows, top_k = topk_ids.shape
    experts = (expert_to_rank == ep_rank).nonzero()[:, 0].tolist()
    received = max_rows * ep_size
    rows = received * top_k
    padded = rows + min(len(experts), rows) * (alignment - 1)
    capacity = -(-padded // alignment) * alignment if experts else 0
    offsets = torch.zeros(len(experts) + 1, dtype=torch.int32, device="cpu")
    num_rows = torch.zeros(len(experts), dtype=torch.int32, device="cpu")
    weights = torch.zeros(capacity, dtype=torch.float32, device="cpu")
    source_rows = torch.full((capacity,), -1, dtype=torch.int32, device="cpu")
    positions = torch.full((received, top_k), -1, dtype=torch.int32, device="cpu")
    place = 0
    for group, expert in enumerate(experts):
        place = offsets[group] = -(-int(place) // alignment) * alignment
        place = int(place)
        for src in range(ep_size):
            for slot, k in (topk_ids[src, : int(num_tokens[src])] == expert).nonzero().tolist():
                row = slot * ep_size + src
                positions[row, k] = place
                source_rows[place] = row
                weights[place] = topk_weights[src, slot, k]
                place += 1
        num_rows[group] = place - int(offsets[group])
    offsets[-1] = -(-int(place) // alignment) * alignment
    return Grouped(offsets, num_rows, weights, source_rows, positions)


def expand(source: Tensor, source_rows: Tensor, out: Tensor) -> Tensor:
    """A copy of `out` in which row i is source[source_rows[i]], where that is a row."""
    result = out.clone()
    wanted = (source_rows >= 0) & (source_rows < len(source))
    result[wanted] = source[source_rows[wanted].long()]
    return result


def finalize(rows: Tensor, positions: Tensor, topk_weights: Tensor) -> Tensor:
    """The weighted sum of each received row's local experts: float32, k ascending from +0, rounded once.

    Args:
        rows: [capacity, *shape] bfloat16, float16 or float32.
        positions: [num_rows, top_k] int, -1 for none.
        topk_weights: [num_rows, top_k] float32.

    Returns:
        [num_rows, *shape] of the dtype of rows.
    """
    shape = rows.shape[1:]
    total = torch.zeros(len(positions), *shape, dtype=torch.float32, device=rows.device)
    for k in range(positions.shape[1]):
        here = positions[:, k] >= 0
        weight = topk_weights[here, k].view(-1, *[1] * len(shape))
        total[here] = total[here] + rows[positions[here, k].long()].float() * weight
    return total.to(rows.dtype)


def gated_activation(x: Tensor, gate: str) -> Tensor:
    """act(x[:, :n]) * x[:, n:] in float32, not rounded.

    Args:
        x: [rows, 2 * n], any float dtype.
        gate: "silu" or "gelu" (with erf).

    Raises:
        ValueError: gate is another one.
    """
    left, up = x.float().chunk(2, dim=1)
    if gate == "silu":
        return torch.nn.functional.silu(left) * up
    if gate == "gelu":
        return torch.nn.functional.gelu(left) * up
    raise ValueError(f"gate must be 'silu' or 'gelu', got {gate!r}")


def quantised_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, n] float32 as E4M3 with one scale for each SCALE_BLOCK values: ([rows, n], [rows, blocks] float32).

    Like ``reference.quantised``: a scale is max(|x|) / 448, a value travels as itself times 1 / scale, rounded to
    nearest even and saturated.
    """
    largest_value = torch.finfo(torch.float8_e4m3fn).max
    rows, n = values.shape
    blocks = -(-n // SCALE_BLOCK)
    magnitude = torch.zeros(rows, blocks * SCALE_BLOCK, dtype=torch.float32, device=values.device)
    magnitude[:, :n] = values.abs().nan_to_num(0.0, posinf=float("inf"))
    largest = magnitude.view(rows, blocks, SCALE_BLOCK).amax(-1)
    scales = largest.clamp(min=_SMALLEST_BLOCK) / largest_value
    scaled = values * (1.0 / scales).repeat_interleave(SCALE_BLOCK, dim=1)[:, :n]
    return scaled.clamp(-largest_value, largest_value).to(torch.float8_e4m3fn), scales
