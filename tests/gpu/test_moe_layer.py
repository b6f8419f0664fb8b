"""ExpertParallelMoE on GPUs: eager and in CUDA graphs, which ranks replay with batches of their own size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from putget.balancer import Placement
from tests.gpu.graphs import capture
from tests.gpu.ranks import Ranks, have_processes
from tests.harness import Rank
from tests.moe.dense import Dense, relative_error
from tests.moe.layers import load_kernels, make_layer, tolerance

DENSE = {
    "bf16": Dense(hidden=256, groups=(4, 2), shared=128, top_k=4),
    "fp8": Dense(hidden=512, groups=(4, 2), shared=128, top_k=4, intermediate=256, fp8=True),
}
CHANGES: dict[str, dict[str, Any]] = {"fp8 of bf16 rows": {"row_dtype": torch.bfloat16}}
DENSE["fp8 of bf16 rows"] = DENSE["fp8"]
# Experts with replicas, chosen in the router's kernel and by a kernel of its own.
DENSE["placed bf16"], DENSE["placed fp8"] = DENSE["bf16"], DENSE["fp8"]
CHANGES["placed bf16"] = {"num_slots": 16, "replica_choice": "hash"}
CHANGES["placed fp8"] = {"num_slots": 16, "replica_choice": "balanced"}
ROUNDS = 4


def tokens_of(rank: int, round_: int) -> int:
    """Another number on every rank and in every round, sometimes none."""
    return (3 * rank + 5 * round_ + 2) % 9


def open_layer(rank: Rank, kind: str, alone: bool) -> None:
    """A body: makes the layer; `alone` is for ranks that share a GPU, where no stream may be another rank's."""
    rank.state["layer"] = make_layer(rank, DENSE[kind], overlap_shared=not alone, **CHANGES.get(kind, {}))


def load(rank: Rank, dense: Dense) -> None:
    """A body for one rank at a time: nothing is loaded any more while ranks wait for each other on one GPU."""
    load_kernels(rank.state["layer"], dense.tokens(0, 8).to(rank.device), (1, 6, 16, 32, 64))


def play(rank: Rank, dense: Dense, round_: int) -> Tensor:
    """A body: one call."""
    x = dense.tokens(rank.rank, tokens_of(rank.rank, round_), round_).to(rank.device)
    torch.cuda.current_stream(rank.device).synchronize()
    rank.meet()
    out: Tensor = rank.state["layer"](x)
    result = out.cpu()
    rank.meet()
    rank.state["layer"].check()
    return result


def close_layer(rank: Rank) -> None:
    """A body."""
    rank.state.pop("layer").close()


@pytest.mark.parametrize("kind", DENSE)
def test_equals_a_dense_layer(ranks: Ranks, kind: str) -> None:
    dense = DENSE[kind]
    alone = not have_processes(ranks.size)
    ranks.call(open_layer, kind, alone)
    for rank in range(ranks.size):
        ranks.call(load, dense, ranks=[rank])
    for round_ in range(ROUNDS):
        for rank, got in ranks.call(play, dense, round_).items():
            want = dense.forward(dense.tokens(rank, tokens_of(rank, round_), round_))
            assert relative_error(got, want) <= tolerance(dense), (rank, round_)
    ranks.call(close_layer)


def record(rank: Rank, dense: Dense, num_tokens: tuple[int, ...]) -> None:
    """A body: captures calls with batches of this rank's sizes, after one eager call each."""
    layer: Any = rank.state["layer"]
    inputs = [dense.tokens(rank.rank, count).to(rank.device) for count in num_tokens]
    graphs: list[Any] = []
    for x in inputs:
        outputs: list[Tensor] = []

        def run(x: Tensor = x, outputs: list[Tensor] = outputs) -> None:
            outputs[:] = [layer(x)]

        run()
        torch.cuda.synchronize()
        graphs.append((capture(rank, run), x, outputs))
    rank.state["graphs"] = graphs


def replay(rank: Rank, dense: Dense, which: int, round_: int) -> Tensor:
    """A body: new data, then the graph of one size."""
    graph, x, outputs = rank.state["graphs"][which]
    x.copy_(dense.tokens(rank.rank, len(x), round_))
    graph.replay()
    result: Tensor = outputs[0].cpu()
    return result


@pytest.mark.parametrize("kind", DENSE)
def test_graphs_of_different_sizes(ranks: Ranks, kind: str) -> None:
    if not have_processes(ranks.size):
        pytest.skip(f"needs {ranks.size} CUDA GPUs")
    dense = DENSE[kind]
    sizes = {rank: (8, (3 * rank) % 8, 1) for rank in range(ranks.size)}
    ranks.call(open_layer, kind, False)
    for rank in range(ranks.size):
        ranks.submit(rank, record, dense, sizes[rank])
    for rank in range(ranks.size):
        ranks.result(rank)
    for round_ in range(1, 6):
        chosen = {rank: (round_ + rank) % 3 for rank in range(ranks.size)}  # ranks replay graphs of different sizes
        for rank, which in chosen.items():
            ranks.submit(rank, replay, dense, which, round_)
        for rank, which in chosen.items():
            want = dense.forward(dense.tokens(rank, sizes[rank][which], round_))
            assert relative_error(ranks.result(rank), want) <= tolerance(dense), (rank, round_)
    ranks.call(close_layer)


def move(rank: Rank, dense: Dense, placement: Placement) -> None:
    """A body: another placement, which graphs obey."""
    rank.state["layer"].set_placement(placement, dense.state())
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["placed bf16", "placed fp8"])
def test_graphs_obey_placements_that_come_later(ranks: Ranks, kind: str) -> None:
    if not have_processes(ranks.size):
        pytest.skip(f"needs {ranks.size} CUDA GPUs")
    dense = DENSE[kind]
    ranks.call(open_layer, kind, False)
    for rank in range(ranks.size):
        ranks.submit(rank, record, dense, (8, 5))
    for rank in range(ranks.size):
        ranks.result(rank)
    for round_ in range(1, 6):
        slots = np.random.default_rng(round_).permutation(np.arange(16) % 8)
        ranks.call(move, dense, Placement.of(slots, 8))
        for rank in range(ranks.size):
            ranks.submit(rank, replay, dense, round_ % 2, round_)
        for rank in range(ranks.size):
            want = dense.forward(dense.tokens(rank, (8, 5)[round_ % 2], round_))
            assert relative_error(ranks.result(rank), want) <= tolerance(dense), (rank, round_)
    ranks.call(close_layer)


def marked(rank: Rank, dense: Dense) -> list[str]:
    """A body: names of the ranges of one call."""
    with make_layer(rank, dense, nvtx=True) as layer:
        names: list[str] = []
        push = torch.cuda.nvtx.range_push
        torch.cuda.nvtx.range_push = lambda name: (names.append(name), push(name))[1]
        try:
            layer(dense.tokens(rank.rank, 2).to(rank.device))
        finally:
            torch.cuda.nvtx.range_push = push
    return names


def test_nvtx_ranges(ranks: Ranks) -> None:
    if not have_processes(ranks.size):
        pytest.skip(f"needs {ranks.size} CUDA GPUs")
    steps = ["route", "dispatch_start", "shared_experts", "dispatch_finish", "expert_major", "experts", "combine"]
    for names in ranks.call(marked, DENSE["bf16"]).values():
        assert names == [f"putget.moe.{step}" for step in steps]
