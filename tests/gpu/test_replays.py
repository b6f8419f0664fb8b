"""Calls that a layer replays by itself: the results of eager calls, also when what a graph holds has changed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import putget
from putget.moe import ExpertParallelMoE
from tests.gpu.ranks import Ranks, have_processes
from tests.harness import Rank
from tests.moe.dense import Dense, relative_error
from tests.moe.layers import make_layer, options_of, tolerance

KINDS = {
    "bf16": Dense(hidden=256, groups=(4, 2), shared=128, top_k=4),
    "fp8": Dense(hidden=512, groups=(4, 2), shared=128, top_k=4, intermediate=256, fp8=True),
}


def open_layer(rank: Rank, dense: Dense) -> None:
    """A body."""
    layer = rank.state["layer"] = make_layer(rank, dense, count_experts=True)
    layer.replay_calls(8)


def play(rank: Rank, dense: Dense, round_: int, valid: int | None) -> tuple[Tensor, int]:
    """A body: one call with a batch of this rank's own size; and how many graphs there are."""
    layer: Any = rank.state["layer"]
    x = dense.tokens(rank.rank, (3 * rank.rank + 5 * round_ + 2) % 9, round_).to(rank.device)
    of = None if valid is None else torch.tensor([valid], dtype=torch.int32, device=rank.device)
    out = layer(x, num_valid_tokens=of, busiest_tokens=None if round_ % 3 else 8)
    layer.check()
    return out.cpu(), sum(size.graph is not None for size in layer._replays._sizes.values())


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_dense_layer(ranks: Ranks, kind: str) -> None:
    if not have_processes(ranks.size):
        pytest.skip(f"needs {ranks.size} CUDA GPUs")
    dense = KINDS[kind]
    ranks.call(open_layer, dense)
    for round_ in range(24):
        valid = 2 if round_ % 4 == 3 else None
        results = ranks.call(play, dense, round_, valid)
        for rank, (got, _) in results.items():
            x = dense.tokens(rank, (3 * rank + 5 * round_ + 2) % 9, round_)
            want = dense.forward(x, None if valid is None else min(valid, len(x)))
            assert relative_error(got, want) <= tolerance(dense), (rank, round_)
    assert all(captured for _, captured in results.values())
    ranks.call(end)


def end(rank: Rank) -> int:
    """A body."""
    layer = rank.state.pop("layer")
    layer.close()
    with pytest.raises(ValueError, match="this AllToAll is closed"):
        layer(torch.zeros(1, layer.hidden_size, dtype=torch.bfloat16, device=rank.device))
    return 0


@pytest.fixture
def one() -> Any:
    """A layer of one rank on GPU 0 with replayed calls, its dense twin, and 3 tokens."""
    dense = KINDS["bf16"]
    (comm,) = putget.Communicator.local(1)
    options = options_of(dense, device="cuda")
    with ExpertParallelMoE.from_dense(comm, dense.state(), **options) as layer:
        layer.replay_calls(4)
        yield layer, dense, dense.tokens(0, 3).cuda()


def is_right(layer: ExpertParallelMoE, dense: Dense, x: Tensor) -> bool:
    got = layer(x)
    layer.check()
    return relative_error(got, dense.forward(x.cpu())) <= tolerance(dense)


def test_weights_written_in_place_count_and_replaced_ones_are_noticed(one: Any) -> None:
    layer, dense, x = one
    for _ in range(3):
        assert is_right(layer, dense, x)
    other = Dense(hidden=256, groups=(4, 2), shared=128, top_k=4, seed=1)
    layer.load_dense(other.state())
    assert is_right(layer, other, x)
    kept = layer.experts.down
    layer.experts.down = torch.nn.Parameter(kept.clone(), requires_grad=False)
    kept.zero_()
    for _ in range(3):
        assert is_right(layer, other, x)


def test_results_stay_and_wrong_calls_are_refused_after_many_right_ones(one: Any) -> None:
    layer, dense, x = one
    for _ in range(4):
        first = layer(x)
    kept = first.clone()
    layer(torch.zeros_like(x))
    assert torch.equal(first, kept)
    with pytest.raises(ValueError, match="x has dtype"):
        layer(x.float())
    with pytest.raises(ValueError, match="num_valid_tokens"):
        layer(x, num_valid_tokens=torch.zeros(2, dtype=torch.int32, device="cuda"))
    with pytest.raises(ValueError, match="busiest_tokens"):
        layer(x, busiest_tokens=9)
    assert is_right(layer, dense, x)


def test_a_call_inside_of_a_capture_is_part_of_it(one: Any) -> None:
    layer, dense, x = one
    for _ in range(3):
        layer(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.copy_(dense.tokens(0, 3, 1))
    graph.replay()
    layer.check()
    assert relative_error(out, dense.forward(x.cpu())) <= tolerance(dense)


def test_inference_mode_and_back(one: Any) -> None:
    layer, dense, x = one
    for _ in range(3):
        with torch.inference_mode():
            assert is_right(layer, dense, x)
        assert is_right(layer, dense, x)


def test_emulated_ranks_are_refused() -> None:
    dense = KINDS["bf16"]
    comms = putget.Communicator.local(2)
    raised: list[Any] = [None, None]

    def run(rank: int) -> None:
        with ExpertParallelMoE(comms[rank], **options_of(dense, device="cuda:0")) as layer:
            try:
                layer.replay_calls(4)
            except ValueError as error:
                raised[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == ["max_tokens is 4, expected 0 for 2 ranks that share a GPU"] * 2
