"""A compiled model with two layers: one graph without a break, and what the uncompiled one gives."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import putget
from putget.moe.traced import LayerOperator
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense
from tests.moe.layers import make_layer

DENSE = Dense(shared=128)
SIZES = ((3, 5), (0, 4), (8, 8), (1, 0), (0, 0))


def compiled(rank: Rank, backend: str) -> None:
    """A body: other sizes in every round, padded and not; the first layer's experts have replicas."""
    torch._dynamo.reset()
    placed = make_layer(rank, DENSE, num_slots=12, replica_choice="balanced")
    with placed as first, make_layer(rank, DENSE, workspace=first.a2a.workspace) as second:

        def model(x: Tensor, num_valid: Tensor | None = None) -> Tensor:
            return second(first(x * 2, num_valid_tokens=num_valid)) + x

        fast = torch.compile(model, fullgraph=True, backend=backend)
        for index, tokens in enumerate(SIZES):
            x = DENSE.tokens(rank.rank, tokens[rank.rank], index).to(rank.device)
            assert torch.equal(fast(x), model(x))
            valid = torch.tensor([2], dtype=torch.int32, device=rank.device)
            assert torch.equal(fast(x, valid), model(x, valid))


def test_compiled_layers_equal_uncompiled_ones() -> None:
    run_ranks(2, compiled, "aot_eager", timeout=150)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
def test_compiled_layers_on_gpus() -> None:
    run_ranks(2, compiled, "aot_eager", device="cuda", timeout=200)


class Gone:
    """A layer that does not live long."""

    def run(self, x: Tensor, num_valid_tokens: Tensor | None) -> Tensor:
        return x.clone()


def test_a_layer_that_is_gone() -> None:
    layer = Gone()
    operator = LayerOperator(layer, torch.device("cpu"))
    assert torch.equal(operator(torch.ones(2), None), torch.ones(2))
    del layer
    gc.collect()
    with pytest.raises(putget.ProtocolMisuse, match="the layer of this operator is gone"):
        operator(torch.ones(2), None)
