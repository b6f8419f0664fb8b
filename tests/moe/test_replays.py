"""replay_calls: the rules of replays, with graphs of a stand-in; graphs themselves are in tests/gpu/test_replays.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import putget
from putget.moe import ExpertParallelMoE, replays
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense
from tests.moe.layers import make_layer

DENSE = Dense(shared=128)


def play(rank: Rank) -> None:
    """A body: on the CPU calls stay as they are, and what is out of range is refused."""
    with make_layer(rank, DENSE) as layer:
        x = DENSE.tokens(rank.rank, 3).to(rank.device)
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


class Memory:
    """Graphs that run their work again."""

    def __init__(self) -> None:
        self.captures = 0

    def input(self, tokens: int, hidden_size: int, device: torch.device) -> Tensor:
        return torch.zeros(tokens, hidden_size, dtype=torch.bfloat16, device=device)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        self.captures += 1
        result = work()
        return SimpleNamespace(replay=lambda: result.copy_(work())), result


def replaying(layer: ExpertParallelMoE, patch: pytest.MonkeyPatch, largest: int = 8) -> Memory:
    """Has a layer on a CPU replay its calls by the stand-in."""
    memory = Memory()
    patch.setattr(torch.cuda, "synchronize", lambda _: None)
    patch.setattr(replays.Replays, "takes", lambda self, tokens: 0 < tokens <= self._largest)
    patch.setitem(replays._memories, layer.a2a.workspace, memory)  # type: ignore[arg-type]
    layer._replays = replays.Replays(layer, layer._lost, largest)
    return memory


def with_replays(rank: Rank, body: Callable[[Rank, ExpertParallelMoE, Memory], None], **changes: Any) -> None:
    """A body: one that gets a layer with replays."""
    with pytest.MonkeyPatch.context() as patch, make_layer(rank, DENSE, **changes) as layer:
        body(rank, layer, replaying(layer, patch))


def tokens_of(rank: Rank, count: int, seed: int = 0) -> Tensor:
    return DENSE.tokens(rank.rank, count, seed).to(rank.device)


def results(rank: Rank, layer: ExpertParallelMoE, memory: Memory) -> None:
    kept = layer._replays
    for seed, count in enumerate((3, 4, 1, 3, 8, 0, 3, 2, 8, 8)):
        x = tokens_of(rank, count, seed)
        valid = None if seed % 3 else torch.tensor([max(0, count - 1)], dtype=torch.int32)
        layer._replays = None
        want = layer(x, num_valid_tokens=valid)
        layer._replays = kept
        got = layer(x, num_valid_tokens=valid)
        # Products of padded batches may round otherwise.
        assert torch.allclose(got.float(), want.float(), rtol=2**-6, atol=2**-6), (seed, count)
    assert memory.captures == 2


def test_calls_are_padded_and_keep_their_results() -> None:
    run_ranks(2, with_replays, results)


def busiest(rank: Rank, layer: ExpertParallelMoE, memory: Memory) -> None:
    for most in (6, 5, 3, 6):
        layer(tokens_of(rank, 3), busiest_tokens=most)
    with pytest.raises(ValueError, match="busiest_tokens is 7"):
        layer(tokens_of(rank, 3), busiest_tokens=7)
    layer(tokens_of(rank, 3), busiest_tokens=6)
    assert memory.captures == 1  # 6 and 5 are one size, 3 is another that was called once


def test_the_busiest_rank_stays_within_the_workspace() -> None:
    run_ranks(2, _with_six)


def _with_six(rank: Rank) -> None:
    """A body."""
    with_replays(rank, busiest, max_tokens_per_rank=6)


def parameters(rank: Rank, layer: ExpertParallelMoE, memory: Memory) -> None:
    x = tokens_of(rank, 4)
    for _ in range(3):
        layer(x)
    assert memory.captures == 1
    layer.router.correction_bias = torch.nn.Parameter(torch.randn(DENSE.num_experts), requires_grad=False)
    for _ in range(2):
        layer(x)
    assert memory.captures == 2
    layer.router.correction_bias = None
    layer(x)
    layer.experts = layer.experts
    layer(x)
    assert memory.captures == 3
    layer.grouped_memory = layer.a2a.expert_major_memory()
    layer(x)
    assert memory.captures == 3  # the first call of a size with this memory runs as it is


def test_what_a_graph_counts_on_is_noticed() -> None:
    run_ranks(1, with_replays, parameters)


def refusals(rank: Rank, layer: ExpertParallelMoE, memory: Memory) -> None:
    x = tokens_of(rank, 4)
    run = layer.run

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("no memory")

    layer.run = fails  # type: ignore[method-assign]
    for _ in range(2):  # a first call that fails is no first call
        with pytest.raises(RuntimeError, match="no memory"):
            layer(x)
    assert memory.captures == 0
    layer.run = run  # type: ignore[method-assign]
    layer(x)
    with pytest.MonkeyPatch.context() as patch:
        fault = putget.PeerTimeout("dispatch", 0, 1, [0])
        patch.setattr(layer.a2a.workspace.memory, "fault", lambda _: fault)
        with pytest.raises(putget.PeerTimeout):
            layer(x)
    assert memory.captures == 0
    layer(x)
    layer(x)
    assert memory.captures == 1
    layer.a2a.close()
    with pytest.raises(ValueError, match="this AllToAll is closed"):
        layer(x)


def test_what_an_eager_call_refuses_no_replay_does() -> None:
    run_ranks(1, with_replays, refusals)
