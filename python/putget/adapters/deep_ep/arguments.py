"""Arguments of DeepEP's calls, checked before anything has happened on any rank."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

_IDS = (torch.int32, torch.int64)
_Kind = TypeVar("_Kind")


def _came(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def check_ids(topk_idx: Any) -> tuple[int, int]:
    """num_tokens and top_k. Raises ValueError unless these are ids [num_tokens, top_k]."""
    if not isinstance(topk_idx, torch.Tensor) or topk_idx.dim() != 2 or topk_idx.dtype not in _IDS:
        raise ValueError(f"topk_idx is {_came(topk_idx)}, expected [num_tokens, top_k] torch.int64")
    return topk_idx.shape[0], topk_idx.shape[1]


def check_x(x: Any, dtypes: tuple[torch.dtype, ...] | None = None) -> int:
    """Elements of a row. Raises ValueError unless these are rows [num_tokens, hidden], or rows and their scales."""
    parts = x if isinstance(x, tuple) and dtypes is None else (x,)
    for part in parts:
        if not isinstance(part, torch.Tensor) or part.dim() != 2 or len(parts) > 2:
            raise ValueError(f"x is {_came(x)}, expected [num_tokens, hidden], or FP8 rows and their scales")
    if dtypes is not None and x.dtype not in dtypes:
        raise ValueError(f"x has dtype {x.dtype}, supported is {' or '.join(map(str, dtypes))}")
    hidden: int = parts[0].shape[1]
    return hidden


def check_here(device: torch.device, **tensors: torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]) -> None:
    """Raises ValueError unless all of these are on the device: kernels get their addresses."""
    for name, given in tensors.items():
        for tensor in (given,) if isinstance(given, torch.Tensor) else given:
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, this buffer is on {device}")


def check_given(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError unless this is a contiguous tensor that a kernel can write to."""
    fits = isinstance(value, torch.Tensor) and tuple(value.shape) == shape and value.dtype == dtype
    if not fits or value.device != device or not value.is_contiguous():
        where = f" on {value.device}" if isinstance(value, torch.Tensor) else ""
        raise ValueError(f"{name} is {_came(value)}{where}, expected contiguous {list(shape)} {dtype} on {device}")


def check_goes(is_token_in_rank: Any, num_tokens: int, ranks: int) -> None:
    """Raises ValueError unless this says of each token whether it goes to each rank."""
    expected = (num_tokens, ranks)
    fits = isinstance(is_token_in_rank, torch.Tensor) and tuple(is_token_in_rank.shape) == expected
    if not fits or is_token_in_rank.dtype != torch.bool:
        raise ValueError(f"is_token_in_rank is {_came(is_token_in_rank)}, expected {list(expected)} torch.bool")


def check_count(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless this is an int of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, expected an int of at least {least}")


def check_handle(handle: Any, kind: type[_Kind], made_by: str) -> _Kind:
    """The handle. Raises ValueError unless it is of this kind."""
    if not isinstance(handle, kind):
        raise ValueError(f"handle is a {type(handle).__name__}, expected what {made_by} returned")
    return handle


def check_rows_of(x: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raises ValueError unless these are rows for combine."""
    if tuple(x.shape) != shape or x.dtype != dtype:
        raise ValueError(f"x is {_came(x)}, expected {list(shape)} {dtype}: a row for each that dispatch gave")


def check_weights(topk_weights: Any, count: int, top_k: int | None = None) -> None:
    """Raises ValueError unless these are weights [count, top_k]; None: any number of columns."""
    fits = isinstance(topk_weights, torch.Tensor) and topk_weights.dim() == 2 and len(topk_weights) == count
    if not fits or topk_weights.dtype != torch.float32 or top_k not in (None, topk_weights.shape[1]):
        columns = "top_k" if top_k is None else top_k
        raise ValueError(f"topk_weights is {_came(topk_weights)}, expected [{count}, {columns}] torch.float32")


def check_biases(bias: Any, shape: tuple[int, int]) -> list[torch.Tensor]:
    """Up to two tensors of this shape. Raises ValueError unless they are."""
    biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
    if len(biases) > 2:
        raise ValueError(f"bias has {len(biases)} tensors, supported are up to two")
    for one in biases:
        fits = isinstance(one, torch.Tensor) and tuple(one.shape) == shape and one.dtype == torch.bfloat16
        if not fits or not one.is_contiguous():
            raise ValueError(f"bias is {_came(one)}, expected contiguous {list(shape)} torch.bfloat16")
    return biases
