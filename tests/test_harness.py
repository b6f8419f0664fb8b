"""The harness: a rank that fails, hangs or dies fails the test that ran it, and no other."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from putget.adapters.shared import default_device
from tests.harness import Rank, RankError, run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import check_case, play
from tests.harness.workers import LONGEST, in_order

CASE = Case(2, (Round(1, (3, 5)),), payloads=(((3,), torch.bfloat16),), top_k=3)


def fail_on_last(rank: Rank) -> int:
    if rank.rank == rank.size - 1:
        raise KeyError("on purpose")
    return rank.rank


def hang_on_last(rank: Rank) -> int:
    if rank.rank == rank.size - 1:
        time.sleep(60)
    return rank.rank


def die_on_last(rank: Rank) -> int:
    if rank.rank == rank.size - 1:
        os._exit(3)
    return rank.rank


def devices_of(rank: Rank) -> tuple[str, str]:
    return os.environ["CUDA_VISIBLE_DEVICES"], default_device().type


def test_ranks_on_the_cpu_find_no_gpu() -> None:
    """On a machine with GPUs, too: an adapter whose caller names no device takes the CPU there."""
    assert run_ranks(2, devices_of) == [("", "cpu")] * 2


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_failure_comes_back_with_rank_and_traceback(mode: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, fail_on_last, mode=mode)
    assert "rank 1: Traceback" in str(caught.value)
    assert "in fail_on_last" in str(caught.value)
    assert "rank 0" not in str(caught.value)
    check_case(CASE, run_ranks(2, play, CASE, mode=mode))


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_stuck_rank_is_reported_with_its_stack(mode: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(2, hang_on_last, mode=mode, timeout=4)  # by then it has begun
    assert time.monotonic() - started < 40
    assert "rank 1: no answer in time" in str(caught.value)
    assert "in hang_on_last" in str(caught.value)
    check_case(CASE, run_ranks(2, play, CASE, mode=mode))


def test_a_dead_rank_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankError, match=r"rank 1: the process ended .exit code 3"):
        run_ranks(2, die_on_last)
    check_case(CASE, run_ranks(2, play, CASE))


@pytest.mark.parametrize("field", ["topk_ids", "topk_weights", "payloads", "num_tokens", "target_slots", "combined"])
def test_the_comparison_sees_one_wrong_bit(field: str) -> None:
    outcomes = run_ranks(2, play, CASE, mode="thread")
    check_case(CASE, outcomes)
    right = outcomes[1][0]
    value = right.payloads[0] if field == "payloads" else getattr(right, field)
    wrong = value.clone(memory_format=torch.contiguous_format)
    wrong.view(-1).view(torch.uint8)[0] ^= 1
    outcomes[1][0] = replace(right, **{field: (wrong,) if field == "payloads" else wrong})
    with pytest.raises(AssertionError, match=r"round 0 rank 1: .*got .* want"):
        check_case(CASE, outcomes)
    outcomes[1][0] = replace(right, invalid=1)
    with pytest.raises(AssertionError, match="counted 1 ids, not 0"):
        check_case(CASE, outcomes)


def test_workers_begin_with_the_longest_files() -> None:
    assert [name for name in LONGEST if not Path(__file__).parent.joinpath(name).exists()] == []
    names = ["tests/test_ops.py::a", f"tests/{LONGEST[1]}::b", "tests/test_ops.py::four", f"tests/{LONGEST[0]}::c"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    items[0].callspec = SimpleNamespace(params={"ranks": 8})
    found = [item.nodeid.partition("::")[2] for item in in_order(items)]  # type: ignore[arg-type]
    assert found == ["c", "b", "four", "a"]
