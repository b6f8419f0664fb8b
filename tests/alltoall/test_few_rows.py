"""Sums of tokens that have few rows, as there are few ranks: equal to the oracle's bits, for every place of rows."""

from __future__ import annotations

import itertools

import pytest
import torch

import putget
from tests.alltoall.test_alltoall import play_with
from tests.harness import run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import check_case
from tests.harness.rank import Rank

WAYS = {
    "where they lie": {"tuning": putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=False))},
    "as sentinel rows": {"tuning": putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=True))},
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
# Rows of several segments, of part of one, and with a last access that is not full.
OUTPUTS = (((7176,), torch.bfloat16), ((520,), torch.float32), ((16,), torch.float16))


@EVERY_WAY
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 5, 8, 19, 32])
@pytest.mark.parametrize("ep_size", [1, 2, 4, 6])
def test_equal_to_the_oracle(ep_size: int, top_k: int, output: tuple, way: str, device: str) -> None:
    sizes = itertools.product((8, 0, 3), repeat=ep_size)
    rounds = tuple(
        Round(17 * top_k + i, size, ending="flat" if i % 2 else "zero_copy", addend=i % 3 == 0, no_expert=0.1 * (i % 9))
        for i, size in enumerate(itertools.islice(sizes, 0, None, 3**ep_size // 3))
    )
    case = Case(ep_size, rounds, num_experts=13, top_k=top_k, output=output)
    check_case(case, run_ranks(ep_size, play_with, case, WAYS[way], mode="thread", device=device))


@EVERY_WAY
def test_every_place_of_four_rows(way: str, device: str) -> None:
    """One token for each set of positions of eight, so every grouping of up to four rows."""
    places = [place for count in range(5) for place in itertools.combinations(range(8), count)]
    ids = tuple(
        tuple(next((rank for rank, at in enumerate(place) if at == k), -1) for k in range(8)) for place in places
    )
    nobody = ()
    rounds = (Round(1, (len(ids), 0, 0, 0), topk_ids=(ids, nobody, nobody, nobody)),)
    case = Case(4, rounds, num_experts=4, top_k=8, max_tokens_per_rank=len(ids), output=((1032,), torch.bfloat16))
    check_case(case, run_ranks(4, play_with, case, WAYS[way], mode="thread", device=device))


def combine_minus_zeros(rank: Rank, top_k: int, options: dict[str, object]) -> torch.Tensor:
    """A body: sums of rows of -0, of tokens that have one for each position, and of a last one that lacks one."""
    ids = (torch.arange(4)[:, None] + torch.arange(top_k)) % rank.size  # each on another rank
    ids[3, top_k - 1] = -1
    sent = (ids.int(), torch.rand(4, top_k), torch.rand(4, 4))
    output = putget.Payload((272,), torch.bfloat16)
    with rank.all_to_all(num_experts=rank.size, top_k=top_k, output=output, **options) as a2a:
        a2a.dispatch(*(part.to(rank.device) for part in sent))
        a2a.combine_input.fill_(-0.0)
        return a2a.combine().cpu()


@EVERY_WAY
@pytest.mark.parametrize("wire", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("ep_size", "top_k"), [(2, 1), (2, 2), (4, 3), (4, 4), (6, 1), (6, 5), (6, 6), (8, 8)])
def test_what_is_no_position_adds_no_zero(
    ep_size: int, top_k: int, wire: torch.dtype | None, way: str, device: str
) -> None:
    """Tokens have -0 as their sum only if nothing but rows of -0 is added: room for more rows adds nothing."""
    options = WAYS[way] if wire is None else {"combine_dtype": wire}  # which is always sent
    for sums in run_ranks(ep_size, combine_minus_zeros, top_k, options, mode="thread", device=device):
        assert sums.eq(0).all()
        assert torch.signbit(sums).all(dim=1).tolist() == [True, True, True, False]
        assert not torch.signbit(sums[3]).any()


def combine_from_outside(rank: Rank, shift: int, in_halves: bool) -> tuple[list[bool], list[float]]:
    """A body: of which ranks the rows from outside were copied into combine_input, and what the sums were."""
    with rank.all_to_all(
        num_experts=2,
        top_k=2,
        max_tokens_per_rank=4,
        payloads=[putget.Payload((4,), torch.float32)],
        output=putget.Payload((64,), torch.bfloat16),
        **WAYS["where they lie"],
    ) as a2a:
        ids = torch.tensor([[0, 1]] * 4, dtype=torch.int32, device=rank.device)
        a2a.dispatch(ids, torch.ones(4, 2, device=rank.device), torch.ones(4, 4, device=rank.device))
        memory = torch.full((a2a.combine_input.numel() + shift,), 1.0 + rank.rank, device=rank.device).bfloat16()
        a2a.combine_input.fill_(7)
        rank.wait()
        rank.meet()  # nobody gets a row before it is filled
        x = memory[shift:].view(a2a.combine_input.shape)
        if in_halves:
            a2a.combine_start(x)
        sums = a2a.combine_finish() if in_halves else a2a.combine(x)
        rank.wait()
        left = a2a.combine_input.eq(7).flatten(1).all(dim=1)
        return (~left).tolist(), sums.float().unique().tolist()


@pytest.mark.parametrize(("shift", "in_halves"), [(0, False), (1, False), (0, True)])
def test_own_rows_from_outside_are_summed_where_they_lie(shift: int, in_halves: bool, device: str) -> None:
    """In whole combines, where they allow the widest access; else they are copied, as the peers' are."""
    stay = shift == 0 and not in_halves
    results = run_ranks(2, combine_from_outside, shift, in_halves, mode="thread", device=device)
    assert results == [([not stay, True], [3.0]), ([True, not stay], [3.0])]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("sentinel_rows", [False, None])
def test_few_sms_and_more_for_the_finish(sentinel_rows: bool | None, device: str) -> None:
    """CTAs in pairs where SMs are few; a finish half with another launch than its start."""
    rounds = tuple(Round(i, (200, 37 * i), halves=(3, i % 4), addend=True) for i in range(5))
    case = Case(2, rounds, 16, 8, 200, output=((7168,), torch.bfloat16))
    combine = putget.tuning.Launch(sentinel_rows=sentinel_rows)
    for sms, finish in ((8, None), (4, 64), (7, 2)):
        options = {"num_sms": sms, "tuning": putget.tuning.Tuning(combine=combine, finish_num_sms=finish)}
        check_case(case, run_ranks(2, play_with, case, options, mode="thread", device=device))
