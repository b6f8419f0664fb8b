"""Routers and the routing file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from putget import reference
from putget_bench import routing


def test_random_router_draws_distinct_experts_the_same_every_time() -> None:
    router = routing.random_router(num_experts=20, top_k=6, seed=3)
    ids = router(2, 50)
    assert ids.dtype == torch.int32
    assert ids.shape == (50, 6)
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert set(ids.flatten().tolist()) <= set(range(20))
    assert torch.equal(ids, router(2, 50))
    assert not torch.equal(ids, router(1, 50))
    assert not torch.equal(ids, routing.random_router(20, 6, seed=4)(2, 50))


def test_smaller_random_batches_are_prefixes() -> None:
    # The demo compares every size with the dense result of the largest.
    router = routing.random_router(num_experts=256, top_k=8, seed=0)
    assert all(torch.equal(router(0, 64)[:size], router(0, size)) for size in (1, 4, 16))


def test_perfect_router_reaches_all_eight_ranks_with_every_token() -> None:
    ids = routing.perfect_router(num_experts=256, top_k=8, ep_size=8)(3, 100)
    assert all(sorted(row) == list(range(8)) for row in (ids // 32).tolist())


@pytest.mark.parametrize(
    ("num_experts", "top_k", "ep_size"), [(256, 8, 4), (128, 4, 8), (384, 8, 8), (64, 6, 8), (512, 22, 4)]
)
def test_perfect_router_spreads_pairs_evenly(num_experts: int, top_k: int, ep_size: int) -> None:
    router = routing.perfect_router(num_experts, top_k, ep_size)
    table = reference.default_expert_to_rank(num_experts, ep_size)
    ids = torch.cat([router(rank, 16) for rank in range(ep_size)])
    assert all(len(set(row)) == top_k for row in ids.tolist())
    pairs = table[ids.long()].flatten().bincount(minlength=ep_size)
    assert pairs.max() - pairs.min() == 0


def test_perfect_router_leaves_out_ranks_without_experts() -> None:
    # 9 experts on 8 ranks: ceil gives 2 a rank, so ranks 5 to 7 have none.
    ids = routing.perfect_router(num_experts=9, top_k=4, ep_size=8)(0, 9)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert ids.max() == 8


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "routing.npz"
    first = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    np.savez_compressed(path, law=first + 24, intent=first)
    return path


def test_routing_file_holds_tasks_by_name_then_layers_then_tokens(recorded: Path) -> None:
    rows = routing.read_routing_file(recorded)
    assert rows.dtype == torch.int32
    assert torch.equal(rows, torch.arange(48, dtype=torch.int32).view(12, 4))


def test_recorded_router_gives_each_rank_its_own_place_and_starts_over(recorded: Path) -> None:
    router = routing.recorded_router(routing.read_routing_file(recorded), ep_size=3)
    assert router(0, 2)[:, 0].tolist() == [0, 4]
    assert router(2, 6)[:, 0].tolist() == [32, 36, 40, 44, 0, 4]


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        (
            {"a": np.zeros((2, 3), dtype=np.uint8)},
            r"array 'a' must be integers \[layers, tokens, top_k\], got uint8 \[2, 3\]",
        ),
        ({"a": np.zeros((2, 3, 4))}, r"array 'a' must be integers .* got float64 \[2, 3, 4\]"),
        ({"a": np.full((2, 3, 4), -2)}, "array 'a' holds the expert id -2"),
        ({"a": np.zeros((1, 1, 2), dtype=int), "b": np.zeros((1, 1, 3), dtype=int)}, "differ in top_k"),
        ({}, "holds no array"),
        ({"a": np.array([None, {}])}, "not an .npz archive of integer arrays"),
    ],
)
def test_other_archives_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], complaint: str) -> None:
    path = tmp_path / "routing.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=complaint) as raised:
        routing.read_routing_file(path)
    assert f"--routing_file {path}" in str(raised.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--routing_file .*none.npz: No such file"):
        routing.read_routing_file(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("not an archive")
    with pytest.raises(ValueError, match=r"not an .npz archive of integer arrays"):
        routing.read_routing_file(tmp_path / "text.npz")
