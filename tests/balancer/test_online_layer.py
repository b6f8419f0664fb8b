"""A Balancer on ExpertParallelMoE: in every iteration the oracle's bits for the placement in force."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from putget.balancer import Balancer, LoadHistory, Placement
from tests.balancer.online import options_of
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense
from tests.moe.layers import make_layer
from tests.moe.test_placed import oracle

SLOTS = 12
TOKENS = 4


def serve(rank: Rank, dense: Dense, iterations: int) -> tuple[list[int], int, str]:
    """A body: iterations whose output differs from the oracle's, moves, and what the placements were."""
    start = Placement.of(np.arange(SLOTS) % dense.num_experts, dense.num_experts)
    rng = np.random.default_rng(0)
    wrong, seen = [], hashlib.sha256()
    with make_layer(rank, dense, placement=start, count_experts=True, num_stats=7) as layer:
        options: dict[str, Any] = {
            "interval": 2,
            "history": LoadHistory(decay=0.1),
            "most_bytes": 1 << 17,
            "in_thread": False,
        }
        with Balancer(rank.comm, [layer], start, device=rank.device, **options_of(**options)) as balancer:
            for iteration in range(iterations):
                placement = balancer.placement
                seen.update(placement.physical_to_logical.tobytes())
                counts = rng.integers(0, TOKENS + 1, layer.a2a.ep_size).tolist()
                inputs = [dense.tokens(r, counts[r], iteration // 20) for r in range(layer.a2a.ep_size)]
                got = layer(inputs[rank.rank])
                if rank.rank == iteration % layer.a2a.ep_size:  # ranks take turns: the oracle plays all of them
                    want = oracle(layer, dense, placement, inputs, None)[rank.rank]
                    if not torch.equal(got, want):
                        wrong.append(iteration)
                balancer.step()
                mine = placement_of_rank(balancer.placement, rank.rank, layer.a2a.ep_size)
                assert layer.local_experts == mine
            return wrong, balancer.num_moves, seen.hexdigest()


def placement_of_rank(placement: Placement, rank: int, ep_size: int) -> list[int]:
    held: list[int] = placement.physical_to_logical[0].reshape(ep_size, -1)[rank].tolist()
    return held


@pytest.mark.parametrize("dense", [Dense(), Dense(fp8=True, shared=128)], ids=["bf16", "fp8, shared"])
def test_equals_the_oracle_of_each_iterations_placement(dense: Dense) -> None:
    outcomes = run_ranks(4, serve, dense, 80)
    for wrong, moves, _ in outcomes:
        assert wrong == []
        assert moves > 3
    assert len({seen for _, _, seen in outcomes}) == 1


def refused(rank: Rank, dense: Dense) -> list[str]:
    """A body: layers that cannot be balanced."""
    start = Placement.of(np.arange(SLOTS) % dense.num_experts, dense.num_experts)
    told = []
    sizes = {"placement": start, "num_stats": 7}
    for options, placement in (
        ({}, start),
        ({**sizes}, start),
        ({**sizes, "count_experts": True, "num_stats": 2}, start),
        ({**sizes, "count_experts": True}, Placement.of(np.arange(SLOTS)[::-1] % dense.num_experts, dense.num_experts)),
    ):
        with make_layer(rank, dense, **options) as layer, pytest.raises(ValueError) as caught:
            Balancer(rank.comm, [layer], placement, device=rank.device)
        told.append(str(caught.value))
    with make_layer(rank, dense, **sizes, count_experts=True) as layer:
        for options in ({"most_bytes": 24}, {"timeout_s": 0}, {"interval": 0}, {"num_sms": 0}, {"cells": 0}):
            with pytest.raises(ValueError) as caught:
                Balancer(rank.comm, [layer], start, device=rank.device, **options_of(**options))
            told.append(str(caught.value))
    return told


def test_layers_that_cannot_be_balanced_are_refused() -> None:
    for told in run_ranks(2, refused, Dense()):
        assert told[0].startswith("a balancer needs a layer made with slots")
        assert told[1].startswith("a balancer needs a layer made with slots")
        assert told[2].startswith("num_stats is 2, allowed are ints from 3 to")
        assert told[3] == "layers[0] has another placement in force than layer 0 of placement"
        assert told[4] == "most_bytes is 24, allowed are multiples of 16 from 16 on"
        assert told[5].startswith("timeout_s is 0, expected seconds above 0")
        for text, name in zip(told[6:], ("interval", "num_sms", "cells"), strict=True):
            assert f"{name} is 0" in text
