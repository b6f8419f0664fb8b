"""Adapters in CUDA graphs: ranks replay graphs of different sizes, and a recipe cannot be set up during a capture."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from putget.adapters import shared
from putget.adapters.flashinfer import MoeAlltoAll
from tests.adapters.layer import Layer, same_bits
from tests.gpu.graphs import capture
from tests.gpu.ranks import Ranks, have_processes
from tests.harness import Rank


def layer_of(ep_size: int, seed: int) -> Layer:
    """Another number of tokens on every rank, one of them without any."""
    return Layer(
        num_tokens=tuple((3 * rank) % 9 for rank in range(ep_size)), num_experts=2 * ep_size, top_k=2, seed=seed
    )


def record_layer(rank: Rank, layer: Layer) -> None:
    """A body: warms up, then captures one layer with a batch and a runtime maximum of this rank's own."""
    a2a = MoeAlltoAll(
        SimpleNamespace(moe_ep_size=rank.size, moe_ep_rank=rank.rank),
        max_num_tokens=layer.max_tokens_per_rank,
        top_k=layer.top_k,
        num_experts=layer.num_experts,
        hidden_size=layer.hidden_size,
        comm=rank.comm,
        device=rank.device,
        timeout_s=20.0,
        warmup_timeout_s=20.0,
    )
    most = min(max(1, *layer.num_tokens) + rank.rank % 2, layer.max_tokens_per_rank)
    ids, weights = (tensor.to(rank.device) for tensor in layer.routes(rank.rank))
    x = layer.hidden(rank.rank).to(rank.device)
    out = torch.zeros_like(x)

    def run() -> None:
        rows, seen_ids, seen_weights = (t.flatten(0, 1) for t in a2a.dispatch(ids, [x, ids, weights], most, None, 1))
        result = layer.experts((rows,), seen_ids, seen_weights, rank.rank)
        a2a.combine(result.view(rank.size, most, -1), most, output=out)

    run()
    torch.cuda.current_stream(rank.device).synchronize()
    rank.state.update(graph=capture(rank, run), tensors=(ids, weights, x), out=out, a2a_of_flashinfer=a2a)


def replay_layer(rank: Rank, layer: Layer) -> torch.Tensor:
    """A body: new data, one replay."""
    for fixed, new in zip(rank.state["tensors"], (*layer.routes(rank.rank), layer.hidden(rank.rank)), strict=True):
        fixed.copy_(new)
    rank.state["graph"].replay()
    out: torch.Tensor = rank.state["out"].cpu()
    return out


def capture_too_early(rank: Rank, layer: Layer) -> str:
    """A body: the first dispatch of FP8 rows, inside a capture."""
    a2a = rank.state["a2a_of_flashinfer"]
    ids, weights = (tensor.to(rank.device) for tensor in layer.routes(rank.rank))
    rows = [tensor.to(rank.device) for tensor in layer.rows(rank.rank)]
    messages = []

    def run() -> None:
        with pytest.raises(ValueError) as caught:
            a2a.dispatch(ids, [*rows, ids, weights], layer.max_tokens_per_rank, None, 2)
        messages.append(str(caught.value))

    capture(rank, run)
    return messages[0]


def close_layers(rank: Rank) -> None:
    """A body: frees what the adapters keep."""
    rank.state.clear()
    shared.close_shared(rank.comm)


def test_graphs_of_different_sizes(ranks: Ranks) -> None:
    if not have_processes(ranks.size):
        pytest.skip(f"needs {ranks.size} CUDA GPUs")
    ranks.call(record_layer, layer_of(ranks.size, 0))
    for seed in range(1, 6):
        layer = layer_of(ranks.size, seed)
        for rank, combined in ranks.call(replay_layer, layer).items():
            assert same_bits(combined, layer.expected(rank)), rank
    early = replace(layer_of(ranks.size, 9), recipe="fp8")
    for message in ranks.call(capture_too_early, early).values():
        assert "while a CUDA graph is captured: run one round of these rows before" in message
    ranks.call(close_layers)
