"""Every configuration of the all-to-all against the oracle, bit for bit."""

from __future__ import annotations

import contextlib
import resource
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from putget import reference
from tests.harness import Rank, run_ranks
from tests.harness.cases import ENDINGS, Case, Round, Row
from tests.harness.compare import Outcome, check_case, play, play_on, same_bits

BF16_ROW: Row = ((64,), torch.bfloat16)

# A DeepSeek-V3 layer in small: FP8 rows with one scale per 128 values.
DEEPSEEK = Case(
    ep_size=8,
    num_experts=256,
    top_k=8,
    max_tokens_per_rank=16,
    payloads=(((512,), torch.float8_e4m3fn), ((4,), torch.float32)),
    output=((512,), torch.bfloat16),
    rounds=(
        Round(1, (16, 16, 16, 16, 16, 16, 16, 16)),
        Round(2, (1, 0, 16, 3, 7, 2, 0, 9), ending="flat", addend=True),
        Round(3, (0, 0, 0, 0, 0, 0, 0, 0)),
        Round(4, (0, 0, 0, 5, 0, 0, 0, 0), out=True),
        Round(5, (2, 1, 2, 1, 2, 1, 2, 1), ids_dtype=torch.int64, no_expert=0.3),
    ),
)

CASES = {
    "deepseek": DEEPSEEK,
    "one_rank": Case(1, (Round(1, (5,)), Round(2, (0,)), Round(3, (8,), ending="strided")), num_experts=3, top_k=3),
    "one_expert": Case(3, (Round(1, (4, 2, 8)), Round(2, (0, 1, 0))), num_experts=1, top_k=4),
    "fewer_experts_than_ranks": Case(7, (Round(1, (4, 2, 8, 1, 0, 3, 5)), Round(2, (1,) * 7)), num_experts=3, top_k=2),
    "experts_do_not_divide": Case(
        6, (Round(1, (4, 2, 8, 1, 0, 3), no_expert=0.1), Round(2, (8,) * 6)), num_experts=23, top_k=6
    ),
    "five_ranks_no_tokens_at_all": Case(5, (Round(1, (0,) * 5), Round(2, (0,) * 5, ending="flat")), output=BF16_ROW),
    "no_expert_at_all": Case(4, (Round(1, (3, 0, 8, 1), no_expert=1.1, addend=True), Round(2, (3, 0, 8, 1)))),
    "everything_to_one_rank": Case(
        4,
        (Round(1, (8, 8, 8, 8)), Round(2, (8, 0, 8, 1), table=(3,) * 8), Round(3, (1, 2, 3, 4), table=(1,) * 8)),
        table=(2,) * 8,
    ),
    "table_of_the_constructor": Case(
        4,
        (Round(1, (5, 0, 8, 3)), Round(2, (2, 2, 2, 2))),
        num_experts=10,
        top_k=4,
        table=(3, 1, 0, 0, 2, 1, 3, 3, 0, 1),
    ),
    "table_updated_in_place": Case(
        3,
        (
            Round(1, (5, 0, 8)),
            Round(2, (5, 4, 8), table=(2, 2, 1, 1, 0, 0, 1)),
            Round(3, (5, 1, 8)),
            Round(4, (5, 1, 8), table=(0, 1, 0, 1, 0, 1, 0)),
        ),
        num_experts=7,
        top_k=3,
    ),
    "int64_ids": Case(4, (Round(1, (5, 0, 8, 3), ids_dtype=torch.int64, no_expert=0.2),), num_experts=9, top_k=3),
    "invalid_ids": Case(
        4,
        (
            Round(1, (5, 0, 8, 3), invalid=0.3, no_expert=0.2),
            Round(2, (5, 2, 8, 3)),
            Round(3, (5, 0, 8, 3), invalid=0.3, ids_dtype=torch.int64),
            Round(4, (8, 8, 8, 8), invalid=1.1),
        ),
        num_experts=9,
        top_k=3,
    ),
    "padded": Case(
        4,
        (
            Round(1, (8, 0, 8, 4), num_valid=(3, 0, 8, 0), addend=True),
            Round(2, (8, 8, 8, 4), num_valid=(None, 5, 1, None), invalid=0.3),
            # The count is on the device, so nobody can refuse one that makes no sense.
            Round(3, (8, 8, 8, 4), num_valid=(-5, 9, 2**31 - 1, 4)),
            Round(4, (8, 8, 8, 4)),
        ),
        top_k=3,
    ),
    "table_with_ranks_that_do_not_exist": Case(
        3,
        (Round(1, (8, 5, 2), table=(0, -1, 3, 1, 2**30, 2, -(2**31), 0)), Round(2, (8, 5, 2), table=(9,) * 8)),
        top_k=4,
    ),
    "max_rows": Case(
        4,
        (
            Round(1, (5, 0, 3, 4), max_rows=(5, None, 6, 8)),
            Round(2, (1, 0, 2, 2), max_rows=(2, 2, 2, None), ending="flat"),
            Round(3, (8, 8, 8, 8), ending="strided"),
            Round(4, (1, 1, 0, 0), max_rows=(1, 1, 1, 1), ending="zero_copy_flat"),
            Round(5, (0, 0, 0, 0), max_rows=(1, None, 1, 1), ending="transposed"),
        ),
        num_experts=4,
        output=BF16_ROW,
    ),
    "statistics": Case(
        5,
        (
            Round(1, (5, 0, 3, 4, 8)),
            Round(2, (0,) * 5, halves=(1, 0, 3, 2, 1)),
            Round(3, (8, 8, 0, 1, 2), no_expert=1.1, ending="release"),
            Round(4, (8, 0, 0, 1, 2), ending="open"),
            Round(5, (1, 2, 3, 4, 5), halves=(3, 3, 3, 0, 0)),
        ),
        num_stats=777,
    ),
    "one_number": Case(3, (Round(1, (5, 0, 3)), Round(2, (0, 0, 0)), Round(3, (1, 1, 1))), num_stats=1),
    "long_rows": Case(2, (Round(1, (4, 3)),), payloads=(((20001,), torch.bfloat16),), output=((20001,), torch.float32)),
}


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize("name", CASES)
def test_case_equals_the_oracle(name: str, mode: str, device: str) -> None:
    case = CASES[name]
    check_case(case, run_ranks(case.ep_size, play, case, mode=mode, device=device))


def play_all(rank: Rank, cases: list[Case]) -> list[list[Outcome]]:
    """A body: one AllToAll after the other."""
    return [play(rank, case) for case in cases]


def check_all(cases: list[Case], device: str, mode: str = "thread") -> None:
    results = run_ranks(cases[0].ep_size, play_all, cases, mode=mode, device=device)
    for index, case in enumerate(cases):
        check_case(case, [of_rank[index] for of_rank in results])


def test_every_top_k(device: str) -> None:
    tokens = (3, 8, 0, 5)
    check_all(
        [
            Case(4, (Round(k, tokens, no_expert=0.1), Round(k + 50, tokens[::-1])), num_experts=41, top_k=k)
            for k in range(1, 33)
        ],
        device,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_output_dtype_shape_and_ending(dtype: torch.dtype, device: str) -> None:
    rounds = tuple(
        Round(10 * i + out + 2 * addend, (3, 8, 0), ending=ending, out=bool(out), addend=bool(addend))
        for i, ending in enumerate(ENDINGS)
        for out, addend in ((0, 0), (1, 0), (0, 1), (1, 1))
        if ending not in ("release", "open") or (out, addend) == (0, 0)
    )
    shapes: list[tuple[int, ...]] = [(), (1,), (3,), (8,), (17,), (56,), (5, 7), (2, 1, 4)]
    check_all([Case(3, rounds, num_experts=9, top_k=5, output=(shape, dtype)) for shape in shapes], device)


DTYPES = [
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.float64,
    torch.complex64,
]


def test_every_payload_dtype_and_row_shape(device: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (3,), (7,), (17,), (56,), (64,), (2, 3)]
    cases = [
        Case(3, (Round(i, (3, 8, 0)), Round(i + 100, (0, 2, 7), ending="open")), payloads=((shape, dtype),))
        for i, (dtype, shape) in enumerate((dtype, shape) for dtype in DTYPES for shape in shapes)
    ]
    check_all(cases, device)


@pytest.mark.parametrize("count", range(1, 9))
def test_one_to_eight_payloads(count: int, device: str) -> None:
    rows: list[Row] = [
        ((7168,), torch.float8_e4m3fn),
        ((56,), torch.float32),
        ((), torch.int64),
        ((3,), torch.uint8),
        ((17,), torch.bool),
        ((1,), torch.bfloat16),
        ((7,), torch.float16),
        ((5, 11), torch.uint8),
    ]
    check_all(
        [
            Case(4, (Round(1, (8, 1, 0, 5)), Round(2, (0, 3, 8, 1))), payloads=tuple(rows[:count])),
            Case(4, (Round(3, (8, 1, 0, 5)),), payloads=tuple(rows[-count:]), top_k=3),
        ],
        device,
    )


@pytest.mark.parametrize("ep_size", [31, 33, 65])
def test_more_ranks_than_a_word_has_bits(ep_size: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * ep_size * ep_size + 512  # every pair of ranks has two sockets in this process, and shares descriptors
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} descriptors, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    tokens = tuple(rank % 4 for rank in range(ep_size))
    rounds = (Round(1, tokens, no_expert=0.1), Round(2, tokens[::-1], ending="flat"))
    check_all([Case(ep_size, rounds, num_experts=ep_size + 5, top_k=9, max_tokens_per_rank=3)], "cpu")


def test_many_tokens_cross_every_internal_block(device: str) -> None:
    """Sizes around powers of two, where a kernel that works in blocks of tokens changes its path."""
    sizes = (1, 31, 32, 33, 127, 128, 129, 300)
    rounds = tuple(
        Round(n, (n, max(sizes) - n + 1, n // 2, n), no_expert=0.05, ending="flat" if n % 2 else "zero_copy")
        for n in sizes
    )
    row: Row = ((24,), torch.uint8)
    check_all([Case(4, rounds, num_experts=33, top_k=6, max_tokens_per_rank=300, payloads=(row,))], device)


def test_same_inputs_give_same_bits_every_time(device: str) -> None:
    case = Case(
        4,
        tuple(Round(7, (8, 5, 0, 3), ending=ending) for ending in ("zero_copy", "flat", "strided") * 4),
        num_experts=16,
        top_k=7,
        output=BF16_ROW,
    )
    for outcomes in run_ranks(4, play, case, mode="thread", device=device):
        first = outcomes[0]
        for other in outcomes[1:]:
            assert torch.equal(other.target_slots, first.target_slots)
            assert torch.equal(other.topk_ids, first.topk_ids)
            assert same_bits(other.combined, first.combined)


def test_num_sms_does_not_change_a_bit(device: str) -> None:
    case = replace(DEEPSEEK, ep_size=2, rounds=(Round(1, (16, 9)), Round(2, (0, 16))))
    for num_sms in (None, 1, 3):
        check_case(case, run_ranks(2, play_with, case, {"num_sms": num_sms}, mode="thread", device=device))


@pytest.mark.parametrize("widths", [(2000, 224), (224, 2000), (16, 512), (2000, 16, 10, 512, 528, 32), (1, 496)])
def test_short_rows_beside_long_ones(widths: tuple[int, ...], device: str) -> None:
    """In a large batch short rows travel apart if their bytes allow it: alone, in every order, in several chunks."""
    shape = Case(
        2,
        (
            Round(1, (140, 33), invalid=0.1, ids_dtype=torch.int64),
            Round(2, (31, 140), no_expert=0.2, num_valid=(20, None), ending="flat"),
        ),
        num_experts=19,
        top_k=5,
        max_tokens_per_rank=140,
        payloads=tuple(((width,), torch.uint8) for width in widths),
    )
    for num_sms in (None, 1):
        check_case(shape, run_ranks(2, play_with, shape, {"num_sms": num_sms}, mode="thread", device=device))


def play_with(rank: Rank, case: Case, options: dict[str, object]) -> list[Outcome]:
    """A body: plays a case with further constructor arguments."""
    with rank.all_to_all(**{**case.options(), **options}) as a2a:
        return play_on(a2a, rank, case)


def play_from_epoch(rank: Rank, case: Case, epoch: int) -> list[Outcome]:
    """A body: sets the epoch of all ranks before the first round."""
    with rank.all_to_all(**case.options()) as a2a:
        a2a.workspace._reset(epoch)
        return play_on(a2a, rank, case)


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize("epoch", [2**32 - 3, 2**31 - 3])
def test_epoch_wraps(epoch: int, mode: str, device: str) -> None:
    endings = ("zero_copy", "open", "flat", "release", "zero_copy", "open", "open", "flat", "zero_copy")
    rounds = tuple(Round(i, (i % 3, 4, 8 - i % 4), ending=ending) for i, ending in enumerate(endings))
    case = Case(3, rounds, num_experts=5, top_k=3)
    check_case(case, run_ranks(3, play_from_epoch, case, epoch, mode=mode, device=device))


def test_rounds_without_combine(device: str) -> None:
    endings = ("open", "open", "release", "open", "zero_copy", "release", "release", "flat", "open")
    rounds = tuple(Round(i, (i % 3, 8, 8 - i % 4, 0), ending=ending) for i, ending in enumerate(endings))
    case = Case(4, rounds, num_experts=5, top_k=3)
    for mode in ("process", "thread"):
        check_case(case, run_ranks(4, play, case, mode=mode, device=device))


def combine_not_finite(rank: Rank, case: Case) -> torch.Tensor:
    """A body: one token a rank; its row on rank 1 holds every pairing with what is on rank 0."""
    dtype = case.output[1]
    values = torch.tensor([1.0, -1.0, float("inf"), -float("inf"), float("nan")], device=rank.device).to(dtype)
    with rank.all_to_all(**case.options()) as a2a:
        sent = case.sent(0, rank.rank)
        arguments = [t.to(rank.device) for t in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
        rows = values.repeat_interleave(5) if rank.rank == 0 else values.repeat(5)
        rank.meet()
        a2a.dispatch(*arguments)
        a2a.combine_input.copy_(rows)
        rank.meet()
        return a2a.combine().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_infinities_and_nans_add_as_in_torch(dtype: torch.dtype, device: str) -> None:
    case = Case(2, (Round(1, (1, 1), topk_ids=(((0, 1),), ((0, 1),))),), num_experts=2, output=((25,), dtype))
    values = torch.tensor([1.0, -1.0, float("inf"), -float("inf"), float("nan")])
    want = (values.repeat_interleave(5) + values.repeat(5)).to(dtype)[None]
    for got in run_ranks(2, combine_not_finite, case, mode="thread", device=device):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        if dtype != torch.float32:
            assert (got[got.isnan()].view(torch.int16) == 0x7FFF).all()


def layer(rank: Rank, weight: torch.Tensor, sents: list[reference.Sent], case: Case) -> torch.Tensor:
    """A body: a whole layer, whose experts read what arrived."""
    sent = sents[rank.rank]
    weight = weight.to(rank.device)
    with rank.all_to_all(**case.options()) as a2a:
        arguments = [t.to(rank.device) for t in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
        rank.meet()
        got = a2a.dispatch(*arguments)
        rows = torch.zeros_like(a2a.combine_input)
        for k in range(case.top_k):
            expert = got.topk_ids[:, :, k].long()
            here = (expert >= 0) & (a2a.expert_to_rank.long()[expert.clamp(min=0)] == rank.rank)
            for e in expert[here].unique().tolist():
                chosen = here & (expert == e)
                rows[chosen] += got.topk_weights[:, :, k][chosen, None] * (got.payloads[0][chosen] @ weight[e])
        rank.meet()
        return a2a.combine(rows).cpu()


def test_a_layer_equals_the_dense_one(device: str) -> None:
    case = Case(
        4,
        (Round(1, (8, 3, 1, 5), no_expert=0.1),),
        num_experts=10,
        top_k=4,
        payloads=(((16,), torch.float32),),
        output=((12,), torch.float32),
    )
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(10, 16, 12, generator=generator)
    sents = [case.sent(0, rank) for rank in range(4)]
    for sent in sents:
        sent.payloads[0].copy_(torch.randn(sent.payloads[0].shape, generator=generator))
    for mode in ("process", "thread"):
        outs = run_ranks(4, layer, weight, sents, case, mode=mode, device=device)
        for sent, out in zip(sents, outs, strict=True):
            dense = reference.dense_moe(
                sent.payloads[0], sent.topk_ids, sent.topk_weights, lambda expert, rows: rows @ weight[expert]
            )
            torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)


ONE_TRACE = threading.Lock()  # of a process, whose threads may be ranks


def profiled(rank: Rank, case: Case) -> dict[str, int]:
    """A body: how often each call of the library stands in rank 0's trace, by torch's profiler; a process has one."""
    trace: Any = contextlib.nullcontext()
    with ONE_TRACE, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass  # the first one imports 900 modules: that takes seconds, and the other rank would wait for them in a round
    if rank.rank == 0:
        trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with rank.all_to_all(**case.options(), timeout_s=60.0) as a2a:
        sent = case.sent(0, rank.rank)
        ids, weights, *payloads = (t.to(rank.device) for t in (sent.topk_ids, sent.topk_weights, *sent.payloads))
        a2a.dispatch(ids, weights, *payloads)
        a2a.combine()
        with trace:
            rank.meet()  # a trace begins when the GPU has nothing to do
            a2a.dispatch(ids, weights, *payloads)
            a2a.combine()
            a2a.dispatch_start(ids, weights, *payloads)
            a2a.dispatch_finish()
            a2a.release()
        rank.meet()
    events = trace.key_averages() if rank.rank == 0 else []
    return {event.key: event.count for event in events if event.key.startswith("putget_")}


def test_a_profile_shows_calls_by_name(device: str) -> None:
    case = Case(2, (Round(1, (3, 5)),))
    expected = {"putget_dispatch": 3, "putget_combine": 1, "putget_release": 1}
    assert run_ranks(2, profiled, case, mode="process", device=device, timeout=120.0) == [expected, {}]
