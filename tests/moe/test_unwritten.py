"""A layer that nobody gave weights says so once."""

from __future__ import annotations

import warnings

import pytest
import torch

import putget
from putget.moe import ExpertParallelMoE
from tests.moe.dense import Dense
from tests.moe.layers import options_of


@pytest.mark.parametrize("dense", [Dense(), Dense(fp8=True, hidden=256)], ids=["bf16", "fp8"])
def test_a_layer_without_weights_warns_once(dense: Dense) -> None:
    (comm,) = putget.Communicator.local(1)
    x = dense.tokens(0, 3, 0)
    with ExpertParallelMoE(comm, **options_of(dense, device="cpu")) as layer:
        with pytest.warns(UserWarning, match="experts' weights gate_up.*are all zeros.*load_dense"):
            assert not layer(x).any()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(x)


@pytest.mark.parametrize("dense", [Dense(), Dense(fp8=True, hidden=256)], ids=["bf16", "fp8"])
def test_a_layer_with_weights_says_nothing(dense: Dense) -> None:
    (comm,) = putget.Communicator.local(1)
    x = dense.tokens(0, 3, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ExpertParallelMoE.from_dense(comm, dense.state(), **options_of(dense, device="cpu")) as layer:
            assert layer(x).any()


def test_weights_that_begin_with_zeros_are_weights() -> None:
    dense = Dense()
    (comm,) = putget.Communicator.local(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ExpertParallelMoE.from_dense(comm, dense.state(), **options_of(dense, device="cpu")) as layer:
            with torch.no_grad():
                layer.experts.gate_up[:, :1].zero_()
            layer(dense.tokens(0, 3, 0))
