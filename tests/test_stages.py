"""Rows that go through stages of shared memory (bulk copies on GPUs): equal to the oracle's bits, as all others."""

from __future__ import annotations

import pytest
import torch

import putget
from tests.harness import run_ranks
from tests.harness.cases import COMBINE, DISPATCH, Case, Round
from tests.harness.compare import check_case, play

# Rows of several segments, of less than one, and ones that no stage takes: too short, or no multiple of 16 bytes.
PAYLOADS = (((9008,), torch.uint8), ((1040,), torch.uint8), ((7,), torch.float32), ((64,), torch.float32))
OUTPUTS = (((1032,), torch.bfloat16), ((520,), torch.float32), ((16,), torch.float16), ((9,), torch.bfloat16))
ENDINGS = ("zero_copy", "flat", "strided", "transposed")
HALVES = ((), (COMBINE, 0, DISPATCH + COMBINE), (DISPATCH, COMBINE, 0))


def rounds(seed: int) -> tuple[Round, ...]:
    sizes = ((5, 0, 8), (8, 8, 8), (1, 3, 0), (0, 0, 0), (7, 2, 6))
    return tuple(
        Round(
            seed + i,
            size,
            ending=ENDINGS[(seed + i) % len(ENDINGS)],
            out=i % 2 == 0,
            addend=i % 3 == 0,
            no_expert=0.2,
            halves=HALVES[i % len(HALVES)],
        )
        for i, size in enumerate(sizes)
    )


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
@pytest.mark.parametrize(("top_k", "stages"), [(3, 2), (8, 3), (4, 8)])
def test_equal_to_the_oracle(direction: str, output: tuple, top_k: int, stages: int, device: str) -> None:
    case = Case(3, rounds(3 * top_k), 13, top_k, payloads=PAYLOADS, output=output, direction=direction, stages=stages)
    check_case(case, run_ranks(3, play, case, mode="thread", device=device))


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_more_rows_than_a_stage_holds(stages: int) -> None:
    # Twenty ranks' rows, of which no more than a few fit into a stage: fewer stages, or none.
    tokens = tuple(range(20))
    case = Case(
        20,
        (Round(5, tokens), Round(6, tokens[::-1], ending="flat")),
        num_experts=40,
        top_k=20,
        max_tokens_per_rank=20,
        payloads=(((2048,), torch.uint8),),
        output=((1024,), torch.bfloat16),
        stages=stages,
    )
    check_case(case, run_ranks(20, play, case, mode="thread", device="cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_launches_say_what_runs(device: str) -> None:
    def body(rank):  # type: ignore[no-untyped-def]
        with rank.all_to_all(
            payloads=[putget.Payload((7168,), torch.uint8)],
            output=putget.Payload((7168,), torch.bfloat16),
            top_k=8,
            combine_direction="push",
            combine_launch=putget.Launch(stages=3, blocks=24, movers=8),
        ) as a2a:
            return a2a.launches(8)

    for _, combine in run_ranks(2, body, mode="thread", device=device):
        assert (combine.stages, combine.blocks, combine.movers) == (3, 24, 8)
