"""What dispatch delivered: views into the workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FlatRows:
    """The received rows as contiguous tensors, what engines feed to their kernels. Row index = slot * ep_size + source rank.

    Attributes:
        payloads: Each [max_rows * ep_size, *shape].
        topk_ids: [max_rows * ep_size, top_k] int32.
        topk_weights: [max_rows * ep_size, top_k] float32.
    """

    payloads: tuple[torch.Tensor, ...]
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Received:
    """The received rows, token-major, indexed by source rank. Valid until this round ends (combine, release, next dispatch).

    Attributes:
        payloads: Each [ep_size, max_rows, *shape], a view into the workspace.
        topk_ids: [ep_size, max_rows, top_k] int32: the ids as sent; -1 in every empty slot.
        topk_weights: [ep_size, max_rows, top_k] float32; undefined in empty slots.
        num_tokens: [ep_size] int32 on the device: rows that each source rank sent here.
        flat: The same memory as contiguous tensors.
    """

    payloads: tuple[torch.Tensor, ...]
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens: torch.Tensor
    flat: FlatRows


def flat_view(memory: torch.Tensor, offset: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[rows, *shape] over a region of uint8 memory."""
    elements = 1
    for size in shape:
        elements *= size
    span = memory[offset : offset + rows * elements * dtype.itemsize]
    return span.view(dtype).view(rows, *shape)


def by_source(flat: torch.Tensor, ep_size: int) -> torch.Tensor:
    """[max_rows * ep_size, ...] slot-major to a view [ep_size, max_rows, ...]."""
    return flat.unflatten(0, (flat.shape[0] // ep_size, ep_size)).transpose(0, 1)
