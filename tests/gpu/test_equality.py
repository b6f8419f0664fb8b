"""Rows of real size, many tokens, every grid: bit for bit what the oracle says."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu.ranks import Ranks, have_processes
from tests.harness import Rank
from tests.harness.cases import ENDINGS, Case, Round, Row
from tests.harness.compare import Outcome, check_case, play, play_on

TIMEOUT_S = 120.0  # of a command: the oracle's data comes from one CPU core


def check(ranks: Ranks, case: Case) -> None:
    outcomes = ranks.call(play, case, timeout=TIMEOUT_S)
    check_case(case, [outcomes[rank] for rank in range(ranks.size)])


# The quantisation recipes that the payloads are made for, with whole rows.
RECIPES: dict[str, tuple[Row, ...]] = {
    "bf16": (((7168,), torch.bfloat16),),
    "fp8": (((7168,), torch.float8_e4m3fn), ((56,), torch.float32)),
    "nvfp4": (((3584,), torch.uint8), ((448,), torch.uint8)),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_deepseek_layer(ranks: Ranks, recipe: str) -> None:
    size = ranks.size
    sizes = tuple((5 * rank + 1) % 13 for rank in range(size))
    case = Case(
        size,
        (Round(1, sizes), Round(2, tuple(12 - n for n in sizes), ending="flat", addend=True)),
        num_experts=256,
        top_k=8,
        max_tokens_per_rank=12,
        payloads=RECIPES[recipe],
        output=((7168,), torch.bfloat16),
    )
    check(ranks, case)


def test_thousands_of_tokens(ranks: Ranks) -> None:
    """More tokens than any block of tokens that a kernel works on; some ranks have none."""
    size = ranks.size
    sizes = tuple((2048, 1, 777, 0)[rank % 4] for rank in range(size))
    case = Case(
        size,
        (Round(1, sizes, no_expert=0.02), Round(2, sizes[::-1], ids_dtype=torch.int64, ending="transposed")),
        num_experts=61,
        top_k=8,
        max_tokens_per_rank=2048,
        payloads=(((4,), torch.int32), ((3,), torch.uint8)),
        output=((8,), torch.float32),
    )
    check(ranks, case)


def test_every_access_width(ranks: Ranks) -> None:
    """Row sizes that allow accesses of 16, 8, 4, 2 bytes and 1, alone and in every order beside others."""
    widths = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 100, 112, 1000, 1008, 1024)
    for first in range(0, len(widths), 6):
        row_bytes = widths[first : first + 6]
        payloads = tuple(((width,), torch.uint8) for width in row_bytes)
        for output in (((row_bytes[0],), torch.bfloat16), ((row_bytes[-1],), torch.float16), ((3,), torch.float32)):
            rounds = (
                Round(first, (7,) * ranks.size),
                Round(first + 1, (4,) * ranks.size, ending="strided", addend=True),
            )
            check(ranks, Case(ranks.size, rounds, num_experts=9, top_k=3, payloads=payloads, output=output))


@pytest.mark.parametrize("num_sms", [1, 2, 8, 132])
def test_every_grid_gives_the_same_bits(ranks: Ranks, num_sms: int) -> None:
    if ranks.size > 4 and not have_processes(ranks.size):
        # CTAs of all ranks wait for each other, so they need a place on one GPU, which has three on every SM. Of up to
        # four ranks the work asks for fewer.
        places = 3 * torch.cuda.get_device_properties(0).multi_processor_count
        num_sms = min(num_sms, places // ranks.size)
    case = Case(
        ranks.size,
        (Round(21, (40,) * ranks.size), Round(22, (3,) * ranks.size, ending="flat")),
        num_experts=17,
        top_k=6,
        max_tokens_per_rank=40,
        payloads=(((1040,), torch.uint8), ((10,), torch.float32)),
        output=((520,), torch.bfloat16),
    )
    outcomes = ranks.call(play_with, case, {"num_sms": num_sms}, timeout=TIMEOUT_S)
    check_case(case, [outcomes[rank] for rank in range(ranks.size)])


def play_with(rank: Rank, case: Case, options: dict[str, Any]) -> list[Outcome]:
    """A body: plays a case with further constructor options."""
    with rank.all_to_all(**{**case.options(), **options}) as a2a:
        return play_on(a2a, rank, case)


def random_case(ep_size: int, seed: int) -> Case:
    """Any shape, any ragged sizes, any routing, any sequence of endings."""
    rng = random.Random(seed)
    capacity = rng.choice((1, 2, 7, 33, 130))
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
    payloads = tuple(((rng.randint(1, 300),), rng.choice(dtypes)) for _ in range(rng.randint(1, 8)))
    experts = rng.choice((1, ep_size, 3 * ep_size + 1, 64))
    rounds = []
    for index in range(4):
        sizes = tuple(rng.choice((0, 1, capacity, rng.randint(0, capacity))) for _ in range(ep_size))
        rounds.append(
            Round(
                1000 * seed + index,
                sizes,
                ending=rng.choice(ENDINGS),
                ids_dtype=rng.choice((torch.int32, torch.int64)),
                table=tuple(rng.randrange(ep_size) for _ in range(experts)) if rng.random() < 0.3 else None,
                num_valid=tuple(rng.randint(0, size) for size in sizes) if rng.random() < 0.3 else None,
                out=rng.random() < 0.5,
                addend=rng.random() < 0.5,
                no_expert=rng.choice((0.0, 0.2)),
                invalid=rng.choice((0.0, 0.1)),
            )
        )
    return Case(
        ep_size,
        tuple(rounds),
        num_experts=experts,
        top_k=rng.randint(1, 32),
        max_tokens_per_rank=capacity,
        payloads=payloads,
        output=((rng.randint(1, 300),), rng.choice((torch.bfloat16, torch.float16, torch.float32))),
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_cases(ranks: Ranks, seed: int) -> None:
    check(ranks, random_case(ranks.size, 10 * seed + ranks.size))


def test_runs_repeat_to_the_bit(ranks: Ranks) -> None:
    """The same round ten times over, among others: slots, bytes and sums stay the same."""
    sizes = tuple(30 - rank for rank in range(ranks.size))
    case = replace(random_case(ranks.size, 1), top_k=7, max_tokens_per_rank=30, num_experts=24)
    case = replace(case, rounds=tuple(Round(5 if index % 2 else index, sizes) for index in range(20)))
    check(ranks, case)
