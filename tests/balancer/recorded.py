"""Routing recorded from a model, where it is there. Tests that need it skip without it."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.project.checkout import ROOT

NUM_EXPERTS = 64
NAME = "deepseek_v2_lite_routing.npz"


@functools.cache
def routing(task: str) -> NDArray[np.uint8]:
    """[layers, tokens, top_k] of DeepSeek-V2-Lite on one task set, "intent" or "law"."""
    for folder in (ROOT / "shared" / "data", ROOT.parent / "shared" / "data", ROOT.parents[1] / "shared" / "data"):
        path: Path = folder / NAME
        if path.is_file():
            found: NDArray[np.uint8] = np.load(path)[task]
            return found
    pytest.skip(f"needs {NAME}, recorded routing of 64 experts")


def counts(ids: NDArray[np.integer], num_experts: int = NUM_EXPERTS) -> NDArray[np.int64]:
    """Tokens of each expert, [layers, experts]."""
    return np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in ids])


@functools.cache
def halves(task: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The counts of the first and of the second half of the tokens."""
    ids = routing(task)
    middle = ids.shape[1] // 2
    return counts(ids[:, :middle]), counts(ids[:, middle:])
