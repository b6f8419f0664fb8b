"""Byte counts, against numbers counted by hand."""

from __future__ import annotations

import pytest
import torch

from putget_bench import traffic

SHAPE = traffic.Shape(
    ep_size=2, num_experts=4, top_k=3, max_tokens_per_rank=10, dispatch_row_bytes=100, combine_row_bytes=1000
)


def test_counts_of_a_small_round() -> None:
    # Experts 0 and 1 live on rank 0, 2 and 3 on rank 1.
    ids = [
        torch.tensor([[0, 2, 3], [0, 1, -1]]),  # rank 0: token 0 crosses once for two pairs, token 1 stays
        torch.tensor([[3, 2, -1], [1, 0, 3], [-1, -1, -1]]),  # rank 1: token 1 crosses once for two pairs
    ]
    counted = traffic.count(SHAPE, ids)
    # Means over two ranks: 2 rows and 4 pairs leave in all; 5 tokens go to the one other rank.
    assert counted.dispatch == 2 * 100 / 2
    assert counted.combine == 2 * 1000 / 2
    assert counted.dispatch_per_pair == 4 * 100 / 2
    assert counted.combine_per_pair == 4 * 1000 / 2
    assert counted.all_gather == 5 * 100 / 2
    assert counted.reduce_scatter == 5 * 1000 / 2
    # tokens x min(ep_size, top_k): both ranks counted
    assert counted.dispatch_algorithm == 5 * 2 * 100 / 2
    assert counted.combine_algorithm == 5 * 2 * 1000 / 2
    # 2 sources x 10 tokens; expert-major has a slot for each of 2 local experts
    assert counted.token_major_memory == 20 * 1100
    assert counted.expert_major_memory == 2 * 20 * 1100


def test_a_row_for_each_other_domain() -> None:
    """Four ranks of an expert each, domains (0, 1) and (2, 3): rank 0 has all tokens."""
    shape = traffic.Shape(4, 4, 3, 8, 100, 1000)
    none = torch.full((0, 3), -1)
    ids = [torch.tensor([[1, 2, 3], [0, 3, -1], [1, -1, -1]]), none, none, none]
    assert traffic.count(shape, ids).dispatch == 5 * 100 / 4  # three rows to ranks 1 to 3, one, one
    counted = traffic.count(shape, ids, (0, 0, 1, 1))
    assert (counted.dispatch, counted.combine) == (4 * 100 / 4, 4 * 1000 / 4)  # ranks 2 and 3 share a row
    assert counted.combine_between_domains == 2 * 1000 / 4
    assert traffic.count(shape, ids).combine_between_domains == 0


def test_nothing_leaves_a_single_rank() -> None:
    shape = traffic.Shape(1, 4, 2, 8, 100, 1000)
    counted = traffic.count(shape, [torch.tensor([[0, 1], [2, 3]])])
    assert counted.dispatch == counted.combine == counted.dispatch_per_pair == counted.all_gather == 0
    assert counted.dispatch_algorithm == 2 * 1 * 100


def test_gigabytes_per_second() -> None:
    assert traffic.gigabytes_per_second(350_000, 1.0) == pytest.approx(350)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (5 * 2**20, "5 MiB"), (3 * 2**40, "3072 GiB")]
)
def test_readable(num_bytes: float, text: str) -> None:
    assert traffic.readable(num_bytes) == text
