"""A sum is a NaN where the oracle's is, by every way that rows come; in 16 bits it is always the same one."""

from __future__ import annotations

import pytest
import torch

import putget
from putget import reference
from tests.harness import Rank, run_ranks
from tests.harness.cases import APART, SENTINEL, Case, Round

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
# Quiet and signalling NaNs of both signs, with all kinds of payloads; all ones is what stands for "not come".
NANS = {
    torch.int32: [0x7FC00000, -0x400000, 0x7F800001, -1, -1, 0x7FFFFFFF, -0x7FFFFF, 0x7FABCDEF],
    torch.int16: [0x7FC0, -0x40, 0x7F81, -1, -1, -1, -1, 0x7FFF],
}


def case_of(dtype: torch.dtype, top_k: int) -> Case:
    return Case(2, (Round(5, (6, 6), ending="flat"),), num_experts=4, top_k=top_k, output=((32,), dtype))


def rows_with_nans(case: Case, rank: int) -> torch.Tensor:
    rows = case.expert_rows(0, rank)
    words = rows.view(BITS[rows.dtype])
    nans = torch.tensor(NANS[words.dtype], dtype=torch.int64).to(words.dtype)
    words[:, ::2, 8:16] = nans
    if rank == 1:
        words[:, :, 20:22] = -1
    return rows


def combine(rank: Rank, case: Case, flags: int) -> torch.Tensor:
    launch = putget.tuning.Launch(sentinel_rows=flags)
    options = {**case.options(), "tuning": putget.tuning.Tuning(combine=launch)}
    sent = case.sent(0, rank.rank)
    given = [tensor.to(rank.device) for tensor in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
    rows = rows_with_nans(case, rank.rank).to(rank.device)
    with rank.all_to_all(**options) as a2a:
        rank.meet()
        a2a.dispatch(*given)
        return a2a.combine(rows).cpu()


@pytest.mark.parametrize("flags", [APART, SENTINEL])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_nans_come_back(dtype: torch.dtype, top_k: int, flags: int, device: str) -> None:
    case = case_of(dtype, top_k)
    routings, _ = reference.dispatch([case.sent(0, rank) for rank in range(2)], case.table_of(0), max_rows=[8, 8])
    rows = [rows_with_nans(case, rank) for rank in range(2)]
    results = run_ranks(2, combine, case, flags, mode="thread", device=device)
    for rank, got in enumerate(results):
        want = reference.combine(routings[rank], rows, rank)
        assert want.isnan().any()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        if dtype != torch.float32:
            assert set(got.view(torch.int16)[got.isnan()].tolist()) == {0x7FFF}
