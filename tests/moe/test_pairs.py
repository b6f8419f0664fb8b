"""(token, expert) pairs: each kernel against plain Python, also with repeated ids, empty slots and too little room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from putget.moe.pairs import Pairs
from tests.adapters.deep_ep.fp8 import to_fp8

MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return f"{request.param}:0" if request.param == "cuda" else "cpu"


def kernels(
    device: str, top_k: int, *, ep_size: int = 1, experts: int = 4, max_rows: int = 8, capacity: int = 8
) -> Pairs:
    return Pairs(
        torch.device(device),
        ep_size=ep_size,
        ep_rank=ep_size - 1,
        top_k=top_k,
        num_experts=experts,
        max_rows=max_rows,
        capacity=capacity,
    )


def once_each(ids: list[int]) -> list[int]:
    """A token's ids, with -1 for those that stand before."""
    return [-1 if id in ids[:k] else id for k, id in enumerate(ids)]


@st.composite
def tokens(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """ids [num_tokens, top_k], among them some of no expert and some twice, and a seed."""
    num_tokens, top_k = draw(st.integers(0, 9)), draw(st.integers(1, 12))
    row = st.lists(st.integers(-1, 6), min_size=top_k, max_size=top_k)
    ids = draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(ids, dtype=dtype).view(num_tokens, top_k), draw(st.integers(0, 999))


@MANY
@given(made=tokens(), length=st.sampled_from([8, 128, 520]), dtype=st.sampled_from([torch.bfloat16, torch.uint8]))
def test_each_pair_is_sent_with_its_row(
    device: str, made: tuple[torch.Tensor, int], length: int, dtype: torch.dtype
) -> None:
    ids, seed = made
    top_k = ids.shape[1]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 99, (len(ids), length), generator=generator).to(dtype)
    sent = kernels(device, top_k).send(ids.to(device), x.to(device))
    assert sent.pairs.view(ids.shape).tolist() == [once_each(row) for row in ids.tolist()]
    rows, numbers = sent.rows
    assert torch.equal(rows.cpu(), x.repeat_interleave(top_k, 0))
    assert numbers.flatten().tolist() == [token for token in range(len(ids)) for _ in range(top_k)]


def test_ids_that_no_int32_holds_stay_out_of_range(device: str) -> None:
    ids = torch.tensor([[1, 2**32 + 1, -(2**40)]], device=device)
    x = torch.zeros(1, 8, dtype=torch.uint8, device=device)
    first, *others = kernels(device, 3).send(ids, x).pairs.flatten().tolist()
    assert first == 1
    assert all(id > 2**30 for id in others)


@MANY
@given(
    made=tokens(),
    blocks=st.integers(1, 3),
    scales=st.sampled_from(["exact", "rounded", "exponents"]),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_rows_are_quantised_as_deep_ep_does(
    device: str, made: tuple[torch.Tensor, int], blocks: int, scales: str, size: float
) -> None:
    ids, seed = made
    top_k = ids.shape[1]
    hidden = blocks * (512 if scales == "exponents" else 128)
    x = torch.randn(len(ids), hidden, generator=torch.Generator().manual_seed(seed)).mul(size).bfloat16()
    if len(x):
        x[0, :128] = 0
    codes, found, _ = kernels(device, top_k).send(ids.to(device), x.to(device), scales).rows
    wanted = to_fp8(x, round_scale=scales != "exact", use_ue8m0=scales == "exponents")
    for one, expected in zip((codes, found), wanted, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), expected.repeat_interleave(top_k, 0).view(torch.uint8))


@MANY
@given(data=st.data())
def test_received_pairs_lie_by_expert_source_and_token(device: str, data: st.DataObject) -> None:
    ep_size, experts, max_rows = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 30)),
    )
    capacity = data.draw(st.integers(1, 12))
    first = (ep_size - 1) * experts
    counts = data.draw(st.lists(st.integers(0, max_rows), min_size=ep_size, max_size=ep_size))
    ids = torch.full((max_rows, ep_size), first, dtype=torch.int32)  # an id of slots that hold nothing, too
    for source, count in enumerate(counts):
        drawn = data.draw(st.lists(st.integers(0, experts - 1), min_size=count, max_size=count))
        ids[:count, source] = torch.tensor(drawn, dtype=torch.int32) + first
    rows = torch.arange(max_rows * ep_size * 16, dtype=torch.int64).view(-1, 16)
    numbers = torch.arange(max_rows * ep_size, dtype=torch.int32)[:, None]
    pairs = kernels(device, 1, ep_size=ep_size, experts=experts, max_rows=max_rows, capacity=capacity)
    sent = [rows.to(device), numbers.to(device)]
    room = pairs.room(sent)
    added = torch.ones(experts, dtype=torch.int32, device=device)
    num_tokens = torch.tensor(counts, dtype=torch.int32, device=device)
    pairs.place(room, ids.view(-1, 1).to(device), num_tokens, sent, added)
    wanted: list[list[int]] = [[] for _ in range(experts)]
    for source, count in enumerate(counts):
        for slot in range(count):
            wanted[int(ids[slot, source]) - first].append(slot * ep_size + source)
    place = [-1] * (max_rows * ep_size)
    for expert, here in enumerate(wanted):
        for index, row in enumerate(here[:capacity]):
            place[row] = expert * capacity + index
        fits = min(len(here), capacity)
        assert room.rows[1][expert, :fits, 0].tolist() == here[:capacity]
        assert torch.equal(room.rows[0][expert, :fits].cpu(), rows[here[:capacity]])
    fitting = [min(len(here), capacity) for here in wanted]
    assert room.counts.tolist() == fitting
    assert added.tolist() == [1 + count for count in fitting]
    assert room.place.tolist() == place
    # And back: each row where it came from; others are left alone.
    made = torch.arange(experts * capacity, device=device).float()[:, None].expand(-1, 8).bfloat16().contiguous()
    back = torch.full((max_rows * ep_size, 8), -1.0, device=device, dtype=torch.bfloat16)
    pairs.take(made.view(experts, capacity, 8), room.place, back)
    assert back[:, 0].tolist() == [made[at, 0].item() if at >= 0 else -1.0 for at in place]


@MANY
@given(made=tokens(), hidden=st.sampled_from([1, 8, 264]))
def test_a_repeated_expert_counts_with_all_its_weights(
    device: str, made: tuple[torch.Tensor, int], hidden: int
) -> None:
    ids, seed = made
    top_k = ids.shape[1]
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(ids.shape, generator=generator)
    rows = torch.randn(len(ids) * top_k, hidden, generator=generator).bfloat16()
    pairs = torch.tensor([once_each(row) for row in ids.tolist()], dtype=torch.int32).view(ids.shape)
    rows[pairs.flatten() < 0] = float("nan")  # rows of no pair are not looked at
    out = torch.empty(len(ids), hidden, dtype=torch.bfloat16, device=device)
    kernels(device, top_k).sum(pairs.to(device), ids.to(device), weights.to(device), rows.to(device), out)
    for token, (own, sent) in enumerate(zip(ids.tolist(), pairs.tolist(), strict=True)):
        total = torch.zeros(hidden)
        for k, expert in enumerate(sent):
            if expert >= 0:
                weight = sum((weights[token, j] for j, id in enumerate(own) if id == expert), torch.zeros(()))
                total += weight * rows[token * top_k + k].float()
        torch.testing.assert_close(out[token].float().cpu(), total.bfloat16().float(), rtol=8e-3, atol=1e-5)
