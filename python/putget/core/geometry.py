"""Sizes of one all-to-all, and where its regions lie in symmetric memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from putget import _abi
from putget._arguments import check_int, check_row_bytes, check_tensor
from putget.core.wire import Wire
from putget.payload import Payload
from putget.tuning import Launch, Tuning

OUTPUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Beside(NamedTuple):
    """The inputs of dispatch beside ids, weights and rows; see ``AllToAll.dispatch``."""

    num_valid_tokens: torch.Tensor | None = None
    expert_load: torch.Tensor | None = None
    stats: torch.Tensor | None = None


@dataclass(frozen=True)
class Geometry:
    """Sizes of one all-to-all, checked. Field names are the constructor's.

    Attributes:
        wire: How rows travel inside a domain.
        home: How the sums that domains send each other travel, where there are several.
        domain_ranks: Ranks that send each other rows of combine: of the largest domain.
    """

    ep_size: int
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    payloads: tuple[Payload, ...]
    output: Payload
    wire: Wire = field(default_factory=Wire)
    num_stats: int = 0
    home: Wire = field(default_factory=Wire)
    domain_ranks: int = 0

    @staticmethod
    def checked(
        ep_size: int,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        payloads: Sequence[Payload],
        output: Payload,
        combine_dtype: torch.dtype | None = None,
        num_stats: int = 0,
        *,
        across: bool = False,
        domain_ranks: int | None = None,
    ) -> Geometry:
        """Raises ValueError for the first size or choice that is not allowed. ``across``: there are several domains."""
        check_int("ep_size", ep_size, 1, _abi.MAX_RANKS)
        if domain_ranks is not None:
            check_int("domain_size", domain_ranks, 1, ep_size)
        check_int("num_experts", num_experts, 1, 1 << 20)
        check_int("top_k", top_k, 1, _abi.MAX_TOP_K)
        check_int("max_tokens_per_rank", max_tokens_per_rank, 1, _abi.MAX_TOKENS)
        if isinstance(payloads, Payload) or not isinstance(payloads, Sequence):
            raise ValueError(f"payloads is {payloads!r}, expected a sequence of putget.Payload")
        if not 1 <= len(payloads) <= _abi.MAX_PAYLOADS:
            raise ValueError(f"payloads has {len(payloads)} entries, allowed are 1 to {_abi.MAX_PAYLOADS}")
        for index, payload in enumerate(payloads):
            if not isinstance(payload, Payload):
                raise ValueError(f"payloads[{index}] is {payload!r}, expected a putget.Payload")
            check_row_bytes(f"payloads[{index}]", payload.row_bytes)
        if not isinstance(output, Payload):
            raise ValueError(f"output is {output!r}, expected a putget.Payload")
        if output.dtype not in OUTPUT_TYPES:
            raise ValueError(f"output dtype is {output.dtype}, allowed are bfloat16, float16 and float32")
        # As many elements for every dtype: they are summed in float32.
        check_row_bytes("output", output.row_bytes, output.dtype.itemsize * (_abi.MAX_ROW_BYTES // 4))
        wire = Wire.checked(combine_dtype, output)
        check_int("num_stats", num_stats, 0, _abi.MAX_STATS)
        wires = (Wire(), wire) if across else (wire, Wire())
        return Geometry(
            ep_size,
            num_experts,
            top_k,
            max_tokens_per_rank,
            tuple(payloads),
            output,
            wires[0],
            num_stats,
            wires[1],
            domain_ranks or ep_size,
        )

    def config(
        self,
        ep_rank: int,
        most: int,
        tuning: Tuning,
        timeout_s: float,
        warmup_timeout_s: float,
        domain_begin: int = 0,
    ) -> _abi.Config:
        """The same for the C ABI."""
        row_bytes = [payload.row_bytes for payload in self.payloads]
        return _abi.Config(
            ep_size=self.ep_size,
            ep_rank=ep_rank,
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens_per_rank=self.max_tokens_per_rank,
            num_payloads=len(self.payloads),
            row_bytes=(ctypes.c_uint32 * _abi.MAX_PAYLOADS)(*row_bytes),
            output_elements=self.output.row_bytes // self.output.dtype.itemsize,
            output_type=OUTPUT_TYPES[self.output.dtype],
            num_sms=most,
            finish_num_sms=tuning.finish_num_sms or 0,
            num_stats=self.num_stats,
            domain_begin=domain_begin,
            domain_ranks=self.domain_ranks,
            wire_type=self.wire.type,
            timeout_ns=max(1, int(timeout_s * 1e9)),
            warmup_timeout_ns=max(1, int(warmup_timeout_s * 1e9)),
            dispatch=(tuning.dispatch or Launch()).for_abi(),
            combine=(tuning.combine or Launch()).for_abi(),
        )

    @property
    def combine_wire(self) -> Wire:
        """How combine sends what it sends: between domains, where there are several."""
        return self.wire if self.home == Wire() else self.home

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a row that combine sends."""
        return int(replace(self, wire=self.combine_wire).layout().combine_row_bytes)

    def layout(self) -> _abi.Layout:
        """Where the regions are."""
        layout = _abi.Layout()
        config = self.config(0, 0, Tuning(), 1.0, 1.0)
        _abi.call("putget_layout_of", ctypes.byref(config), ctypes.byref(layout))
        return layout

    def check_dispatch(
        self,
        topk_ids: Any,
        topk_weights: Any,
        payloads: tuple[Any, ...],
        beside: Beside,
        device: torch.device,
    ) -> int:
        """num_tokens of what is given to dispatch.

        Raises:
            ValueError: An argument is wrong; the message names it, what came and what is allowed.
        """
        if not isinstance(topk_ids, torch.Tensor) or topk_ids.dim() != 2:
            came = list(topk_ids.shape) if isinstance(topk_ids, torch.Tensor) else type(topk_ids).__name__
            raise ValueError(f"topk_ids is {came}, expected a tensor [num_tokens, {self.top_k}]")
        num_tokens = topk_ids.shape[0]
        if num_tokens > self.max_tokens_per_rank:
            raise ValueError(f"topk_ids has {num_tokens} tokens, max_tokens_per_rank is {self.max_tokens_per_rank}")
        routes = (num_tokens, self.top_k)
        check_tensor("topk_ids", topk_ids, routes, (torch.int32, torch.int64), device)
        check_tensor("topk_weights", topk_weights, routes, (torch.float32,), device)
        if len(payloads) != len(self.payloads):
            raise ValueError(f"payloads: {len(payloads)} came, expected {len(self.payloads)}")
        for index, (payload, kind) in enumerate(zip(payloads, self.payloads, strict=True)):
            check_tensor(f"payloads[{index}]", payload, (num_tokens, *kind.shape), (kind.dtype,), device)
        self._check_beside(beside, device)
        return num_tokens

    def _check_beside(self, beside: Beside, device: torch.device) -> None:
        """Raises as ``check_dispatch``."""
        check_valid_tokens(beside.num_valid_tokens, device)
        if beside.expert_load is not None:
            check_tensor("expert_load", beside.expert_load, (self.num_experts,), (torch.int32,), device)
        if beside.stats is not None:
            if self.num_stats == 0:
                raise ValueError("stats is given, this AllToAll has none: construct it with num_stats=")
            check_tensor("stats", beside.stats, (self.num_stats,), (torch.int32,), device)

    def memory_map(self) -> str:
        """The regions of every rank's symmetric memory, a line each: offset, bytes, name, rows."""
        layout = self.layout()
        slots = self.max_tokens_per_rank * self.ep_size
        line, parts = "one 128-byte line a rank", "256 flags a rank"
        regions = [
            ("ended flags", layout.ended, line),
            ("finished flags", layout.finished, line),
            ("arrived flags", layout.arrived, parts),
            ("topk_ids", layout.topk_ids, f"{slots} x [{self.top_k}] int32"),
            ("topk_weights", layout.topk_weights, f"{slots} x [{self.top_k}] float32"),
            *((f"payload {i}", layout.payload[i], f"{slots} x {payload}") for i, payload in enumerate(self.payloads)),
            *([("stats", layout.stats, f"{self.ep_size} x [{self.num_stats}] int32")] if self.num_stats else []),
            ("combine_input", layout.output, f"{slots} x {self.output}"),
        ]
        rows_a_peer = (layout.total_bytes - layout.sentinel) // self.domain_ranks // layout.combine_row_bytes
        where = "" if self.domain_ranks == self.ep_size else " of a domain"
        regions.append(("sentinel rows", layout.sentinel, f"{rows_a_peer} of each rank{where}"))
        ends = [start for _, start, _ in regions[1:]] + [layout.total_bytes]
        lines = [f"{'offset':>14} {'bytes':>14}  region          rows"]
        for (name, start, rows), end in zip(regions, ends, strict=True):
            lines.append(f"{start:>14} {end - start:>14}  {name:<15} {rows}")
        return "\n".join(lines)


def check_valid_tokens(valid: Any, device: torch.device) -> None:
    """Raises ValueError unless num_valid_tokens is None or one int32 on the device."""
    if valid is None:
        return
    if not isinstance(valid, torch.Tensor) or valid.numel() != 1:
        raise ValueError(f"num_valid_tokens is {valid!r}, expected a tensor of one int32")
    check_tensor("num_valid_tokens", valid, tuple(valid.shape), (torch.int32,), device)


def default_expert_to_rank(num_experts: int, ep_size: int, device: torch.device) -> torch.Tensor:
    """Contiguous blocks of ceil(num_experts / ep_size) experts a rank: [num_experts] int32."""
    block = -(-num_experts // ep_size)
    return torch.arange(num_experts, dtype=torch.int32, device=device) // block
