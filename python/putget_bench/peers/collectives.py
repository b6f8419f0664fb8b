"""The collectives of torch.distributed (NCCL on GPUs, gloo on CPUs) as contenders."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager as _coalesced

from putget_bench.contender import Contender, Round, differs_beyond_rounding
from putget_bench.environment import nccl_version
from putget_bench.inputs import StandInExperts, same_bytes
from putget_bench.settings import Settings
from putget_bench.traffic import Traffic

# Newer torch has other names for these two and warns about the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TOLERANCE = 0.02  # BF16 sums in another order, of rows that were rounded once


def describe(device: str) -> str:
    """The library that runs underneath on a device."""
    return f"NCCL {nccl_version()}" if device == "cuda" else "torch.distributed over gloo: NCCL needs GPUs"


def make(settings: Settings, experts: StandInExperts, device: torch.device) -> list[Contender]:
    """The two contenders, in a group of their own. Collective.

    Raises:
        ImportError: this torch has no NCCL.
    """
    if device.type == "cuda" and not dist.is_nccl_available():
        raise ImportError("this torch has no NCCL")
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(backend=backend)
    return [AllGather(group, backend, settings, experts), AllToAllSingle(group, backend, settings, experts)]


def as_bytes(rows: Tensor) -> Tensor:
    """[n, ...] of any dtype as [n, bytes]: collectives do not know every dtype."""
    return rows.contiguous().flatten(1).view(torch.uint8)


class AllGather:
    """All-gather of every token (rows, scales, ids, weights in one coalesced call), reduce-scatter of partial sums."""

    def __init__(self, group: object, backend: str, settings: Settings, experts: StandInExperts) -> None:
        self.name = f"{backend} AG+RS"
        self._group: Any = group
        self._is_coalesced = backend == "nccl"
        self._size = settings.ep_size
        self._experts = experts

    def takes(self, num_tokens: int) -> bool:
        """See `Contender.takes`: without tokens there is nothing for a collective to move."""
        return num_tokens > 0

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`."""
        mine = round_.mine
        self._round = round_
        self._sent = [as_bytes(part) for part in (*mine.payloads, mine.topk_ids, mine.topk_weights)]
        self._gathered = [part.new_empty(self._size * len(part), part.shape[1]) for part in self._sent]
        self._output = torch.empty_like(round_.output)
        self.dispatch()
        for index, part in enumerate(self._gathered):
            everyone = [(*sent.payloads, sent.topk_ids, sent.topk_weights)[index] for sent in round_.inputs]
            if not same_bytes(part, torch.cat([as_bytes(rows) for rows in everyone])):
                return "all-gather delivered wrong bytes"
        rows = [
            self._experts.rows(round_.rank, sent.topk_ids, sent.topk_weights, sent.payloads) for sent in round_.inputs
        ]
        self._partial = torch.cat(rows)
        self.combine()
        return self.verify()

    def dispatch(self) -> None:
        """See `Contender.dispatch`."""
        if not self._is_coalesced:
            self._gather_all()
            return
        with _coalesced(group=self._group, device=self._sent[0].device):
            self._gather_all()

    def _gather_all(self) -> None:
        for gathered, sent in zip(self._gathered, self._sent, strict=True):
            all_gather(gathered, sent, group=self._group)

    def write_rows(self) -> None:
        """See `Contender.write_rows`: the partial sums lie where reduce-scatter reads them."""

    def combine(self) -> None:
        """See `Contender.combine`."""
        reduce_scatter(self._output, self._partial, group=self._group)

    def verify(self) -> str | None:
        """See `Contender.verify`."""
        return differs_beyond_rounding(self._output, self._round.output, _TOLERANCE)

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """See `Contender.wire_bytes`."""
        return traffic.all_gather, traffic.reduce_scatter

    def close(self) -> None:
        """See `Contender.close`."""


class AllToAllSingle:
    """All-to-all of the deduplicated rows, with the real splits known to the host beforehand.

    That is generous: a real engine has to exchange the counts and bring them to the host first, or to pad to the
    largest. Packing the rows by target rank and adding them up at the end belong to the timed work, as for putget.
    """

    def __init__(self, group: object, backend: str, settings: Settings, experts: StandInExperts) -> None:
        self.name = f"{backend} all-to-all"
        self._group: Any = group
        self._size = settings.ep_size
        self._experts = experts

    def takes(self, num_tokens: int) -> bool:
        """See `Contender.takes`: without tokens there is nothing for a collective to move."""
        return num_tokens > 0

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`."""
        mine, ranks = round_.mine, range(self._size)
        self._round = round_
        to_each = [round_.tokens_from(round_.rank, dst) for dst in ranks]
        self._send_counts = [len(tokens) for tokens in to_each]
        self._receive_counts = [len(round_.tokens_from(src, round_.rank)) for src in ranks]
        self._order = torch.cat(to_each)
        self._sent = [as_bytes(part) for part in (*mine.payloads, mine.topk_ids, mine.topk_weights)]
        self._row = torch.empty(len(self._order), sum(part.shape[1] for part in self._sent), dtype=torch.uint8).to(
            self._order.device
        )
        self._received = self._row.new_empty(sum(self._receive_counts), self._row.shape[1])
        self.dispatch()
        expected, rows = [], []
        for src, sent in zip(ranks, round_.inputs, strict=True):
            tokens = round_.tokens_from(src, round_.rank)
            parts = [part[tokens] for part in (*sent.payloads, sent.topk_ids, sent.topk_weights)]
            expected.append(torch.cat([as_bytes(part) for part in parts], dim=1))
            rows.append(self._experts.rows(round_.rank, parts[-2], parts[-1], parts[:-2]))
        if not same_bytes(self._received, torch.cat(expected)):
            return "all-to-all delivered wrong bytes"
        self._rows = torch.cat(rows)
        self._returned = self._rows.new_empty(len(self._order), self._rows.shape[1])
        self._output = torch.empty_like(round_.output)
        self.combine()
        return self.verify()

    def dispatch(self) -> None:
        """See `Contender.dispatch`."""
        torch.cat([part[self._order] for part in self._sent], dim=1, out=self._row)
        dist.all_to_all_single(self._received, self._row, self._receive_counts, self._send_counts, group=self._group)

    def write_rows(self) -> None:
        """See `Contender.write_rows`: the rows lie where all-to-all reads them."""

    def combine(self) -> None:
        """See `Contender.combine`."""
        dist.all_to_all_single(self._returned, self._rows, self._send_counts, self._receive_counts, group=self._group)
        total = torch.zeros(self._output.shape, dtype=torch.float32, device=self._output.device)
        self._output.copy_(total.index_add_(0, self._order, self._returned.float()))

    def verify(self) -> str | None:
        """See `Contender.verify`."""
        return differs_beyond_rounding(self._output, self._round.output, _TOLERANCE)

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """See `Contender.wire_bytes`."""
        return traffic.dispatch, traffic.combine

    def close(self) -> None:
        """See `Contender.close`."""
