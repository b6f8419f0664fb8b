"""One small layer as an engine would run it: inputs from a seed, experts for any rows, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from putget import reference
from putget_bench.quantise import dequantise, quantise


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, the same on every rank except for the tokens.

    Attributes:
        num_tokens: tokens of each rank.
        recipe: "bf16", "fp8" or "nvfp4": what dispatch carries.
        no_expert: share of ids that are -1.
    """

    num_tokens: tuple[int, ...]
    num_experts: int = 8
    top_k: int = 3
    hidden_size: int = 256
    max_tokens_per_rank: int = 8
    recipe: str = "bf16"
    no_expert: float = 0.1
    seed: int = 0
    owners: tuple[int, ...] = ()  # of each expert; by default equal blocks

    @property
    def ep_size(self) -> int:
        return len(self.num_tokens)

    @property
    def table(self) -> Tensor:
        """[num_experts] int32: the rank of each expert."""
        if self.owners:
            return torch.tensor(self.owners, dtype=torch.int32)
        assert self.num_experts % self.ep_size == 0
        return reference.default_expert_to_rank(self.num_experts, self.ep_size)

    def expert_map(self, rank: int) -> Tensor:
        """[num_experts] int32, as vLLM has it: the local index of this rank's experts, -1 for others."""
        mine = self.table == rank
        return torch.where(mine, mine.int().cumsum(0) - 1, -1).int()

    def routes(self, rank: int) -> tuple[Tensor, Tensor]:
        """topk_ids [num_tokens, top_k] int32, no expert twice in a token, and weights, float32."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + rank)
        scores = torch.rand(self.num_tokens[rank], self.num_experts, generator=generator)
        weights, ids = scores.topk(self.top_k, dim=1)
        chance = torch.rand(ids.shape, generator=generator)
        return ids.masked_fill(chance < self.no_expert, -1).int(), weights

    def hidden(self, rank: int) -> Tensor:
        """[num_tokens, hidden_size] bfloat16."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + 500 + rank)
        return torch.randn(self.num_tokens[rank], self.hidden_size, generator=generator).bfloat16()

    def rows(self, rank: int) -> tuple[Tensor, ...]:
        """The payloads of the recipe."""
        return quantise(self.recipe, self.hidden(rank).float())

    def experts(self, rows: tuple[Tensor, ...], ids: Tensor, weights: Tensor, rank: int) -> Tensor:
        """The weighted sum over the experts of `rank`, for each of any number of rows: [..., hidden_size] bfloat16.

        Rows without one of these experts are NaN, which must never be read.
        """
        mine = (ids >= 0) & (_table_on(self, ids.device)[ids.clamp(0, self.num_experts - 1).long()] == rank)
        factors = torch.where(mine, weights * (1 + ids / self.num_experts), 0.0)
        factors = torch.where(mine.any(-1), factors.double().sum(-1).float(), float("nan"))
        return (dequantise(self.recipe, rows, self.hidden_size) * factors[..., None]).bfloat16()

    def expected(
        self, rank: int, combine_dtype: torch.dtype | None = None, domain_of: tuple[int, ...] | None = None
    ) -> Tensor:
        """The result of combine on `rank`: [num_tokens, hidden_size] bfloat16, bit for bit."""
        sent = [reference.Sent(*self.routes(src), self.rows(src)) for src in range(self.ep_size)]
        routings, arrived = reference.dispatch(sent, self.table, max_rows=self.max_tokens_per_rank)
        outputs = [self.experts(a.payloads, a.topk_ids, a.topk_weights, dst) for dst, a in enumerate(arrived)]
        return reference.combine(routings[rank], outputs, rank, combine_dtype=combine_dtype, domain_of=domain_of)


@cache
def _table_on(layer: Layer, device: torch.device) -> Tensor:
    # Kept: a copy to a GPU cannot be captured.
    return layer.table.to(device)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
