"""Sentinel rows of combine: asked for rank by rank, whoever asks what; equal to the oracle's bits."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import putget
from tests.alltoall.test_wire import FP8, WIRES, Wire, case_of, check_all, wire_id
from tests.harness import Rank, run_ranks
from tests.harness.cases import APART, COMBINE, DISPATCH, SENTINEL, Case, Round
from tests.harness.compare import Outcome, check_case, check_round, play_on, play_round
from tests.memory.test_workspace import bytes_of

ENDINGS = ("zero_copy", "zero_copy_flat", "flat", "strided", "transposed")
HALVES = tuple(itertools.product((0, DISPATCH, COMBINE, DISPATCH + COMBINE), repeat=3))
OUTPUTS = [((64,), torch.bfloat16), ((100,), torch.float16), ((36,), torch.float32), ((7,), torch.bfloat16)]


# In blocks of 128, also of two accesses of a warp, and a last one that is short.
BLOCKS = [((64,), torch.bfloat16), ((144,), torch.float16), ((272,), torch.float32), ((16,), torch.bfloat16)]


def launch(flags: int) -> dict[str, Any]:
    return {"tuning": putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=flags))}


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


def play_with(rank: Rank, cases: list[Case], tuning: putget.tuning.Launch) -> list[list[Outcome]]:
    """A body: the cases one after the other with this launch of combine."""
    outcomes = []
    for case in cases:
        with rank.all_to_all(**case.options(), tuning=putget.tuning.Tuning(combine=tuning)) as a2a:
            outcomes.append(play_on(a2a, rank, case))
    return outcomes


def play_asks(rank: Rank, cases: list[Case], asks: tuple[int, ...]) -> list[list[Outcome]]:
    """A body: the same, this rank with its own ask."""
    return play_with(rank, cases, putget.tuning.Launch(sentinel_rows=asks[rank.rank]))


@pytest.mark.parametrize("asks", list(itertools.product((APART, SENTINEL), repeat=3)), ids=str)
def test_every_rank_as_it_likes(asks: tuple[int, ...], device: str) -> None:
    """top_k of 8 experts on 3 ranks: several of a token's experts on one rank."""
    cases = [
        case_of(None, 3, rounds(10 * i), num_experts=9, top_k=top_k, output=output, sentinel_rows=None)
        for i, (output, top_k) in enumerate(zip(OUTPUTS, (8, 3, 8, 2), strict=True))
    ]
    results = run_ranks(3, play_asks, cases, asks, mode="thread", device=device)
    for index, case in enumerate(cases):
        check_case(case, [of_rank[index] for of_rank in results])


def test_quantised_rows(device: str) -> None:
    cases = [
        case_of(FP8, 3, rounds(10 * i, 16), num_experts=9, top_k=top_k, output=output)
        for i, (output, top_k) in enumerate(zip(BLOCKS, (8, 3, 8, 2), strict=True))
    ]
    check_all(cases, device)


def combine_once(rank: Rank, case: Case) -> list[Outcome]:
    """A body: rounds on a workspace of just as many bytes as the object needs, and how its rows come."""
    with rank.all_to_all(**case.options()) as a2a:
        assert a2a.launches(case.max_tokens_per_rank)[1].sentinel_rows is True
        return play_on(a2a, rank, case)


def test_there_is_room_for_all_quantised_rows(device: str) -> None:
    """More than 32 MiB a peer, beside a small output and payload."""
    case = Case(
        2,
        # Each rank gets half of the tokens, fewer than 576.
        (
            Round(1, (1100, 1), "flat", max_rows=(576, 576)),
            Round(2, (0, 1100), halves=(COMBINE, 0), max_rows=(576, 576)),
        ),
        num_experts=2,
        top_k=1,
        max_tokens_per_rank=1100,
        payloads=(((16,), torch.uint8),),
        output=((32768,), torch.bfloat16),
        wire=FP8,
    )
    assert 1100 * 32768 > 32 << 20
    check_case(case, run_ranks(2, combine_once, case, mode="thread", device=device))


def share_without_room(rank: Rank) -> str:
    """A body: an object whose quantised rows would lie in the regions of another one."""
    large = {
        "num_experts": 2,
        "top_k": 1,
        "max_tokens_per_rank": 64,
        "payloads": [putget.Payload((1 << 21,), torch.uint8)],
    }
    small = {
        "num_experts": 2,
        "top_k": 1,
        "max_tokens_per_rank": 1100,
        "payloads": [putget.Payload((16,), torch.uint8)],
    }
    rows = {"output": putget.Payload((32768,), torch.bfloat16), "combine_dtype": FP8}
    sizes = [
        putget.workspace_bytes(ep_size=rank.size, **one) for one in (large | {"output": rows["output"]}, small | rows)
    ]
    with (
        putget.Workspace(rank.comm, max(sizes), rank.device) as workspace,
        rank.all_to_all(**large, output=rows["output"], workspace=workspace),
    ):
        try:
            rank.all_to_all(**small, **rows, workspace=workspace).close()
        except ValueError as error:
            return str(error)
    return "nothing"


def test_objects_that_have_no_room_together_are_refused(device: str) -> None:
    for said in run_ranks(2, share_without_room, mode="thread", device=device):
        assert "its objects together need" in said


# Rows of one access of a warp and of more, in pairs of packs and with one left over.
LONGER = [((1024,), torch.bfloat16), ((528,), torch.bfloat16), ((1056,), torch.float16), ((1040,), torch.float32)]


@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
@pytest.mark.parametrize(("senders", "splits"), [(6, 1), (2, 1), (2, 2), (5, 2)])
def test_whoever_sends_and_whoever_sums(senders: int, splits: int, wire: Wire, device: str) -> None:
    """On GPUs: all CTAs both, some the one and others the other, all the one and some the other."""
    tuning = putget.tuning.Launch(6, 64, 512, splits=splits, senders=senders, sentinel_rows=SENTINEL)
    cases = [
        case_of(wire, 3, rounds(20 * i, 4), num_experts=9, top_k=3, output=output, sentinel_rows=None)
        for i, output in enumerate(LONGER)
    ]
    results = run_ranks(3, play_with, cases, tuning, mode="thread", device=device)
    for index, case in enumerate(cases):
        check_case(case, [of_rank[index] for of_rank in results])


def test_sizes_on_both_sides_of_the_room(device: str) -> None:
    """More tokens than the workspace has room for rows; ranks on both sides in one round."""
    case = Case(
        2,
        (Round(1, (5, 9)), Round(2, (9, 5), ending="flat"), Round(3, (5, 5), ending="strided"), Round(4, (9, 0))),
        num_experts=4,
        max_tokens_per_rank=9,
        output=((8192,), torch.bfloat16),
    )
    results = run_ranks(2, play_asks, [case], (SENTINEL, SENTINEL), mode="thread", device=device)
    check_case(case, [of_rank[0] for of_rank in results])
    for found in run_ranks(2, rule_of, case.options() | launch(SENTINEL), (5, 9), mode="thread"):
        assert found == [SENTINEL, APART]


def rule_of(rank: Rank, options: dict[str, Any], sizes: tuple[int, ...]) -> list[bool | None]:
    """A body: how rows would come for batches of several sizes."""
    with rank.all_to_all(**{"max_tokens_per_rank": 512, "tuning": None} | options) as a2a:
        return [a2a.launches(tokens)[1].sentinel_rows for tokens in sizes]


LONG = {"output": putget.Payload((7168,), torch.bfloat16), "num_experts": 64, "top_k": 8}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (LONG | {"num_sms": 132}, "ssss-"),
        (LONG | {"num_sms": 64}, "ssss-"),
        (LONG | {"num_sms": 16}, "ss---"),
        (LONG | {"num_sms": 4}, "s----"),
        (LONG | {"num_sms": 4, "tuning": putget.tuning.Tuning(finish_num_sms=132)}, "s----"),
    ],
)
def test_the_rule_of_gpus(options: dict[str, Any], wanted: str, device: str) -> None:
    """wanted: s for sentinel rows, - for others, by size. A CPU gets them whatever the size."""
    for found in run_ranks(2, rule_of, options, (0, 1, 8, 64, 512), mode="thread", device=device):
        assert "".join("s" if sentinel else "-" for sentinel in found) == (wanted if device == "cuda" else "-----")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (LONG | {"num_sms": 4} | launch(SENTINEL), "ssss-"),
        (LONG | launch(APART), "-----"),
        (LONG | {"combine_dtype": torch.float8_e4m3fn}, "sssss"),
        (LONG | {"combine_dtype": torch.float8_e4m3fn, "num_sms": 4}, "sssss"),
        (LONG | {"output": putget.Payload((7,), torch.bfloat16)} | launch(SENTINEL), "-----"),
    ],
)
def test_what_a_caller_asks_for(options: dict[str, Any], wanted: str, device: str) -> None:
    for found in run_ranks(2, rule_of, options, (0, 1, 8, 64, 512), mode="thread", device=device):
        assert "".join("s" if sentinel else "-" for sentinel in found) == wanted


@pytest.mark.parametrize(("ranks", "tokens", "wanted"), [(1, 1, APART), (3, 200, SENTINEL), (3, 512, APART)])
def test_the_rule_by_ranks(ranks: int, tokens: int, wanted: bool, device: str) -> None:
    """Nothing comes from elsewhere to one rank; with more than two the room decides."""
    for found in run_ranks(ranks, rule_of, LONG | {"num_sms": 132}, (tokens,), mode="thread", device=device):
        assert found == [wanted if device == "cuda" else APART]


def write_nothing_but_ones(rank: Rank, dtype: torch.dtype, wire: Wire) -> tuple[bool, bool]:
    """A body: experts write the NaN that looks as if nothing had come, into the workspace and elsewhere."""
    with rank.all_to_all(
        num_experts=rank.size,
        top_k=rank.size,
        max_tokens_per_rank=4,
        payloads=[putget.Payload((4,), torch.float32)],
        output=putget.Payload((32,), dtype),
        combine_dtype=wire,
        timeout_s=20.0,
        warmup_timeout_s=20.0,
        **launch(SENTINEL),
    ) as a2a:
        ids = torch.arange(rank.size, dtype=torch.int32, device=rank.device).repeat(4, 1)
        weights = torch.ones(4, rank.size, device=rank.device)
        payload = torch.zeros(4, 4, device=rank.device)
        said = []
        for elsewhere in (False, True):
            a2a.dispatch(ids, weights, payload)
            a2a.combine_input.view(torch.uint8).fill_(0xFF)
            x = a2a.combine_input.clone() if elsewhere else None
            said.append(bool(a2a.combine(x).isnan().all()))
            a2a.check()
        return said[0], said[1]


@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_looks_like_nothing_comes_as_another_nan(dtype: torch.dtype, wire: Wire, device: str) -> None:
    for said in run_ranks(2, write_nothing_but_ones, dtype, wire, mode="thread", device=device):
        assert said == (True, True)


def look_behind(rank: Rank, case: Case) -> tuple[list[Outcome], bool]:
    """A body: rounds, and whether afterwards every word says again that nothing has come."""
    with rank.all_to_all(**case.options(), **launch(SENTINEL)) as a2a:
        outcomes = play_on(a2a, rank, case)
        rank.meet()
        behind = a2a.workspace.memory.tensor()[a2a.workspace.regions_end() :]
        return outcomes, len(behind) > 0 and bool((behind == 0xFF).all())


@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
@pytest.mark.parametrize("top_k", [3, 9])
def test_every_word_is_set_back(top_k: int, wire: Wire, device: str) -> None:
    """Also of rows of several blocks, the last one short, and of several segments."""
    case = case_of(
        wire, 3, rounds(200), num_experts=9, top_k=top_k, output=((1104,), torch.bfloat16), sentinel_rows=None
    )
    results = run_ranks(3, look_behind, case, mode="thread", device=device)
    check_case(case, [outcomes for outcomes, _ in results])
    assert all(is_set_back for _, is_set_back in results)


def play_layers_that_share(rank: Rank, cases: list[Case], asks: list[int]) -> list[list[Outcome]]:
    """A body: objects of different shapes take turns on one workspace, round by round, across the wrap of the epoch."""
    workspace = putget.Workspace(rank.comm, max(map(bytes_of, cases)), device=rank.device, timeout_s=20)
    objects = [
        rank.all_to_all(**case.options(), **launch(ask), workspace=workspace)
        for case, ask in zip(cases, asks, strict=True)
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
    ("wires", "outputs"), [([None] * 3, OUTPUTS[:3]), ([FP8, None, FP8], BLOCKS[:3])], ids=["same", "several"]
)
def test_rows_of_other_sizes_in_the_same_place(wires: list[Wire], outputs: list[Any], device: str) -> None:
    cases = [
        case_of(wire, 3, rounds(50 + 10 * i, 6), num_experts=9, top_k=3, output=output, sentinel_rows=None)
        for i, (wire, output) in enumerate(zip(wires, outputs, strict=True))
    ]
    results = run_ranks(3, play_layers_that_share, cases, [SENTINEL, APART, SENTINEL], mode="thread", device=device)
    for at, case in enumerate(cases):
        for index in range(len(case.rounds)):
            check_round(case, index, {rank: of_rank[at][index] for rank, of_rank in enumerate(results)}, check=False)


def miss_a_rank(rank: Rank, asks: tuple[int, ...]) -> tuple[str, tuple[int, ...], float]:
    """A body: the last rank dispatches and does not combine."""
    case = Case(3, (Round(1, (4, 4, 4)),), num_experts=6, top_k=6)
    sent = case.sent(0, rank.rank)
    with rank.all_to_all(**case.options(), **launch(asks[rank.rank]), timeout_s=5.0, warmup_timeout_s=5.0) as a2a:
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


@pytest.mark.parametrize("asks", [(SENTINEL,) * 3, (SENTINEL, APART, SENTINEL)], ids=str)
def test_a_rank_whose_rows_do_not_come_is_named(asks: tuple[int, ...], device: str) -> None:
    results = run_ranks(3, miss_a_rank, asks, mode="thread", device=device)
    for phase, missing, seconds in results[:2]:
        assert (phase, missing) == ("combine", (2,))
        assert seconds < 5 + 30  # a busy machine takes its time, too


# Two experts a rank; the first rank needs none of the last one's rows.
SOME = Case(
    3,
    (Round(1, (2, 2, 2), topk_ids=(((0, 2),) * 2, ((2, 4),) * 2, ((4, 0),) * 2)), Round(2, (2, 2, 2))),
    num_experts=6,
    top_k=2,
    output=((512,), torch.float32),  # so long that there is room
)


def wait_for_some(rank: Rank, over: Path) -> tuple[Outcome, Outcome]:
    """A body: the last rank comes to its first combine once the first one has ended it."""
    deadlines = {"timeout_s": 30.0, "warmup_timeout_s": 30.0}
    opened = replace(SOME, rounds=tuple(replace(one, ending="open") for one in SOME.rounds))
    sent = SOME.sent(1, rank.rank)
    arguments = [tensor.to(rank.device) for tensor in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
    rows = SOME.expert_rows(0, rank.rank).to(rank.device)
    with rank.all_to_all(**SOME.options(), **launch(SENTINEL), **deadlines) as a2a:
        assert a2a.launches(2)[1].sentinel_rows == SENTINEL
        first = play_round(a2a, rank, opened, 0)
        deadline = time.monotonic() + 60
        while rank.rank == 2 and not over.exists():
            assert time.monotonic() < deadline, "rank 0 waits"
            time.sleep(0.01)
        combined = a2a.combine(rows)
        a2a.check()
        if rank.rank == 0:
            over.touch()
        a2a.dispatch(*arguments)
        a2a.check()
        a2a.release()
        return replace(first, combined=combined.cpu()), play_round(a2a, rank, SOME, 1)


def test_nobody_waits_for_a_rank_whose_rows_it_does_not_need(device: str, tmp_path: Path) -> None:
    results = run_ranks(3, wait_for_some, tmp_path / "over", device=device)
    for index in range(2):
        check_round(SOME, index, {rank: of_rank[index] for rank, of_rank in enumerate(results)})
