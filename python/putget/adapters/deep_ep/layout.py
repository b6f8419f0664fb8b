"""The layouts of DeepEP's results: compact rows by source rank, and rows grouped by expert. On the device, in torch.

Rows of ``received.flat`` lie at slot * ep_size + source rank. Everything here is a permutation of them, computed
without the host wherever DeepEP does so too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FP8_GROUP = 128
_FP8_MAX = 448.0


@dataclass(frozen=True)
class Compact:
    """Received rows without gaps, by source rank, then slot.

    Attributes:
        rows: [count] int64, where each lies in the flat rows; 0 beyond the last one.
        is_row: [count] bool, whether there is one.
        position: [max_rows * ep_size] int64, the inverse: where a flat row is in the compact ones; 0 for none.
        ends: [ep_size] int64, behind the last row of each source rank.
    """

    rows: torch.Tensor
    is_row: torch.Tensor
    position: torch.Tensor
    ends: torch.Tensor


def compact(num_tokens: torch.Tensor, max_rows: int, count: int) -> Compact:
    """Where the received rows are.

    Args:
        num_tokens: [ep_size] int32, rows of each source rank.
        max_rows: Slots of each source rank.
        count: Rows of the result; what does not fit is left out.
    """
    ep_size, device = num_tokens.numel(), num_tokens.device
    counts = num_tokens.long()
    ends = counts.cumsum(0)
    first = ends - counts
    slot = torch.arange(max_rows, device=device)
    position = torch.where(slot[:, None] < counts, first + slot[:, None], count).clamp(max=count).flatten()
    flat = torch.arange(max_rows * ep_size, device=device)
    rows = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_(0, position, flat)[:count]
    is_row = torch.arange(count, device=device) < counts.sum()
    return Compact(torch.where(is_row, rows, 0), is_row, torch.where(position < count, position, 0), ends)


def local_experts(topk_idx: torch.Tensor, ep_rank: int, num_local_experts: int) -> torch.Tensor:
    """Global expert ids as those of this rank, int64; -1 for experts of other ranks."""
    local = topk_idx.long() - ep_rank * num_local_experts
    return torch.where((local >= 0) & (local < num_local_experts), local, -1)


def once_each(topk_idx: torch.Tensor) -> torch.Tensor:
    """[num_tokens, top_k]: the same ids, with -1 for an expert that stands before in its token."""
    same = topk_idx[:, :, None] == topk_idx[:, None, :]
    return topk_idx.masked_fill(same.tril(-1).any(2), -1)


def weights_of(sent: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """[num_tokens, top_k] float32: for each id that is sent the weights of all ids like it in its token; 0 for -1.

    Args:
        sent: Of ``once_each``.
        topk_idx: What it was made from.
        topk_weights: [num_tokens, top_k] float32.
    """
    same = (sent[:, :, None] == topk_idx[:, None, :]) & (sent >= 0)[:, :, None]
    return torch.where(same, topk_weights[:, None, :], 0.0).sum(2)


def experts_first(topk_ids: torch.Tensor, ep_rank: int, num_local_experts: int, capacity: int) -> torch.Tensor:
    """Where each flat row goes when rows are grouped by expert; within one by source rank, then slot.

    Args:
        topk_ids: [ep_size, max_rows] int32 global ids, one a row; -1 in empty slots.
        ep_rank: This rank.
        num_local_experts: Experts of a rank.
        capacity: Rows of each expert.

    Returns:
        [max_rows * ep_size] int64, expert * capacity + row; num_local_experts * capacity where there is no row.
    """
    local = local_experts(topk_ids.flatten(), ep_rank, num_local_experts)
    chosen = torch.where(local >= 0, local, num_local_experts)
    one_hot = (chosen[:, None] == torch.arange(num_local_experts + 1, device=local.device)).int()
    row = (one_hot.cumsum(0) - one_hot).gather(1, chosen[:, None])[:, 0]
    fits = (local >= 0) & (row < capacity)
    place = torch.where(fits, local * capacity + row, num_local_experts * capacity)
    return place.view(topk_ids.shape).T.flatten()


def ranks_of(topk_idx: torch.Tensor, num_local: int, num_experts: int, ranks: int) -> torch.Tensor:
    """[num_tokens, ranks] bool: whether a token goes to each rank. Ids out of range are "no expert"."""
    ids = topk_idx.long()
    owners = torch.where((ids >= 0) & (ids < num_experts), ids // num_local, ranks)
    goes = torch.zeros(ids.shape[0], ranks + 1, dtype=torch.bool, device=ids.device)
    return goes.scatter_(1, owners, True)[:, :ranks].contiguous()


def count(values: torch.Tensor, kinds: int) -> torch.Tensor:
    """[kinds] int32: how often each of 0 to kinds - 1 occurs; other values up to kinds are left out.

    (``torch.bincount`` waits for the device.)
    """
    flat = values.flatten()
    found = torch.zeros(kinds + 1, dtype=torch.int32, device=flat.device)
    return found.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))[:kinds]


def scatter_rows(rows: torch.Tensor, place: torch.Tensor, packed: torch.Tensor) -> None:
    """Flat rows [max_rows * ep_size, *] to their places in packed [num_local_experts * capacity + 1, *]."""
    packed.view(torch.uint8).index_copy_(0, place, rows.view(torch.uint8))


def packed(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows as they are, and their scales contiguous. Copies strided scales on the current stream."""
    return [rows[0], *(scales.contiguous() for scales in rows[1:])]


def to_fp8(x: torch.Tensor, *, round_scale: bool = False, use_ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn with one scale for 128 values: [n, hidden], [n, hidden // 128].

    Args:
        x: [n, hidden].
        round_scale: Scales are powers of two, not below the exact ones.
        use_ue8m0: Such scales as their exponents, biased by 127, in one byte each: [n, hidden // 512] int32.

    Raises:
        ValueError: hidden is not a multiple of 128, or of 512 with use_ue8m0, which needs round_scale.
    """
    num_tokens, hidden = x.shape
    multiple = 4 * _FP8_GROUP if use_ue8m0 else _FP8_GROUP
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 is True, round_scale is False: expected both, such scales are powers of two")
    if hidden % multiple:
        raise ValueError(f"x has rows of {hidden}, FP8 needs a multiple of {multiple}; use_fp8=False sends bfloat16")
    groups = x.view(num_tokens, hidden // _FP8_GROUP, _FP8_GROUP).float()
    scales = groups.abs().amax(2).clamp(min=1e-4) / _FP8_MAX
    exponents = (scales.view(torch.int32) + 0x7FFFFF) >> 23
    if round_scale:
        scales = (exponents << 23).view(torch.float32)
    # A cast that overflows gives NaN on the CPU and saturates on CUDA: clamp, so that both give the same bytes.
    values = (groups / scales[:, :, None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    if use_ue8m0:
        scales = exponents.to(torch.uint8).view(torch.int32)
    return values.view(num_tokens, hidden), scales
