"""DeepEP's `Buffer`: its low-latency mode (a row for each token and expert) and its normal mode (one for each rank).

Written from DeepEP's documentation of both modes. Neither waits for the host here: the normal mode is given the largest
number of rows that may come, which makes it fit for CUDA graphs.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from putget_bench import quantise
from putget_bench.contender import Contender, Round, differs_beyond_rounding
from putget_bench.inputs import StandInExperts
from putget_bench.profiles import FP8_GROUP
from putget_bench.settings import Settings
from putget_bench.traffic import Traffic

_TOLERANCE = 0.02  # BF16 sums in another order, of rows that were rounded once
_MOST_LOW_LATENCY_TOKENS = 256  # recommended by its documentation: memory is taken for every expert
_LOW_LATENCY_HEADER_BYTES = 16  # of each row: where it came from


def describe(_device: str) -> str:
    """The version."""
    return f"DeepEP {getattr(importlib.import_module('deep_ep'), '__version__', 'of unknown version')}"


def make(settings: Settings, experts: StandInExperts, _device: torch.device) -> list[Contender]:
    """One contender for each mode, with buffers of their own. Collective.

    Raises:
        ImportError: the package, or something that it needs, is not there.
        ValueError: it does not carry rows of this kind, or spreads this number of experts in another way.
    """
    if settings.quant == "nvfp4":
        raise ValueError("it carries BF16 and FP8 rows, got --quant nvfp4")
    if settings.payloads()[0].dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise ValueError(f"it carries BF16 and FP8 rows, got --payload_dtype {settings.payload_dtype}")
    if settings.output().dtype != torch.bfloat16:
        raise ValueError(f"it combines BF16 rows, got --combine_dtype {settings.combine_dtype}")
    if settings.hidden_size % FP8_GROUP:
        raise ValueError(f"it needs rows of a multiple of {FP8_GROUP} values, got {settings.hidden_size}")
    if settings.num_experts % settings.ep_size:
        raise ValueError(
            f"it needs a number of experts that the ranks divide evenly, got {settings.num_experts} for "
            f"{settings.ep_size}"
        )
    deep_ep = importlib.import_module("deep_ep")
    return [LowLatency(deep_ep, settings, experts), Normal(deep_ep, settings, experts)]


class LowLatency:
    """Low-latency mode, rows to combine in its own memory. It takes BF16 rows and casts them to FP8 itself."""

    name = "deepep LL"

    def __init__(self, deep_ep: Any, settings: Settings, experts: StandInExperts) -> None:
        self._settings = settings
        self._experts = experts
        self._ids_dtype = getattr(deep_ep, "topk_idx_t", torch.int64)
        self._max_tokens = min(settings.max_tokens_per_rank, _MOST_LOW_LATENCY_TOKENS)
        self._num_local_experts = settings.num_experts // settings.ep_size
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            self._max_tokens, settings.hidden_size, settings.ep_size, settings.num_experts
        )
        self._buffer = deep_ep.Buffer(
            dist.group.WORLD,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=self._num_local_experts,
        )

    def takes(self, num_tokens: int) -> bool:
        """See `Contender.takes`: it is meant for small batches."""
        return 0 < num_tokens <= self._max_tokens

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`."""
        mine, settings = round_.mine, self._settings
        self._round = round_
        self._hidden = quantise.dequantise(settings.quant, mine.payloads, settings.hidden_size).to(torch.bfloat16)
        self._ids = mine.topk_ids.to(self._ids_dtype)
        self._output = torch.empty_like(round_.output)
        return self.verify()

    def dispatch(self) -> tuple[Any, Tensor]:
        """See `Contender.dispatch`. Returns the rows of every local expert and how many there are."""
        settings = self._settings
        received, counts, self._handle, _, _ = self._buffer.low_latency_dispatch(
            self._hidden, self._ids, self._max_tokens, settings.num_experts, use_fp8=settings.quant == "fp8"
        )
        return received, counts

    def write_rows(self) -> None:
        """See `Contender.write_rows`."""
        self._buffer.get_next_low_latency_combine_buffer(self._handle).copy_(self._rows)

    def combine(self) -> None:
        """See `Contender.combine`."""
        self._buffer.low_latency_combine(
            self._buffer.get_next_low_latency_combine_buffer(self._handle),
            self._ids,
            self._round.mine.topk_weights,
            self._handle,
            zero_copy=True,
            out=self._output,
        )

    def verify(self) -> str | None:
        """See `Contender.verify`: a round whose experts work on what arrives. Weights are applied by combine."""
        received, counts = self.dispatch()
        first = self._round.rank * self._num_local_experts
        everywhere = torch.cat([sent.topk_ids.flatten() for sent in self._round.inputs])
        local = everywhere[(everywhere >= first) & (everywhere < first + self._num_local_experts)].long() - first
        if counts.tolist() != local.bincount(minlength=self._num_local_experts).tolist():
            return "dispatch delivered another number of rows than the reference"
        payloads = received if isinstance(received, tuple) else (received,)
        slots = torch.arange(payloads[0].shape[1], device=counts.device)
        expert = first + torch.arange(self._num_local_experts, device=counts.device)
        ids = torch.where(slots < counts[:, None], expert[:, None], -1)[..., None]
        self._rows = self._experts.rows(self._round.rank, ids, torch.ones(ids.shape, device=ids.device), payloads)
        self.write_rows()
        self.combine()
        return differs_beyond_rounding(self._output, self._round.output, _TOLERANCE)

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """See `Contender.wire_bytes`: one row for each token and expert."""
        settings = self._settings
        rows = traffic.combine_per_pair / settings.output().row_bytes
        carried = sum(payload.row_bytes for payload in settings.payloads())
        return rows * (carried + _LOW_LATENCY_HEADER_BYTES), traffic.combine_per_pair

    def close(self) -> None:
        """See `Contender.close`."""
        del self._buffer


class Normal:
    """Normal mode: one row for each token and rank, partial sums back."""

    name = "deepep normal"

    def __init__(self, deep_ep: Any, settings: Settings, experts: StandInExperts) -> None:
        self._settings = settings
        self._experts = experts
        self._ids_dtype = getattr(deep_ep, "topk_idx_t", torch.int64)
        self._num_local_experts = settings.num_experts // settings.ep_size
        kind = deep_ep.Buffer
        num_bytes = max(
            config.get_nvl_buffer_size_hint(settings.output().row_bytes, settings.ep_size)
            for config in (kind.get_dispatch_config(settings.ep_size), kind.get_combine_config(settings.ep_size))
        )
        self._buffer = kind(dist.group.WORLD, num_nvl_bytes=num_bytes)

    def takes(self, num_tokens: int) -> bool:
        """See `Contender.takes`: it has no use for a round without tokens."""
        return num_tokens > 0

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`."""
        mine = round_.mine
        self._round = round_
        self._sent = mine.payloads if len(mine.payloads) > 1 else mine.payloads[0]
        self._ids = mine.topk_ids.to(self._ids_dtype)
        return self.verify()

    def dispatch(self) -> tuple[Any, Tensor, Tensor]:
        """See `Contender.dispatch`. Returns the rows, their local experts (-1 for none) and their weights."""
        buffer, settings = self._buffer, self._settings
        rows_per_rank, _, rows_per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
            self._ids, settings.num_experts
        )
        received, ids, weights, _, self._handle, _ = buffer.dispatch(
            self._sent,
            num_tokens_per_rank=rows_per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=rows_per_expert,
            topk_idx=self._ids,
            topk_weights=self._round.mine.topk_weights,
            num_worst_tokens=self._round.num_tokens * settings.ep_size,
        )
        return received, ids, weights

    def write_rows(self) -> None:
        """See `Contender.write_rows`: the rows lie where combine reads them."""

    def combine(self) -> None:
        """See `Contender.combine`."""
        self._output, _, _ = self._buffer.combine(self._rows, self._handle)

    def verify(self) -> str | None:
        """See `Contender.verify`: a round whose experts work on what arrives."""
        received, local, weights = self.dispatch()
        first = self._round.rank * self._num_local_experts
        ids = torch.where(local >= 0, local + first, -1)
        payloads = received if isinstance(received, tuple) else (received,)
        self._rows = self._experts.rows(self._round.rank, ids, weights, payloads)
        self.combine()
        return differs_beyond_rounding(self._output, self._round.output, _TOLERANCE)

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """See `Contender.wire_bytes`."""
        return traffic.dispatch, traffic.combine

    def close(self) -> None:
        """See `Contender.close`."""
        del self._buffer
