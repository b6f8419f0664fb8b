"""FlashInfer's workspace as its callers see it: sizes, offsets, views of a part of it, masks of ranks. No rank is met.

A rank's part begins with tables, whose offsets ``metainfo`` has; the rows of each payload follow, and behind them the
rows of combine. putget moves rows through symmetric memory of its own and puts them here by source rank, because that
is how FlashInfer's callers index them. Offsets and sizes are those of FlashInfer's interface.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from putget import Payload
from putget.adapters.engines import require_supported
from putget.adapters.shared import engine_workspace_bytes

MOE_A2A_RANK_MASK_WORDS = 1
_RANKS_OF_A_WORD = 64
_ALIGNMENT = 128
_MAX_TOP_K = 32

_TABLES = (
    "FLAG_VAL",
    "LOCAL_TOKEN_COUNTER",
    "SEND_COUNTERS",
    "RECV_COUNTERS",
    "DISPATCH_COMPLETION_FLAGS",
    "COMBINE_COMPLETION_FLAGS",
    "TOPK_TARGET_RANKS",
    "TOPK_SEND_INDICES",
    "EPLB_GATHERED_STATS",
    "PAYLOAD_DATA",
)
METAINFO_INDEX = {f"{name}_OFFSET_INDEX": index for index, name in enumerate(_TABLES)}
METAINFO_INDEX["NUM_METAINFO_FIELDS"] = len(_TABLES)
_ALIGNED = _TABLES[4:]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def table_offsets(ep_size: int, max_num_tokens: int, num_stats: int = 0) -> list[int]:
    """Where the tables of a rank's part begin, in bytes, in the order of ``METAINFO_INDEX``; last, the rows."""
    routes = max_num_tokens * _MAX_TOP_K
    words = dict.fromkeys(_TABLES, ep_size)
    words.update(FLAG_VAL=1, LOCAL_TOKEN_COUNTER=1, TOPK_TARGET_RANKS=routes, TOPK_SEND_INDICES=routes)
    words.update(EPLB_GATHERED_STATS=ep_size * num_stats, PAYLOAD_DATA=0)
    found, offset = [], 0
    for name in _TABLES:
        offset = _up(offset, _ALIGNMENT) if name in _ALIGNED else offset
        found.append(offset)
        offset += 4 * words[name]
    return found


def workspace_size(
    ep_size: int, max_num_tokens: int, dispatch_bytes: int, combine_bytes: int, num_stats: int = 0
) -> int:
    """Bytes of a rank's part: tables, rows of the payloads, rows of combine.

    Raises:
        ValueError: A size is not allowed.
    """
    for name, value, least in (
        ("ep_size", ep_size, 1),
        ("max_num_tokens", max_num_tokens, 1),
        ("total_dispatch_payload_size_per_token", dispatch_bytes, 0),
        ("combine_payload_size_per_token", combine_bytes, 0),
        ("eplb_stats_num_experts", num_stats, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}, expected an int of at least {least}")
    slots = ep_size * max_num_tokens
    tables = table_offsets(ep_size, max_num_tokens, num_stats)[-1]
    return tables + _up(slots * dispatch_bytes, _ALIGNMENT) + _up(slots * combine_bytes, _ALIGNMENT)


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
    use_low_precision_combine: bool | None = None,
) -> int:
    """Bytes of a rank's part of the workspace, as FlashInfer counts them. What putget moves rows through comes on top.

    Args:
        ep_size: Ranks of the expert-parallel group.
        max_num_tokens: Most tokens that one rank sends in one round.
        total_dispatch_payload_size_per_token: Bytes of one token's payloads.
        combine_payload_size_per_token: Bytes of one row that comes back.
        eplb_stats_num_experts: Numbers that each rank tells all in a dispatch.
        backend: Must be "trtllm".
        use_low_precision_combine: Changes nothing: such rows need no more.

    Raises:
        ValueError: An argument is not allowed.
    """
    require_supported(backend=(backend, "trtllm"))
    return workspace_size(
        ep_size,
        max_num_tokens,
        total_dispatch_payload_size_per_token,
        combine_payload_size_per_token,
        eplb_stats_num_experts,
    )


def symmetric_bytes(size_per_rank: int, ep_size: int, max_num_tokens: int, num_stats: int = 0) -> int:
    """Symmetric bytes of putget's own for rows that fit a part of so many bytes, however payloads and combine share it.

    Rows that come back quantised need no more than others.

    Raises:
        ValueError: The part has no room for rows.
    """
    room = size_per_rank - table_offsets(ep_size, max_num_tokens, num_stats)[-1]
    if room < ep_size * max_num_tokens:
        raise ValueError(
            f"workspace_size_per_rank is {size_per_rank}, expected room for rows of {max_num_tokens} tokens of each "
            f"of {ep_size} ranks: see moe_a2a_get_workspace_size_per_rank"
        )
    row_bytes = -(-room // (ep_size * max_num_tokens))
    return engine_workspace_bytes(
        ep_size=ep_size,
        max_tokens_per_rank=max_num_tokens,
        dispatch_bytes=row_bytes,
        output=Payload((8,), torch.bfloat16),
        num_stats=num_stats,
    )


def row_offsets(first: int, rows: int, payloads: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where the rows of each payload begin in a rank's part, and those of combine.

    Args:
        first: Where rows begin.
        rows: Of each payload: ep_size times the slots of a source.
        payloads: [num_tokens, ...] tensors.

    Raises:
        ValueError: A payload's rows would begin at no multiple of its element size.
    """
    offsets = []
    for index, payload in enumerate(payloads):
        if first % payload.element_size():
            raise ValueError(
                f"input_payloads[{index}] has elements of {payload.element_size()} bytes, its rows would begin at byte "
                f"{first}: order payloads from the largest elements to the smallest"
            )
        offsets.append(first)
        first += rows * math.prod(payload.shape[1:]) * payload.element_size()
    return offsets, _up(first, _ALIGNMENT)


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: torch.Tensor, leading_shape: list[int], slice_start: int, slice_end: int, dtype: torch.dtype
) -> torch.Tensor:
    """A part of the workspace as a typed view.

    Args:
        workspace: [ep_size, size_per_rank], or [size_per_rank], uint8.
        leading_shape: The first dimensions of the view; what is left of the bytes is the last one.
        slice_start: First byte, counted from the beginning of the workspace.
        slice_end: Behind the last byte, within the same rank's part.
        dtype: Of the view.

    Returns:
        [*leading_shape, -1].

    Raises:
        ValueError: The bytes are not within one rank's part.
    """
    parts = workspace.unsqueeze(0) if workspace.dim() == 1 else workspace
    if parts.dim() != 2 or parts.element_size() != 1:
        raise ValueError(
            f"workspace is {list(workspace.shape)} {workspace.dtype}, expected [ep_size, size_per_rank] torch.uint8"
        )
    stride, size = parts.stride(0) or parts.shape[1], parts.shape[1]
    rank, begin = divmod(slice_start, stride) if parts.shape[0] > 1 else (0, slice_start)
    end = begin + slice_end - slice_start
    if not 0 <= begin <= end <= size or rank >= parts.shape[0]:
        raise ValueError(
            f"bytes {slice_start} to {slice_end} are not within one rank's part: {parts.shape[0]} ranks of {size} bytes"
        )
    return parts[rank, begin:end].view(dtype).view(*leading_shape, -1)


def moe_a2a_active_rank_mask(active_ranks: Iterable[int], ep_size: int) -> torch.Tensor:
    """The mask of ranks as FlashInfer has it: [1] uint64 on the CPU, bit r set where rank r is active.

    Raises:
        ValueError: A rank is out of range.
    """
    mask = 0
    for rank in map(int, active_ranks):
        if not 0 <= rank < min(ep_size, _RANKS_OF_A_WORD):
            raise ValueError(f"active_ranks holds {rank}, allowed are 0 to {min(ep_size, _RANKS_OF_A_WORD) - 1}")
        mask |= 1 << rank
    return torch.tensor([mask], dtype=torch.uint64)


def active_ranks_of(
    mask: Any, enable_rank_mask: bool, ep_rank: int, ep_size: int, before: tuple[bool, ...]
) -> tuple[bool, ...]:
    """One bool for each rank, of a mask as FlashInfer has it; ``before`` where masks are not enabled.

    Raises:
        ValueError: There is a mask although none is enabled, or the other way round; or it is no such mask, or leaves
            out the own rank.
    """
    if not enable_rank_mask:
        if mask is not None:
            raise ValueError("active_rank_mask is given, expected None without enable_rank_mask=True")
        return before
    words = (MOE_A2A_RANK_MASK_WORDS,)
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.uint64 or tuple(mask.shape) != words:
        came = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, torch.Tensor) else repr(mask)
        raise ValueError(
            f"active_rank_mask is {came}, expected what moe_a2a_active_rank_mask returns, because enable_rank_mask is "
            "True"
        )
    bits = int(mask.item())
    if not bits >> ep_rank & 1:
        raise ValueError(f"active_rank_mask leaves out the own ep_rank {ep_rank}")
    return tuple(bool(bits >> rank & 1) for rank in range(ep_size))
