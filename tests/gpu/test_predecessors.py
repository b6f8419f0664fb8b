"""CTAs count what tokens before their own send to each rank: many of them, in CTAs of one warp and larger ones."""

from __future__ import annotations

import pytest
import torch

import putget
from tests.alltoall.test_alltoall import play_with
from tests.harness import run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import check_case


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("threads", [32, 96, 256])
@pytest.mark.parametrize("ep_size", [3, 8, 12])
def test_equal_to_the_oracle(ep_size: int, threads: int, device: str) -> None:
    """A warp of 32 lanes has seen 255 tokens of a rank after seven rounds: what it counts then goes to the CTA."""
    few = tuple(range(ep_size))
    rounds = (
        Round(1, (600, *few[1:]), no_expert=0.1),
        Round(2, (600, *few[1:]), ids_dtype=torch.int64, invalid=0.05),
        Round(3, (577, *few[1:]), no_expert=0.5, num_valid=(300, *[None] * (ep_size - 1))),
    )
    for top_k in (3, 8, 12):
        case = Case(ep_size, rounds, num_experts=29, top_k=top_k, max_tokens_per_rank=600)
        options = {"tuning": putget.tuning.Tuning(dispatch=putget.tuning.Launch(blocks=8, threads=threads))}
        check_case(case, run_ranks(ep_size, play_with, case, options, mode="thread", device=device))
