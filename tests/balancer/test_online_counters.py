"""Counters of experts' loads that wrap around lose nothing; counters that a caller sets to zero are no huge load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import putget
from putget.balancer import BalancedLayer, Balancer, ExpertBlobs, LoadHistory, Placement, ReplicaChoice
from tests.balancer.online import options_of
from tests.harness import Rank, run_ranks

EXPERTS, TOKENS = 4, 3
ITERATIONS, RESET = 24, 12


class Seen(LoadHistory):
    """Keeps the windows."""

    def __init__(self) -> None:
        super().__init__(decay=0.5)
        self.windows: list[list[float]] = []

    def add(self, load: Any) -> None:
        super().add(load)
        self.windows.append(np.asarray(load)[0].tolist())


def count(rank: Rank, start: int, is_reset: bool) -> list[list[float]]:
    """A body: the windows of one layer, in whose every iteration each expert gets as many tokens."""
    placement = Placement.of([list(range(EXPERTS))], EXPERTS)
    choose = ReplicaChoice(placement, ep_size=1)
    load = torch.full((EXPERTS,), start, dtype=torch.int32)
    layer = BalancedLayer(ExpertBlobs({"w": torch.zeros(EXPERTS, 4)}), load, choose.tables, choose.tables_of)
    row, seen = putget.Payload((1,), torch.float32), Seen()
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 1, "max_tokens_per_rank": 1, "payloads": [row]}
    none = torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, 1), torch.zeros(0, 1)
    options: dict[str, Any] = {"num_stats": 2 + EXPERTS, "interval": 2, "history": seen, "device": "cpu"}
    with (
        rank.all_to_all(output=row, num_stats=2 + EXPERTS, **sizes) as a2a,
        Balancer(rank.comm, [layer], placement, **options_of(in_thread=False, **options)) as balancer,
    ):
        for iteration in range(ITERATIONS):
            if is_reset and iteration == RESET:
                load.zero_()
            load.add_(TOKENS)
            balancer.hear(a2a.dispatch(*none, stats=balancer.stats).stats)
            a2a.release()
            balancer.step()
    return seen.windows


@pytest.mark.parametrize("start", [0, 1000, 2**31 - 1 - 10 * TOKENS, -(2**31) + 5, -10 * TOKENS, -1])
def test_a_counter_that_wraps_loses_nothing(start: int) -> None:
    """Below 2^31 and below 2^32, as int32 holds it."""
    (windows,) = run_ranks(1, count, start, False, mode="thread")
    assert len(windows) >= 4
    length = [window[0] / TOKENS for window in windows]  # iterations, as many for each expert
    assert all(window == [window[0]] * EXPERTS for window in windows)
    assert all(number == int(number) and 1 <= number <= ITERATIONS for number in length)
    assert sum(length) >= ITERATIONS - 8  # all but what the last windows have not told yet


@pytest.mark.parametrize("start", [0, 10**6, 2**31 - 1 - 100 * TOKENS, -(2**31) + 5, -(10**9)])
def test_a_counter_that_is_set_to_zero_is_no_load(start: int) -> None:
    (windows,) = run_ranks(1, count, start, True, mode="thread")
    assert len(windows) >= 4
    assert all(0 < tokens <= TOKENS * ITERATIONS for window in windows for tokens in window)
