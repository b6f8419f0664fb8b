"""Tied parameters: one tensor under two names, on the trainer's side, on the rollout's, or on both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import torch

import putget_transfer as pt
from putget_transfer import weights

EMBEDDING, HEAD = "embedding.weight", "head.weight"
DEADLINE_S = 60.0


class Model(torch.nn.Module):
    """An embedding and a head, of which a tied one has a single tensor."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(12, 6), torch.nn.Linear(6, 12, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def load_weights(self, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load as engines do: a tied head comes with its embedding."""
        own = dict(self.named_parameters())
        for name, tensor in checkpoint:
            if name in own:
                own[name].data.copy_(tensor)


def update(source: Any, rollout: Model, unused: Iterable[str] = ()) -> None:
    """Bring a source's weights into a model."""
    params = weights.describe(source, rank=0)
    slots = weights.record(rollout, weights.checkpoint(params))
    schedule = weights.plan(params, [slots], unused=unused)
    network = pt.SimNetwork(5)
    own = [pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() for _ in range(2)]
    try:
        trainer = weights.Trainer(own[0], schedule, 0, source)
        controller = weights.Controller([trainer], {"replica": [weights.Rollout(own[1], slots, schedule, 0)]})
        assert controller.update(1, DEADLINE_S).committed == ["replica"]
    finally:
        for engine in own:
            engine.close()


def test_tied_weights_are_described_and_land_once() -> None:
    source, rollout = Model(tied=True), Model(tied=True)
    assert [param.name for param in weights.describe(source, rank=0)] == [EMBEDDING]
    update(source, rollout)
    assert torch.equal(rollout.embedding.weight, source.embedding.weight)
    assert rollout.head.weight.data_ptr() == rollout.embedding.weight.data_ptr()


def test_a_state_with_both_names_reaches_a_model_that_is_not_tied() -> None:
    """`state_dict` has a tied tensor under each name."""
    source, rollout = Model(tied=True), Model(tied=False)
    update(source.state_dict(), rollout)
    assert torch.equal(rollout.embedding.weight, source.embedding.weight)
    assert torch.equal(rollout.head.weight, source.embedding.weight)


def test_a_name_that_a_tied_model_does_not_load_is_refused_unless_it_is_unused() -> None:
    source, rollout = Model(tied=True), Model(tied=True)
    with pytest.raises(ValueError, match=HEAD):
        update(source.state_dict(), rollout)
    update(source.state_dict(), rollout, unused=[HEAD])
    assert torch.equal(rollout.head.weight, source.embedding.weight)


def test_a_head_that_the_trainer_has_not_is_named() -> None:
    with pytest.raises(ValueError, match=HEAD):
        update(Model(tied=True), Model(tied=False))
