"""How combine's rows travel, got or pushed, plain or quantised, whole or in halves: equal to the oracle's bits.

Not as sentinel rows, unless a test says so: test_sentinel_rows.py has those.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import putget
from putget.reference import quantised
from tests.harness import Rank, run_ranks
from tests.harness.cases import COMBINE, DISPATCH, Case, Round
from tests.harness.compare import Outcome, check_case, check_round, play, play_on
from tests.memory.test_workspace import bytes_of, join_later, play_layers

FP8 = torch.float8_e4m3fn
BY_RULE, APART = None, False
Wire = torch.dtype | None  # combine_dtype
WIRES: tuple[Wire, ...] = (None, FP8)
ENDINGS = ("zero_copy", "zero_copy_flat", "flat", "strided", "transposed")
EVERY_HALF = tuple(itertools.product((0, DISPATCH, COMBINE, DISPATCH + COMBINE), repeat=3))


def wire_id(wire: Wire) -> str:
    return "same" if wire is None else "fp8"


@pytest.fixture(params=WIRES, ids=wire_id)
def wire(request: pytest.FixtureRequest) -> Wire:
    """Every way to travel."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[BY_RULE, APART], ids=["by_rule", "apart"])
def sentinel_rows(request: pytest.FixtureRequest) -> bool | None:
    """Both ways of small batches."""
    return request.param  # type: ignore[no-any-return]


def case_of(wire: Wire, ep_size: int, rounds: tuple[Round, ...], **changes: object) -> Case:
    """Rows are got, if they can be: quantised ones cannot."""
    changes = {"num_experts": 2 * ep_size + 1, "top_k": 3, "sentinel_rows": APART, **changes}
    if wire is not None:
        changes["sentinel_rows"] = None
    return Case(ep_size, rounds, wire=wire, **changes)  # type: ignore[arg-type]


def play_all(rank: Rank, cases: list[Case]) -> list[list[Outcome]]:
    """A body: one AllToAll after the other."""
    return [play(rank, case) for case in cases]


def check_all(cases: list[Case], device: str, mode: str = "thread") -> None:
    results = run_ranks(cases[0].ep_size, play_all, cases, mode=mode, device=device)
    for index, case in enumerate(cases):
        check_case(case, [of_rank[index] for of_rank in results])


def halves(index: int) -> tuple[int, ...]:
    """The halves that three ranks run, another combination for every index."""
    return EVERY_HALF[index * 7 % len(EVERY_HALF)]


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_every_ending_in_every_combination_of_halves(wire: Wire, mode: str, device: str) -> None:
    rounds = tuple(
        Round(i, (i % 5, 8 - i % 9, (3 * i) % 7), ENDINGS[i % 5], out=i % 2 == 0, addend=i % 3 == 0, halves=both)
        for i, both in enumerate(EVERY_HALF)
    )
    check_all([case_of(wire, 3, rounds, output=((48,), torch.bfloat16))], device, mode)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_width_and_top_k(wire: Wire, dtype: torch.dtype, device: str) -> None:
    """Blocks of 128 that are whole, cut short, and several a row; top_k with and without a kernel of its own."""
    widths: tuple[tuple[int, ...], ...] = ((16,), (112,), (128,), (144,), (2, 8), (288,), (3, 5, 16), (2880,))
    top_ks = (1, 3, 5, 8, 9, 22, 4, 2)
    cases = [
        case_of(
            wire,
            3,
            (
                Round(10 * i, (8, 0, 3), ENDINGS[i % 5], addend=True, halves=halves(i)),
                Round(10 * i + 1, (0, 0, 0), ENDINGS[(i + 1) % 5], halves=halves(i + 1)),
                Round(10 * i + 2, (1, 8, 5), ENDINGS[(i + 2) % 5], out=True, no_expert=0.2, halves=halves(i + 2)),
            ),
            top_k=top_k,
            num_experts=25,
            output=(width, dtype),
        )
        for i, (width, top_k) in enumerate(zip(widths, top_ks, strict=True))
    ]
    check_all(cases, device)


def test_rows_that_are_no_multiple_of_an_access(device: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (3,), (17,), (5, 7)]
    rounds = tuple(Round(i, (3, 8, 0), ending, addend=True, halves=halves(i)) for i, ending in enumerate(ENDINGS))
    check_all(
        [
            case_of(None, 3, rounds, output=(shape, dtype))
            for shape in shapes
            for dtype in (torch.bfloat16, torch.float32)
        ],
        device,
    )


def test_many_tokens(wire: Wire, sentinel_rows: bool | None, device: str) -> None:
    sizes = (1, 31, 33, 128, 200)
    rounds = tuple(
        Round(n, (n, 201 - n, n // 2), "flat" if n % 2 else "zero_copy", halves=halves(n), no_expert=0.05)
        for n in sizes
    )
    check_all(
        [
            case_of(
                wire,
                3,
                rounds,
                max_tokens_per_rank=201,
                top_k=6,
                output=((160,), torch.bfloat16),
                sentinel_rows=sentinel_rows,
            )
        ],
        device,
    )


def test_padding_tables_and_smaller_max_rows(wire: Wire, sentinel_rows: bool | None, device: str) -> None:
    rounds = (
        Round(1, (8, 0, 4), num_valid=(3, 0, None), invalid=0.2, halves=halves(1)),
        Round(2, (5, 2, 3), max_rows=(5, None, 6), ending="flat", halves=halves(2)),
        Round(3, (8, 8, 8), table=(1, 1, 1, 1, 2, 2, 0), ending="strided", halves=halves(3)),
        Round(4, (1, 1, 0), max_rows=(1, 1, 1), ending="zero_copy_flat", halves=halves(4)),
        Round(5, (8, 3, 1), no_expert=1.1, addend=True, halves=halves(5)),
    )
    check_all([case_of(wire, 3, rounds, output=((32,), torch.float16), sentinel_rows=sentinel_rows)], device)


def test_rounds_without_combine(wire: Wire, sentinel_rows: bool | None, device: str) -> None:
    """Notes and words stay behind; whoever looks at them next must not take them for his round's."""
    endings = ("zero_copy", "open", "flat", "release", "open", "zero_copy", "release", "release", "strided", "open")
    rounds = tuple(Round(i, (i % 4, 8, 8 - i % 5), ending, halves=halves(i)) for i, ending in enumerate(endings))
    check_all(
        [case_of(wire, 3, rounds, output=((16,), torch.bfloat16), sentinel_rows=sentinel_rows)], device, "process"
    )


def play_from_epoch(rank: Rank, case: Case, epoch: int) -> list[Outcome]:
    """A body: sets the epoch of all ranks before the first round."""
    with rank.all_to_all(**case.options()) as a2a:
        a2a.workspace._reset(epoch)
        return play_on(a2a, rank, case)


def test_epoch_wraps(wire: Wire, sentinel_rows: bool | None, device: str) -> None:
    endings = ("zero_copy", "flat", "open", "strided", "release", "zero_copy")
    rounds = tuple(Round(i, (i % 3, 4, 8 - i % 4), ending, halves=halves(i)) for i, ending in enumerate(endings))
    case = case_of(wire, 3, rounds, output=((16,), torch.float32), sentinel_rows=sentinel_rows)
    check_case(case, run_ranks(3, play_from_epoch, case, 2**32 - 3, mode="thread", device=device))


def test_one_rank_and_eight(wire: Wire, sentinel_rows: bool | None, device: str) -> None:
    """With eight ranks also more positions than a kernel has rows of its own for."""
    row = ((272,), torch.bfloat16)
    alone = (Round(1, (5,), halves=(3,)), Round(2, (0,), "flat"), Round(3, (8,), "strided", halves=(2,), addend=True))
    check_all([case_of(wire, 1, alone, num_experts=3, output=row, sentinel_rows=sentinel_rows)], device)
    many = (
        Round(1, (8, 0, 1, 7, 2, 3, 8, 5), halves=(0, 1, 2, 3, 3, 2, 1, 0)),
        Round(2, (1, 2, 3, 4, 5, 6, 7, 8), "flat", addend=True),
    )
    cases = [
        case_of(wire, 8, many, num_experts=64, top_k=top_k, output=row, sentinel_rows=sentinel_rows)
        for top_k in (8, 11)
    ]
    check_all(cases, device)


def layers_of_every_wire() -> tuple[Case, ...]:
    """Objects that differ in all sizes, so that their regions lie over each other."""
    widths = (48, 208, 16, 320)
    kinds = (torch.bfloat16, torch.float32, torch.float16)
    return tuple(
        case_of(
            wire,
            3,
            tuple(
                Round(10 * i + n, ((n + i) % 7, 6 - n % 7, n % 3), ENDINGS[n % 5], halves=halves(n + i))
                for n in range(4)
            ),
            top_k=2 + i,
            max_tokens_per_rank=6 + i % 2,
            payloads=(((100 * (6 - i),), torch.uint8),),
            output=((width,), kinds[i % 3]),
        )
        for i, (wire, width) in enumerate(zip(WIRES * 2, widths, strict=True))
    )


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_objects_of_every_wire_share_a_workspace(mode: str, device: str) -> None:
    layers = layers_of_every_wire()
    order = (0, 2, 1, 3, 3, 2, 1, 0, 2, 0, 3, 1, 0, 1, 2, 3)
    num_bytes = max(bytes_of(case) for case in layers)
    results = run_ranks(3, play_layers, layers, order, num_bytes, mode=mode, device=device)
    for layer, case in enumerate(layers):
        for index in range(len(case.rounds)):
            check_round(case, index, {rank: outcomes[layer][index] for rank, outcomes in enumerate(results)})


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_layer_of_another_wire_comes_later(mode: str, device: str) -> None:
    layers = layers_of_every_wire()
    num_bytes = max(bytes_of(case) for case in layers)
    for cases in ((layers[0], layers[2]), (layers[3], layers[0]), (layers[3], layers[1])):
        results = run_ranks(3, join_later, cases, 2**32 - 4, num_bytes, mode=mode, device=device)
        for which, case in enumerate(cases):
            for index in range(len(results[0][which])):
                check_round(case, index, {rank: outcomes[which][index] for rank, outcomes in enumerate(results)})


def test_sent_and_got_rows_give_the_same_bits(device: str) -> None:
    case = case_of(
        None,
        3,
        (Round(1, (8, 3, 5), "flat"), Round(2, (0, 8, 1), addend=True)),
        output=((160,), torch.bfloat16),
        top_k=5,
    )
    results = [
        run_ranks(3, play, replace(case, sentinel_rows=sentinel), mode="thread", device=device)
        for sentinel in (False, True)
    ]
    for got, sent in zip(*results, strict=True):
        for one, other in zip(got, sent, strict=True):
            assert one.combined is not None
            assert other.combined is not None
            assert torch.equal(one.combined, other.combined)


def row_bytes(rank: Rank, case: Case) -> int:
    """A body."""
    with rank.all_to_all(**case.options()) as a2a:
        return a2a.combine_row_bytes


def test_rows_as_they_travel() -> None:
    """Quantised: elements, and 4 bytes for each 128 of them, in units of 16 bytes."""
    for width, expected in ((48, 64), (128, 144), (2880, 2976)):
        case = case_of(FP8, 1, (), output=((width,), torch.bfloat16))
        assert run_ranks(1, row_bytes, case, mode="thread") == [expected]
        assert run_ranks(1, row_bytes, replace(case, wire=None), mode="thread") == [2 * width]


def combine_unaligned(rank: Rank, case: Case) -> list[Outcome]:
    """A body: x, out and addend begin two bytes after what a wide access would need."""
    outcomes = []
    with rank.all_to_all(**case.options()) as a2a:
        whole_combine = a2a.combine

        def off(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
            return moved.copy_(tensor)

        def combine(x: torch.Tensor | None, *, out: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
            moved = off(out)
            whole_combine(off(x), out=moved, addend=off(addend))
            return out.copy_(moved)

        a2a.combine = combine  # type: ignore[method-assign,assignment]
        outcomes = play_on(a2a, rank, case)
    return outcomes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tensors_that_allow_narrow_accesses_only(wire: Wire, dtype: torch.dtype, device: str) -> None:
    rounds = tuple(Round(i, (8, 0, 3), ending, out=True, addend=i % 2 == 0) for i, ending in enumerate(("flat",) * 4))
    case = case_of(wire, 3, rounds, output=((144,), dtype), top_k=4)
    check_case(case, run_ranks(3, combine_unaligned, case, mode="thread", device=device))


def combine_not_finite(rank: Rank, case: Case) -> torch.Tensor:
    """A body: a block with an infinity, one with a NaN, and one without; two of a row's experts write them."""
    with rank.all_to_all(**case.options()) as a2a:
        sent = case.sent(0, rank.rank)
        arguments = [t.to(rank.device) for t in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
        rows = torch.arange(384.0, device=rank.device)
        rows[5], rows[130] = float("inf"), float("nan")
        rank.meet()
        a2a.dispatch(*arguments)
        a2a.combine_input.copy_(rows)
        rank.meet()
        return a2a.combine().cpu()


def test_quantised_infinities_and_nans(device: str) -> None:
    case = case_of(
        FP8,
        2,
        (Round(1, (1, 1), topk_ids=(((0, 1),), ((0, 1),))),),
        num_experts=2,
        top_k=2,
        output=((384,), torch.float32),
    )
    for got in run_ranks(2, combine_not_finite, case, mode="thread", device=device):
        (values,) = got
        assert torch.isnan(values[130])
        assert torch.isfinite(values[256:]).all()
        assert torch.isfinite(values[131:256]).all()
        # Where the largest element is infinite, there is no scale for the others.
        assert torch.isnan(values[:128]).all()


def blocks_of_every_magnitude(values: torch.dtype) -> torch.Tensor:
    """Blocks of 128 with another largest element each: all positive finite values of a type of two bytes; 64 a row."""
    end = 0x7C00 if values == torch.float16 else 0x7F80
    largest = torch.arange(end, dtype=torch.int16).view(values).float()
    return (largest[:, None] * torch.linspace(-1.0, 1.0, 128)).view(-1, 64 * 128)


def combine_every_magnitude(rank: Rank, values: torch.dtype, written: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A body: each rank's tokens get the blocks from the next rank. Returns their sums and what experts wrote."""
    rows = blocks_of_every_magnitude(values).to(written)
    num_tokens = len(rows)
    next_rank, last_rank = ((rank.rank + step) % rank.size for step in (1, -1))
    with rank.all_to_all(
        num_experts=rank.size,
        top_k=1,
        max_tokens_per_rank=num_tokens,
        payloads=[putget.Payload((16,), torch.uint8)],
        output=putget.Payload((64 * 128,), written),
        combine_dtype=FP8,
    ) as a2a:
        ids = torch.full((num_tokens, 1), next_rank, dtype=torch.int32, device=rank.device)
        weights = torch.ones(num_tokens, 1, device=rank.device)
        rank.meet()
        a2a.dispatch(ids, weights, torch.zeros(num_tokens, 16, dtype=torch.uint8, device=rank.device))
        a2a.combine_input[last_rank, :num_tokens] = rows.to(rank.device)
        rank.meet()
        return a2a.combine().cpu(), rows


@pytest.mark.parametrize(
    ("values", "written"),
    [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
    ids=str,
)
def test_scales_of_every_magnitude(values: torch.dtype, written: torch.dtype, device: str) -> None:
    """A GPU divides without a branch: the quotients are those of the oracle for all that a block's largest may be."""
    for sums, rows in run_ranks(2, combine_every_magnitude, values, written, mode="thread", device=device):
        expected = quantised(rows.float()).to(written)
        assert torch.equal(sums, expected)
