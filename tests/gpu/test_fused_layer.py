"""fused_layer on GPUs: the bits of ExpertParallelMoE from the same routes and weights."""

from __future__ import annotations

import pytest

from tests.gpu.ranks import Ranks, have_processes
from tests.moe.test_fused import KINDS, play


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_layer(ranks: Ranks, kind: str) -> None:
    if not have_processes(ranks.size):
        pytest.skip(f"needs {ranks.size} CUDA GPUs")
    ranks.call(play, *KINDS[kind])
