"""Every rank's input of a round: generated from the seed, so that each rank knows what all others send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from putget import reference
from putget_bench import quantise
from putget_bench.routing import Router
from putget_bench.settings import Settings


@dataclass(frozen=True)
class Inputs:
    """One rank's arguments of dispatch, on its device.

    Attributes:
        topk_ids: [num_tokens, top_k] int32.
        topk_weights: [num_tokens, top_k] float32.
        payloads: each [num_tokens, *shape].
    """

    topk_ids: Tensor
    topk_weights: Tensor
    payloads: tuple[Tensor, ...]


class Source:
    """The inputs of all ranks, at any size up to the largest. Smaller sizes are prefixes of the rows of the largest."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._router: Router = settings.make_router()
        self._device = device
        capacity = max(settings.batches)
        self._rows = [self._generate(settings, rank, capacity) for rank in range(settings.ep_size)]

    def _generate(self, settings: Settings, rank: int, num_tokens: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        generator = torch.Generator(self._device).manual_seed(settings.seed * 1_000_003 + rank)
        hidden = torch.randn(num_tokens, settings.hidden_size, device=self._device, generator=generator)
        weights = torch.rand(num_tokens, settings.top_k, device=self._device, generator=generator) + 0.1
        dtype = settings.payloads()[0].dtype
        return weights / weights.sum(1, keepdim=True), quantise.quantise(settings.quant, hidden, dtype)

    def inputs(self, rank: int, num_tokens: int) -> Inputs:
        """One rank's tokens when every rank has so many."""
        weights, payloads = self._rows[rank]
        return Inputs(
            topk_ids=self._router(rank, num_tokens).to(self._device),
            topk_weights=weights[:num_tokens],
            payloads=tuple(payload[:num_tokens] for payload in payloads),
        )


class Experts(Protocol):
    """The work between dispatch and combine."""

    def rows(self, rank: int, topk_ids: Tensor, topk_weights: Tensor, payloads: Sequence[Tensor]) -> Tensor:
        """The weighted sum over the experts of one rank.

        Args:
            rank: whose experts.
            topk_ids: [..., top_k] int32, -1 for no expert.
            topk_weights: [..., top_k] float32.
            payloads: each [..., *shape].

        Returns:
            [..., hidden_size] in the output dtype; zero where the rank has no expert of the row.
        """


class StandInExperts:
    """Cheap experts: expert e multiplies a row by (1 + e / num_experts). Their work is not what is measured.

    The result depends on rank, ids, weights and every value of the row, so a row that is lost, stale or misplaced
    shows. It is elementwise, so any rank computes another rank's rows with the same bits.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._dtype = settings.output().dtype
        self._expert_to_rank = reference.default_expert_to_rank(settings.num_experts, settings.ep_size).to(device)

    def rows(self, rank: int, topk_ids: Tensor, topk_weights: Tensor, payloads: Sequence[Tensor]) -> Tensor:
        """See `Experts.rows`."""
        gain = torch.zeros(topk_ids.shape[:-1], device=topk_ids.device)
        # One k after the other: a sum over a dimension may add in another order for another shape.
        for k in range(topk_ids.shape[-1]):
            ids = topk_ids[..., k].long()
            is_local = (ids >= 0) & (self._expert_to_rank[ids.clamp(min=0)] == rank)
            term = topk_weights[..., k] * (1 + ids / self._settings.num_experts)
            gain = gain + torch.where(is_local, term, 0)
        hidden = quantise.dequantise(self._settings.quant, tuple(payloads), self._settings.hidden_size)
        return torch.where(gain[..., None] != 0, hidden * gain[..., None], 0).to(self._dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality of two tensors of one shape and dtype, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
