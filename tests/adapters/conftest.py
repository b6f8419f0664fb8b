"""Where the adapters' tests run: processes on the CPU, and one GPU a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.adapters.layer import Layer
from tests.harness import run_ranks

RANKS = 4


@dataclass(frozen=True)
class Place:
    """The backend under test.

    Attributes:
        device: "cpu" or "cuda".
        size: ranks.
    """

    device: str
    size: int

    def fit(self, layer: Layer) -> Layer:
        """The layer with its first ranks alone, where there are fewer GPUs than it has ranks."""
        return replace(layer, num_tokens=layer.num_tokens[: self.size])

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs a body on all ranks; the results in rank order."""
        return run_ranks(self.size, body, *args, device=self.device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    """Four ranks, or two. The first dispatch of a recipe allocates, so ranks cannot share one GPU here."""
    if request.param == "cpu":
        return Place("cpu", RANKS)
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        pytest.skip("needs 2 CUDA GPUs")
    return Place("cuda", RANKS if num_gpus >= RANKS else 2)
