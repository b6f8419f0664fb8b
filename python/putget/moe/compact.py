"""Rows of whole tokens without gaps, by source rank, then slot, and what is counted before their dispatch.

DeepEP's normal calls have this form. Each function is one kernel on the current stream, or on CPU is done when it
returns. Nothing waits for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from putget import _abi, _abi_moe
from putget.memory.workspace import current_stream


@dataclass(frozen=True)
class Routes:
    """How many tokens go where.

    Attributes:
        in_rank: [num_tokens, ranks] bool, whether a token goes to a rank.
        per_rank: [ranks] int32.
        per_expert: [ranks * num_local_experts] int32.
    """

    in_rank: torch.Tensor
    per_rank: torch.Tensor
    per_expert: torch.Tensor


@dataclass(frozen=True)
class Compact:
    """Where the received rows are among those without gaps.

    Attributes:
        rows: [count] int32, the flat row of each; -1 behind the last one.
        position: [max_rows * ep_size] int32, the inverse; -1 for none.
        ends: [ep_size] int32, behind the last row of each source rank.
    """

    rows: torch.Tensor
    position: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True)
class Choices:
    """The experts of received rows.

    Attributes:
        ids: In: flat [max_rows * ep_size, top_k] int32 or int64, as they arrived. Out: [count, top_k] of the same type,
            as this rank's experts, -1 for those of other ranks.
        weights: In: flat float32, or None. Out: 0 for the experts of other ranks.
        first: This rank's first expert.
        num_experts: Experts of a rank.
        per_expert: [num_experts] int32, to which each choice adds 1, or None.
    """

    ids: torch.Tensor
    weights: torch.Tensor | None
    first: int
    num_experts: int
    per_expert: torch.Tensor | None = None


def count_routes(topk_idx: torch.Tensor, ranks: int, num_local_experts: int) -> Routes:
    """Counts tokens by rank and by expert.

    Args:
        topk_idx: [num_tokens, top_k] int32 or int64, contiguous; ids out of range are "no expert".
        ranks: Up to 32.
        num_local_experts: Experts of a rank.
    """
    num_tokens, top_k = topk_idx.shape
    experts = ranks * num_local_experts
    counts = torch.zeros(ranks + experts, dtype=torch.int32, device=topk_idx.device)
    in_rank = torch.empty(num_tokens, ranks, dtype=torch.bool, device=topk_idx.device)
    args = _abi_moe.MoeRoutesArgs(
        **_where(topk_idx.device),
        ids=topk_idx.data_ptr(),
        in_rank=in_rank.data_ptr(),
        per_rank=counts.data_ptr(),
        per_expert=counts.data_ptr() + 4 * ranks,
        num_tokens=num_tokens,
        top_k=top_k,
        ranks=ranks,
        num_local_experts=num_local_experts,
        ids_are_64bit=topk_idx.dtype == torch.int64,
    )
    _run("putget_moe_count_routes", args, topk_idx.device)
    return Routes(in_rank, counts[:ranks], counts[ranks:])


def compact(
    num_tokens: torch.Tensor,
    max_rows: int,
    count: int,
    payloads: Sequence[torch.Tensor],
    lost: torch.Tensor,
    choices: Choices | None = None,
) -> tuple[Compact, list[torch.Tensor], Choices | None]:
    """Copies received rows to where there are no gaps.

    Args:
        num_tokens: [ep_size] int32, rows of each source rank.
        max_rows: Slots of each source rank.
        count: Rows of the results; those behind the last one are undefined.
        payloads: Flat [max_rows * ep_size, *].
        lost: [1] int64, to which rows are added that do not fit.
        choices: The rows' experts, or None.

    Returns:
        Where the rows are; rows [count, *] of each payload; the choices of these rows.
    """
    device, ep_size = num_tokens.device, num_tokens.numel()
    sizes = [count, max_rows * ep_size, ep_size]
    places = Compact(*torch.split(torch.empty(sum(sizes), dtype=torch.int32, device=device), sizes))
    rows = [part.new_empty(count, *part.shape[1:]) for part in payloads]
    args = _abi_moe.MoeCompactArgs(
        **_where(device),
        num_tokens=num_tokens.data_ptr(),
        rows=places.rows.data_ptr(),
        position=places.position.data_ptr(),
        ends=places.ends.data_ptr(),
        lost=lost.data_ptr(),
        ep_size=ep_size,
        max_rows=max_rows,
        count=count,
        num_payloads=len(rows),
    )
    for index, (source, target) in enumerate(zip(payloads, rows, strict=True)):
        args.from_rows[index], args.to_rows[index] = source.data_ptr(), target.data_ptr()
        args.row_bytes[index] = source.nbytes // source.shape[0]
    local = None if choices is None else _local_choices(args, choices, count)
    _run("putget_moe_compact", args, device)
    return places, rows, local


def _local_choices(args: _abi_moe.MoeCompactArgs, choices: Choices, count: int) -> Choices:
    """Room for the choices of the results, which the call is told."""
    ids, weights = choices.ids, choices.weights
    local = ids.new_empty(count, ids.shape[1])
    args.ids, args.local, args.top_k = ids.data_ptr(), local.data_ptr(), ids.shape[1]
    args.ids_are_64bit = ids.dtype == torch.int64
    args.first_expert, args.num_experts = choices.first, choices.num_experts
    args.per_expert = None if choices.per_expert is None else choices.per_expert.data_ptr()
    local_weights = None
    if weights is not None:
        local_weights = weights.new_empty(count, weights.shape[1])
        args.weights, args.local_weights = weights.data_ptr(), local_weights.data_ptr()
    return Choices(local, local_weights, choices.first, choices.num_experts, choices.per_expert)


def take_rows(rows: torch.Tensor, index: torch.Tensor, into: torch.Tensor) -> None:
    """into[i] = rows[index[i]], for contiguous rows; where index is -1 or out of range into[i] is left alone.

    Args:
        rows: [n, *].
        index: [m] int32.
        into: [m, *] of the same rows.
    """
    if not (len(rows) and len(into)):
        return
    args = _abi_moe.MoeExpandArgs(
        **_where(rows.device), source_rows=index.data_ptr(), num_source_rows=len(rows), num_payloads=1
    )
    args.valid.limit = len(into)
    args.from_rows[0], args.to_rows[0] = rows.data_ptr(), into.data_ptr()
    args.row_bytes[0] = into.nbytes // len(into)
    _run("putget_moe_expand", args, rows.device)


def _where(device: torch.device) -> dict[str, int]:
    return {
        "device": _abi.DEVICE_CUDA if device.type == "cuda" else _abi.DEVICE_CPU,
        "ordinal": device.index or 0,
    }


def _run(name: str, args: Any, device: torch.device) -> None:
    args.stream = current_stream(device)
    _abi.call(name, ctypes.byref(args))
