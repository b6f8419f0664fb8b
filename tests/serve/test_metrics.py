"""Load and moves of experts in a server's metrics."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from putget.adapters.transformers.batching import Done
from putget.balancer import PlanOptions
from putget_serve import metrics
from putget_serve.garbage import Garbage
from tests.adapters.transformers.test_spreading import HIDDEN, TOP_K, Model, made
from tests.harness import Rank, run_ranks

RANKS, LAYERS, EXPERTS = 2, 3, 5


def values(text: str, name: str, label: str) -> list[float]:
    """The values of a metric by a label, in its order."""
    found = re.findall(rf'^putget_serve_{name}\{{rank="\d",{label}="(\d+)"\}} (\S+)$', text, re.M)
    assert [int(number) for number, _ in found] == list(range(len(found)))
    return [float(value) for _, value in found]


def serve_some(rank: Rank) -> list[Any]:
    """A body: all tokens go to experts 0 and 1, which rank 0 holds at first; the balancer shares them out."""
    model = Model(LAYERS, EXPERTS)
    plan = PlanOptions(interval=1, in_thread=False, min_gain=0.0)
    found = made(rank, model, num_slots=6, balance="online", plan=plan)
    manager = SimpleNamespace(
        spread=found, done=Done(), batch_processor=None, model=SimpleNamespace(device=torch.device("cpu"))
    )
    before = metrics.text(manager, Garbage())
    with found.together():
        for _ in range(40):
            model(torch.ones(4, HIDDEN), torch.tensor([[0, 1]] * 4), torch.ones(4, TOP_K))
    text = metrics.text(manager, Garbage())
    balancer = found.balancer
    assert "layer_imbalance" not in before
    assert values(text, "layer_imbalance", "layer") == balancer.placement.imbalance(balancer.load, RANKS).tolist()
    assert values(text, "layer_busiest_expert", "layer") == [EXPERTS / 2] * LAYERS
    assert np.isclose(values(text, "rank_load", "of"), 0.5).all()
    (moves,) = re.findall(rf'^putget_serve_moves_total\{{rank="{rank.rank}"\}} (\d+)$', text, re.M)
    (moved,) = re.findall(rf'^putget_serve_moved_bytes_total\{{rank="{rank.rank}"\}} (\d+)$', text, re.M)
    bytes_of_one = sum(-(-weight[0].nbytes // 16) * 16 for weight in model.layers[0].parameters())
    found.end()
    return [int(moves), int(moved) == int(moves) * bytes_of_one]


def test_the_load_of_ranks_and_layers_and_the_moves_of_experts_are_told() -> None:
    zero, one = run_ranks(RANKS, serve_some)
    assert zero == one
    assert zero[0] >= LAYERS
    assert zero[1]
