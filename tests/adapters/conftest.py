"""Where the adapters' tests run: processes on the CPU, and one GPU a rank where there are four."""

from __future__ import annotations

import pytest
import torch

RANKS = 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """The backend under test. The first dispatch of a recipe allocates, so ranks cannot share one GPU here."""
    if request.param == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} CUDA GPUs")
    return str(request.param)
