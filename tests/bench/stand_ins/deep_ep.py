"""Stands in for DeepEP where there is no GPU: what the bench calls of `Buffer`, over torch.distributed on CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__version__ = "1.2.1"
topk_idx_t = torch.int64
GROUP = 128


@dataclass
class Config:
    chunk: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.chunk * hidden_bytes * num_ranks


class Buffer:
    """Attribute `broken` spoils what rank 0 does: "low latency" or "normal" is the mode whose combine goes wrong."""

    broken = ""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
    ) -> None:
        self._rank, self._size = group.rank(), group.size()
        assert (num_rdma_bytes > 0) == low_latency_mode
        assert (num_nvl_bytes > 0) == (not low_latency_mode)
        self._num_qps_per_rank = num_qps_per_rank
        self._low_latency_mode = low_latency_mode
        self._combine_buffer: Tensor | None = None

    @staticmethod
    def get_low_latency_rdma_size_hint(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        return max_tokens * hidden * num_experts * num_ranks

    @staticmethod
    def get_dispatch_config(_num_ranks: int) -> Config:
        return Config(6)

    @staticmethod
    def get_combine_config(_num_ranks: int) -> Config:
        return Config(4)

    def _everyone(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._size
        dist.all_gather_object(everyone, mine)
        return everyone

    # --- low-latency mode: a row for each token and expert, in no order that a caller may rely on ---

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int, use_fp8: bool = True
    ) -> tuple[Any, ...]:
        assert self._low_latency_mode
        assert x.dtype == torch.bfloat16
        assert topk_idx.dtype == topk_idx_t
        num_local = num_experts // self._size
        assert self._num_qps_per_rank == num_local
        hidden = x.shape[1]
        rows = torch.full((num_local, max_tokens * self._size, hidden), torch.nan, dtype=torch.bfloat16)
        sources = torch.full((num_local, max_tokens * self._size, 3), -1)
        counts = torch.zeros(num_local, dtype=torch.int32)
        for src, (theirs, ids) in enumerate(self._everyone((x, topk_idx))):
            for token, k in reversed((ids // num_local == self._rank).nonzero().tolist()):
                expert = int(ids[token, k]) % num_local
                slot = int(counts[expert])
                rows[expert, slot] = theirs[token]
                sources[expert, slot] = torch.tensor([src, token, k])
                counts[expert] += 1
        received: Any = rows
        if use_fp8:
            groups = rows.float().view(*rows.shape[:2], hidden // GROUP, GROUP)
            scales = groups.abs().amax(dim=-1).clamp(min=1e-4) / 448
            received = (groups / scales[..., None]).clamp(-448, 448).flatten(2).to(torch.float8_e4m3fn), scales
        return received, counts, (sources, rows.shape), None, None

    def get_next_low_latency_combine_buffer(self, handle: Any) -> Tensor:
        if self._combine_buffer is None:
            self._combine_buffer = torch.zeros(handle[1], dtype=torch.bfloat16)
        return self._combine_buffer

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any, zero_copy: bool, out: Tensor
    ) -> tuple[Tensor, None, None]:
        assert zero_copy
        assert x is self._combine_buffer
        total = torch.zeros(out.shape)
        for sources, rows in self._everyone((handle[0], x)):
            for expert, slot in (sources[..., 0] == self._rank).nonzero().tolist():
                _, token, k = sources[expert, slot].tolist()
                total[token] += topk_weights[token, k] * rows[expert, slot].float()
        if self.broken == "low latency" and self._rank == 0:
            total[0] *= 2
        return out.copy_(total), None, None

    # --- normal mode: a row for each token and rank ---

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        targets = topk_idx // (num_experts // self._size)
        is_token_in_rank = torch.stack([(targets == rank).any(dim=1) for rank in range(self._size)], dim=1)
        per_expert = topk_idx.flatten().bincount(minlength=num_experts)
        return is_token_in_rank.sum(dim=0), None, per_expert, is_token_in_rank, None

    def dispatch(
        self,
        x: Any,
        num_tokens_per_rank: Tensor,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_worst_tokens: int,
    ) -> tuple[Any, ...]:
        assert not self._low_latency_mode
        assert int(num_tokens_per_rank.sum()) == int(is_token_in_rank.sum())
        num_local = len(num_tokens_per_expert) // self._size
        parts = list(x) if isinstance(x, tuple) else [x]
        as_bytes = [part.view(torch.uint8) for part in parts]  # FP8 tensors cannot be pickled
        everyone = self._everyone((as_bytes, topk_idx, topk_weights, is_token_in_rank))
        self._is_here = [theirs[3][:, self._rank] for theirs in everyone]
        count = sum(int(here.sum()) for here in self._is_here)

        def gathered(pick: Any) -> Tensor:
            rows = torch.cat([pick(theirs)[here] for theirs, here in zip(everyone, self._is_here, strict=True)])
            padding = torch.zeros(num_worst_tokens - count, *rows.shape[1:], dtype=rows.dtype)
            return torch.cat([rows, padding])

        received = tuple(
            gathered(lambda theirs, i=index: theirs[0][i]).view(part.dtype) for index, part in enumerate(parts)
        )
        ids = gathered(lambda theirs: theirs[1])
        is_local = (ids // num_local == self._rank) & (torch.arange(num_worst_tokens) < count)[:, None]
        local = torch.where(is_local, ids % num_local, -1)
        weights = gathered(lambda theirs: theirs[2])
        return received if len(parts) > 1 else received[0], local, weights, [], is_token_in_rank, None

    def combine(self, x: Tensor, handle: Tensor) -> tuple[Tensor, None, None]:
        total = torch.zeros(len(handle), x.shape[1])
        for dst, (rows, is_here) in enumerate(self._everyone((x, self._is_here))):
            before = sum(int(here.sum()) for here in is_here[: self._rank])
            mine = int(is_here[self._rank].sum())
            total[handle[:, dst]] += rows[before : before + mine].float()
        if self.broken == "normal" and self._rank == 0:
            total[0] *= 2
        return total.to(x.dtype), None, None
