"""transformers' plug-in without transformers: what it refuses, and its rounds. tests/engines has the rest."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from putget import BackendUnavailable
from putget.adapters import shared, transformers
from tests.harness import Rank, run_ranks


class Experts(torch.nn.Module):
    """Experts as transformers has them after sharding: expert e multiplies by e + 1."""

    def __init__(self, dtype: torch.dtype = torch.float32, rank: int = 0) -> None:
        super().__init__()
        for name in ("gate_up_proj", "down_proj"):
            weight = torch.zeros(2, 4, 4).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        self.num_experts = 2
        self.rank = rank

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert not rows.isnan().any()
        assert (ids < 2).any(1).all(), "on a CPU, rows without a choice of this rank take time for nothing"
        factors = torch.where(ids < 2, (ids + 1 + 2 * self.rank) * weights, 0.0)
        return rows * factors.sum(1, keepdim=True)


class Base:
    """transformers' EPImplementation."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        self.experts_forward = experts.forward
        self.num_local_experts = experts.num_experts
        self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh


class Implementation(transformers.ExpertRounds, Base):
    max_tokens_per_rank = 4


def forward(rank: Rank) -> None:
    """A body: ranks with batches of their own, one of them empty, twice; and more tokens than there is room for."""
    ep_mesh = SimpleNamespace(get_group=lambda: rank.comm)
    tp_mesh = SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)
    made = Implementation(Experts(rank=rank.rank), ep_mesh, tp_mesh)
    for count in (3, 0, 2) if rank.rank == 0 else (0, 0, 4):
        rows = torch.randn(count, 4)
        ids = torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0]])[:count]
        weights = torch.rand(count, 2)
        expected = rows * ((ids + 1) * weights).sum(1, keepdim=True)
        torch.testing.assert_close(made(rows, ids, weights), expected)
        if count:
            with pytest.raises(ValueError, match='"putget" has no gradients'):
                made(rows.requires_grad_(), ids, weights)
    with pytest.raises(ValueError, match="a rank sends 5 tokens, the workspace is for 4"):
        made(torch.zeros(5, 4), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2))
    shared.close_shared(rank.comm)


def test_every_rank_has_a_batch_of_its_own() -> None:
    run_ranks(2, forward)


def test_quantised_experts_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Experts.gate_up_proj is torch.float8_e4m3fn: quantised experts are not"):
        transformers.check_experts(Experts(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="Linear has no gate_up_proj and no down_proj"):
        transformers.check_experts(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("version", ["5.22.1", "6.0"])
def test_versions_that_are_not_known_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(BackendUnavailable, match=f"version {version}; .*knows transformers from 5.23 to before 6"):
        transformers.register()


def test_a_wrong_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_rank is 0, expected a positive int"):
        transformers.register(max_tokens_per_rank=0)
