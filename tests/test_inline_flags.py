"""Rows of combine with flags in them: wished rank by rank, and whoever wishes what, equal to the oracle's bits."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from tests.harness import Rank, run_ranks
from tests.harness.cases import COMBINE, DISPATCH, Case, Round
from tests.harness.compare import Outcome, check_case, check_round, play_on
from tests.test_wire import WIRES, Wire, case_of, wire_id
from tests.test_workspace import bytes_of

APART, IN_ROWS = 1, 2
ENDINGS = ("zero_copy", "zero_copy_flat", "flat", "strided", "transposed")
HALVES = tuple(itertools.product((0, DISPATCH, COMBINE, DISPATCH + COMBINE), repeat=3))
OUTPUTS = [((64,), torch.bfloat16), ((100,), torch.float16), ((36,), torch.float32), ((7,), torch.bfloat16)]


# In blocks of 128, also of two accesses of a warp, and a last one that is short.
BLOCKS = [((64,), torch.bfloat16), ((144,), torch.float16), ((272,), torch.float32), ((16,), torch.bfloat16)]


def launch(flags: int) -> dict[str, Any]:
    return {"combine_launch": putget.Launch(inline_flags=flags)}


def rounds(first: int, count: int = 8) -> tuple[Round, ...]:
    """Sizes from none to all, every ending, halves of every rank in other rounds."""
    sizes = ((8, 8, 8), (1, 1, 1), (0, 8, 1), (0, 0, 0), (3, 0, 8), (8, 1, 0))
    return tuple(
        Round(
            first + i,
            sizes[i % len(sizes)],
            ending=ENDINGS[(first + i) % len(ENDINGS)],
            out=i % 2 == 0,
            addend=i % 3 == 0,
            no_expert=0.2,
            num_valid=(None, 2, None) if i % 4 == 3 else None,
            halves=HALVES[(first + i) * 7 % len(HALVES)] if i % 2 else (),
        )
        for i in range(count)
    )


def play_wishes(rank: Rank, cases: list[Case], wishes: tuple[int, ...]) -> list[list[Outcome]]:
    """A body: the cases one after the other, this rank with its own wish."""
    outcomes = []
    for case in cases:
        with rank.all_to_all(**case.options(), **launch(wishes[rank.rank])) as a2a:
            outcomes.append(play_on(a2a, rank, case))
    return outcomes


@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
@pytest.mark.parametrize("wishes", list(itertools.product((APART, IN_ROWS), repeat=3)), ids=str)
def test_every_rank_as_it_likes(wishes: tuple[int, ...], wire: Wire, device: str) -> None:
    """top_k of 8 experts on 3 ranks: several of a token's experts on one rank."""
    cases = [
        case_of(wire, 3, rounds(10 * i), num_experts=9, top_k=top_k, output=output)
        for i, (output, top_k) in enumerate(zip(OUTPUTS if wire[1] is None else BLOCKS, (8, 3, 8, 2), strict=True))
    ]
    results = run_ranks(3, play_wishes, cases, wishes, mode="thread", device=device)
    for index, case in enumerate(cases):
        check_case(case, [of_rank[index] for of_rank in results])


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_sizes_on_both_sides_of_the_room(direction: str, device: str) -> None:
    """Rows so long that 8 tokens fit with flags and 9 do not; ranks on both sides in one round."""
    case = Case(
        2,
        (Round(1, (8, 9)), Round(2, (9, 8), ending="flat"), Round(3, (8, 8), ending="strided"), Round(4, (9, 0))),
        num_experts=4,
        max_tokens_per_rank=9,
        output=((8192,), torch.bfloat16),
        direction=direction,
    )
    results = run_ranks(2, play_wishes, [case], (IN_ROWS, IN_ROWS), mode="thread", device=device)
    check_case(case, [of_rank[0] for of_rank in results])


def rule_of(rank: Rank, options: dict[str, Any], sizes: tuple[int, ...]) -> list[int]:
    """A body: how rows would come for batches of several sizes."""
    with rank.all_to_all(max_tokens_per_rank=512, **options) as a2a:
        return [a2a.launches(tokens)[1].inline_flags for tokens in sizes]


LONG = {"output": putget.Payload((7168,), torch.bfloat16), "num_experts": 64, "top_k": 8}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (LONG, (2, 2, 2, 1, 1)),
        (LONG | {"num_sms": 64}, (2, 2, 2, 1, 1)),
        (LONG | {"num_sms": 16}, (2, 2, 1, 1, 1)),
        (LONG | {"num_sms": 4}, (2, 1, 1, 1, 1)),
        (LONG | {"num_sms": 4, "finish_num_sms": 132}, (2, 1, 1, 1, 1)),
        (LONG | {"num_sms": 4} | launch(IN_ROWS), (2, 2, 2, 1, 1)),
        (LONG | launch(APART), (1, 1, 1, 1, 1)),
        (LONG | launch(IN_ROWS), (2, 2, 2, 1, 1)),
        (LONG | {"combine_direction": "push"}, (1, 1, 1, 1, 1)),
        (LONG | {"combine_direction": "push"} | launch(IN_ROWS), (2, 2, 2, 1, 1)),
        (LONG | {"combine_dtype": torch.float8_e4m3fn}, (1, 1, 1, 1, 1)),
        (LONG | {"combine_dtype": torch.float8_e4m3fn} | launch(IN_ROWS), (2, 2, 2, 1, 1)),
        (LONG | {"output": putget.Payload((7,), torch.bfloat16)} | launch(IN_ROWS), (1, 1, 1, 1, 1)),
    ],
)
def test_launches_show_the_rule(options: dict[str, Any], wanted: tuple[int, ...]) -> None:
    for found in run_ranks(2, rule_of, options, (0, 1, 8, 10, 512), mode="thread"):
        assert tuple(found) == wanted


def play_layers_that_share(rank: Rank, cases: list[Case], wishes: list[int]) -> list[list[Outcome]]:
    """A body: objects of different shapes take turns on one workspace, round by round, across the wrap of the epoch."""
    workspace = putget.Workspace(rank.comm, max(map(bytes_of, cases)), device=rank.device, timeout_s=20)
    objects = [
        rank.all_to_all(**case.options(), **launch(wish), workspace=workspace)
        for case, wish in zip(cases, wishes, strict=True)
    ]
    workspace._reset(2**32 - 5)
    outcomes: list[list[Outcome]] = [[] for _ in cases]
    for index in range(len(cases[0].rounds)):
        for at, (a2a, case) in enumerate(zip(objects, cases, strict=True)):
            one = replace(case, rounds=(case.rounds[index],))
            outcomes[at] += play_on(a2a, rank, one)
    for a2a in objects:
        a2a.close()
    workspace.close()
    return outcomes


@pytest.mark.parametrize(
    ("wires", "outputs"), [([WIRES[0]] * 3, OUTPUTS[:3]), (WIRES[1:4], BLOCKS[:3])], ids=["same", "several"]
)
def test_rows_of_other_sizes_in_the_same_place(wires: list[Wire], outputs: list[Any], device: str) -> None:
    cases = [
        case_of(wire, 3, rounds(50 + 10 * i, 6), num_experts=9, top_k=3, output=output)
        for i, (wire, output) in enumerate(zip(wires, outputs, strict=True))
    ]
    results = run_ranks(3, play_layers_that_share, cases, [IN_ROWS, APART, IN_ROWS], mode="thread", device=device)
    for at, case in enumerate(cases):
        for index in range(len(case.rounds)):
            check_round(case, index, {rank: of_rank[at][index] for rank, of_rank in enumerate(results)}, check=False)


def miss_a_rank(rank: Rank, wishes: tuple[int, ...]) -> tuple[str, tuple[int, ...], float]:
    """A body: the last rank dispatches and does not combine."""
    case = Case(3, (Round(1, (4, 4, 4)),), num_experts=6, top_k=6)
    sent = case.sent(0, rank.rank)
    with rank.all_to_all(**case.options(), **launch(wishes[rank.rank]), timeout_s=0.5, warmup_timeout_s=0.5) as a2a:
        arguments = [tensor.to(rank.device) for tensor in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
        a2a.dispatch(*arguments)
        a2a.check()
        began = time.monotonic()
        try:
            if rank.rank != 2:
                a2a.combine()
                a2a.check()
        except putget.PeerTimeout as error:
            return error.phase, error.missing, time.monotonic() - began
        return "none", (), 0.0


@pytest.mark.parametrize("wishes", [(IN_ROWS,) * 3, (IN_ROWS, APART, IN_ROWS)], ids=str)
def test_a_rank_whose_rows_do_not_come_is_named(wishes: tuple[int, ...], device: str) -> None:
    results = run_ranks(3, miss_a_rank, wishes, mode="thread", device=device)
    for phase, missing, seconds in results[:2]:
        assert (phase, missing) == ("combine", (2,))
        assert seconds < 5
