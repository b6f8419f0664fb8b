"""Rows without gaps and counts by rank and expert: each kernel against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from putget.moe.compact import Choices, compact, count_routes, take_rows

MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
IDS = st.sampled_from([torch.int32, torch.int64])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return f"{request.param}:0" if request.param == "cuda" else "cpu"


@MANY
@given(data=st.data(), dtype=IDS)
def test_tokens_are_counted_by_rank_and_expert(device: str, data: st.DataObject, dtype: torch.dtype) -> None:
    ranks, num_local, top_k = data.draw(st.integers(1, 32)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    experts = ranks * num_local
    row = st.lists(st.integers(-3, experts + 2), min_size=top_k, max_size=top_k)
    ids = data.draw(st.lists(row, max_size=30))
    tensor = torch.tensor(ids, dtype=dtype, device=device).view(len(ids), top_k)
    found = count_routes(tensor, ranks, num_local)
    known = [[id for id in row if 0 <= id < experts] for row in ids]
    goes = [{id // num_local for id in row} for row in known]
    assert found.in_rank.tolist() == [[rank in own for rank in range(ranks)] for own in goes]
    assert found.per_rank.tolist() == [sum(rank in own for own in goes) for rank in range(ranks)]
    assert found.per_expert.tolist() == [sum(row.count(expert) for row in known) for expert in range(experts)]


@MANY
@given(data=st.data(), dtype=IDS)
def test_received_rows_lie_by_source_without_gaps(device: str, data: st.DataObject, dtype: torch.dtype) -> None:
    ep_size, max_rows, top_k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    counts = data.draw(st.lists(st.integers(0, max_rows), min_size=ep_size, max_size=ep_size))
    first, num_experts = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    here = [slot * ep_size + source for source, count in enumerate(counts) for slot in range(count)]
    room = data.draw(st.integers(0, len(here) + 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = [torch.rand(max_rows * ep_size, length, generator=generator) for length in (3, 64, 1100)]
    ids = torch.randint(-1, 7, (max_rows * ep_size, top_k), generator=generator).to(dtype)
    weights = torch.rand(ids.shape, generator=generator)
    per_expert = torch.zeros(num_experts, dtype=torch.int32, device=device)
    lost = torch.full((1,), 5, dtype=torch.int64, device=device)
    choices = Choices(ids.to(device), weights.to(device), first, num_experts, per_expert)
    num_tokens = torch.tensor(counts, dtype=torch.int32, device=device)
    places, taken, local = compact(num_tokens, max_rows, room, [one.to(device) for one in rows], lost, choices)
    fitting = here[:room]
    assert places.rows.tolist() == fitting + [-1] * (room - len(fitting))
    assert places.position.tolist() == [
        fitting.index(row) if row in fitting else -1 for row in range(max_rows * ep_size)
    ]
    assert places.ends.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert lost.item() == 5 + max(len(here) - room, 0)
    for one, found in zip(rows, taken, strict=True):
        assert torch.equal(found[: len(fitting)].cpu(), one[fitting])
    wanted = ids[fitting].long() - first
    wanted = torch.where((wanted >= 0) & (wanted < num_experts), wanted, -1)
    assert local is not None
    assert local.ids.dtype == dtype
    assert local.ids.tolist() == wanted.tolist() + [[-1] * top_k] * (room - len(fitting))
    assert local.weights is not None
    assert torch.equal(local.weights[: len(fitting)].cpu(), torch.where(wanted >= 0, weights[fitting], 0.0))
    assert not local.weights[len(fitting) :].any()
    assert per_expert.tolist() == [int((wanted == expert).sum()) for expert in range(num_experts)]


def test_rows_of_no_place_are_left_alone(device: str) -> None:
    rows = torch.arange(12.0, device=device).view(3, 4)
    into = torch.full((4, 4), -1.0, device=device)
    take_rows(rows, torch.tensor([2, -1, 0, 3], dtype=torch.int32, device=device), into)
    assert into[:, 0].tolist() == [8.0, -1.0, 0.0, -1.0]
    take_rows(rows[:0], torch.tensor([0], dtype=torch.int32, device=device), into[:1])
    assert into[0, 0].item() == 8.0
