"""Tokens in BF16 with a Balancer and without: placement changes which partial sums are rounded, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import putget
from putget.balancer import BalancedLayer, Balancer, ExpertBlobs, LoadHistory, Placement, ReplicaChoice
from tests.balancer.online import options_of
from tests.harness import Rank, run_ranks

RANKS, EXPERTS, EACH, TOP_K, TOKENS, HIDDEN, ITERATIONS = 4, 12, 4, 3, 6, 40, 60
BF16_ROUNDING = 2.0**-8  # of a number, at most; a sum in float32 has less than 2^-20 of its own


def factors_of(expert: int) -> Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(expert)).bfloat16()


class Way:
    """The experts of this rank by one placement, and the rounds to them."""

    def __init__(self, rank: Rank, start: Placement, num_stats: int) -> None:
        self.first = rank.rank * EACH
        held = start.physical_to_logical[0, self.first :][:EACH].tolist()
        self.factors = torch.stack([factors_of(expert) for expert in held])
        self.choose = ReplicaChoice(start, ep_size=rank.size, ep_rank=rank.rank)
        self.load = torch.zeros(EXPERTS, dtype=torch.int32)
        row = putget.Payload((HIDDEN,), torch.bfloat16)
        sizes: dict[str, Any] = {"num_experts": rank.size * EACH, "top_k": TOP_K, "max_tokens_per_rank": TOKENS}
        self.a2a = rank.all_to_all(payloads=[row], output=row, num_stats=num_stats, timeout_s=20.0, **sizes)

    def run(self, experts: Tensor, weights: Tensor, x: Tensor, balancer: Balancer | None) -> Tensor:
        """One round: each rank sums its experts' rows of a token in float32, and rounds the sum."""
        ids = self.choose(experts)
        received = self.a2a.dispatch(ids, weights, x, stats=None if balancer is None else balancer.stats)
        if balancer is not None:
            assert received.stats is not None
            balancer.hear(received.stats)
        slots = received.topk_ids - self.first
        is_here = (slots >= 0) & (slots < EACH)
        rows = received.payloads[0][:, :, None, :].float() * self.factors[slots.clamp(0, EACH - 1).long()].float()
        parts = torch.where(is_here[..., None], received.topk_weights[..., None] * rows, 0.0)
        self.a2a.combine_input.copy_(parts.sum(2))
        return self.a2a.combine()


def serve(rank: Rank) -> tuple[int, int, int]:
    """A body: numbers that differ, all numbers, and experts that moved."""
    start = Placement.of(np.arange(rank.size * EACH)[None] % EXPERTS, EXPERTS)
    balanced, plain = Way(rank, start, 9), Way(rank, start, 0)
    layer = BalancedLayer(
        ExpertBlobs({"w": balanced.factors}), balanced.load, balanced.choose.tables, balanced.choose.tables_of
    )
    every = torch.stack([factors_of(expert) for expert in range(EXPERTS)]).float()
    options: dict[str, Any] = {"interval": 3, "history": LoadHistory(decay=0.2), "in_thread": False}
    differ = numbers = 0
    with Balancer(
        rank.comm, [layer], start, num_stats=9, device="cpu", timeout_s=20.0, **options_of(**options)
    ) as balancer:
        for iteration in range(ITERATIONS):
            generator = torch.Generator().manual_seed(1000 * iteration + rank.rank)
            count = (iteration + rank.rank) % (TOKENS + 1)
            likely = torch.roll(1.0 / torch.arange(1, EXPERTS + 1), iteration // 12)
            experts = torch.zeros(count, TOP_K, dtype=torch.int32)
            if count:
                experts = torch.multinomial(likely.expand(count, -1), TOP_K, generator=generator).int()
            weights = torch.rand(count, TOP_K, generator=generator)
            x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
            balanced.load.add_(torch.bincount(experts.flatten(), minlength=EXPERTS).int())
            found = balanced.run(experts, weights, x, balancer)
            without = plain.run(experts, weights, x, None)
            sizes = (weights[..., None] * x[:, None].float() * every[experts.long()]).abs().sum(1)
            # Each partial sum is rounded once, and so is their sum: four roundings in both ways together.
            assert ((found.float() - without.float()).abs() <= 4 * BF16_ROUNDING * sizes).all(), iteration
            differ += int((found != without).sum())
            numbers += found.numel()
            balancer.step()
        moves = balancer.num_moves
    for way in (balanced, plain):
        way.a2a.close()
    return differ, numbers, moves


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_balancer_changes_no_more_than_roundings(mode: str) -> None:
    outcomes = run_ranks(RANKS, serve, mode=mode)
    differ, numbers = (sum(outcome[part] for outcome in outcomes) for part in (0, 1))
    assert all(moves > 5 for _, _, moves in outcomes)
    # Most partial sums are of the same experts: a placement that moves rows to others' experts would show at once.
    assert 0 < differ < numbers / 2
