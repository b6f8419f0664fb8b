"""replay_calls: what holds without a GPU. Replays themselves are in tests/gpu/test_replays.py."""

from __future__ import annotations

import pytest
import torch

from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense
from tests.moe.layers import make_layer


def play(rank: Rank) -> None:
    """A body: on the CPU calls stay as they are, and what is out of range is refused."""
    dense = Dense()
    with make_layer(rank, dense) as layer:
        x = dense.tokens(rank.rank, 3).to(rank.device)
        want = layer(x)
        for wrong in (-1, 9, 2.0):
            with pytest.raises(ValueError, match=f"max_tokens is {wrong}"):
                layer.replay_calls(wrong)  # type: ignore[arg-type]
        layer.replay_calls(8)
        for _ in range(3):
            assert torch.equal(layer(x), want)
        layer.replay_calls(0)
        assert torch.equal(layer(x), want)


def test_calls_on_the_cpu_stay_as_they_are() -> None:
    run_ranks(2, play)
