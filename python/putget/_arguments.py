"""Checks of what callers pass: every message names the argument, what came and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from putget import _abi
from putget.payload import Payload

OUTPUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """value as an int within [low, high].

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, allowed are ints from {low} to {high}")
    return value


@dataclass(frozen=True)
class Geometry:
    """Sizes of one all-to-all, checked. Field names are the constructor's."""

    ep_size: int
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    payloads: tuple[Payload, ...]
    output: Payload

    @staticmethod
    def checked(
        ep_size: int,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        payloads: Sequence[Payload],
        output: Payload,
    ) -> Geometry:
        """Raises ValueError for the first size that is not allowed."""
        check_int("ep_size", ep_size, 1, _abi.MAX_RANKS)
        check_int("num_experts", num_experts, 1, 1 << 20)
        check_int("top_k", top_k, 1, _abi.MAX_TOP_K)
        check_int("max_tokens_per_rank", max_tokens_per_rank, 1, 1 << 24)
        if isinstance(payloads, Payload) or not isinstance(payloads, Sequence):
            raise ValueError(f"payloads is {payloads!r}, expected a sequence of putget.Payload")
        if not 1 <= len(payloads) <= _abi.MAX_PAYLOADS:
            raise ValueError(f"payloads has {len(payloads)} entries, allowed are 1 to {_abi.MAX_PAYLOADS}")
        for index, payload in enumerate(payloads):
            if not isinstance(payload, Payload):
                raise ValueError(f"payloads[{index}] is {payload!r}, expected a putget.Payload")
        if not isinstance(output, Payload):
            raise ValueError(f"output is {output!r}, expected a putget.Payload")
        if output.dtype not in OUTPUT_TYPES:
            raise ValueError(f"output dtype is {output.dtype}, allowed are bfloat16, float16 and float32")
        return Geometry(ep_size, num_experts, top_k, max_tokens_per_rank, tuple(payloads), output)

    def config(self, ep_rank: int, num_sms: int, timeout_s: float, warmup_timeout_s: float) -> _abi.Config:
        """The same for the C ABI."""
        row_bytes = [payload.row_bytes for payload in self.payloads]
        return _abi.Config(
            ep_size=self.ep_size,
            ep_rank=ep_rank,
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens_per_rank=self.max_tokens_per_rank,
            num_payloads=len(self.payloads),
            row_bytes=(_abi.c_uint32 * _abi.MAX_PAYLOADS)(*row_bytes),
            output_elements=self.output.row_bytes // self.output.dtype.itemsize,
            output_type=OUTPUT_TYPES[self.output.dtype],
            num_sms=num_sms,
            timeout_ns=int(timeout_s * 1e9),
            warmup_timeout_ns=int(warmup_timeout_s * 1e9),
        )

    def layout(self) -> _abi.Layout:
        """Where the regions are."""
        layout = _abi.Layout()
        config = self.config(0, 0, 1.0, 1.0)
        _abi.call("putget_layout_of", _abi.ctypes.byref(config), _abi.ctypes.byref(layout))
        return layout


def check_tensor(
    name: str, value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> torch.Tensor:
    """A contiguous tensor of exactly this shape, one of these dtypes, on this device.

    Raises:
        ValueError: It is not; the message says what came.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, expected a tensor")
    if value.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} has dtype {str(value.dtype).removeprefix('torch.')}, expected {allowed}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, expected {device}")
    if value.shape != shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected {list(shape)}")
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {list(value.stride())}, expected a contiguous tensor")
    return value


def default_expert_to_rank(num_experts: int, ep_size: int, device: torch.device) -> torch.Tensor:
    """Contiguous blocks of ceil(num_experts / ep_size) experts a rank: [num_experts] int32."""
    block = -(-num_experts // ep_size)
    return (torch.arange(num_experts, dtype=torch.int32) // block).to(device)


def check_expert_to_rank(value: Any, num_experts: int, ep_size: int, device: torch.device) -> torch.Tensor:
    """An int32 table [num_experts] of ranks.

    Raises:
        ValueError: Shape, dtype, device or a rank in it is wrong.
    """
    if isinstance(value, Sequence):
        try:
            value = torch.tensor(value, dtype=torch.int32, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"expert_to_rank: expected {num_experts} ranks: {error}") from error
    table = check_tensor("expert_to_rank", value, (num_experts,), (torch.int32,), device)
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= ep_size:
        raise ValueError(f"expert_to_rank holds ranks from {low} to {high}, allowed are 0 to {ep_size - 1}")
    return table


def check_rows(x: Any, shape: tuple[int, ...], ep_size: int, max_rows: int, like: Payload, device: torch.device) -> tuple[int, int]:
    """Strides in bytes, (slot, source), of rows given to combine: [ep_size, max_rows, *shape] or [max_rows * ep_size, *shape].

    Raises:
        ValueError: Another shape, dtype or device, or rows that are not contiguous in themselves.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"x is a {type(x).__name__}, expected a tensor")
    if x.dtype != like.dtype:
        raise ValueError(f"x has dtype {x.dtype}, expected {like.dtype}")
    if x.device != device:
        raise ValueError(f"x is on {x.device}, expected {device}")
    item = x.element_size()
    by_source = (ep_size, max_rows, *shape)
    flat = (max_rows * ep_size, *shape)
    lead = 2 if x.dim() == len(by_source) else 1
    if tuple(x.shape) not in (by_source, flat):
        raise ValueError(f"x has shape {list(x.shape)}, expected {list(by_source)} or {list(flat)}")
    if not x[(0,) * lead].is_contiguous():
        raise ValueError(f"x has strides {list(x.stride())}, expected contiguous rows")
    if lead == 2:
        return x.stride(1) * item, x.stride(0) * item
    return x.stride(0) * item * ep_size, x.stride(0) * item
