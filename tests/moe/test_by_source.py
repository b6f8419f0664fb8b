"""Rows by source: the kernel against plain indexing, also in slots without a token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from putget import _abi
from putget.moe.by_source import BySource, fill_empty

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape).to(device)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


def expected_by_source(rows: torch.Tensor, counts: list[int], max_rows: int, word: int | None) -> torch.Tensor:
    """[ep_size, max_rows, *], by plain indexing."""
    ep_size = len(counts)
    by_source = (
        rows.view(max_rows, ep_size, *rows.shape[1:]).transpose(0, 1).clone(memory_format=torch.contiguous_format)
    )
    for source, count in enumerate(counts):
        empty = by_source[source, count:].view(torch.uint8)
        empty.zero_()
        if word is not None:
            empty.view(torch.int32).fill_(word)
    return by_source


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return str(request.param)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_and_fillings(device: str, data: st.DataObject) -> None:
    ep_size, max_rows = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 40))
    counts = data.draw(st.lists(st.integers(0, max_rows), min_size=ep_size, max_size=ep_size))
    kinds = data.draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 700)), min_size=1, max_size=8))
    rows = [
        random_rows((max_rows * ep_size, length), dtype, device, seed) for seed, (dtype, length) in enumerate(kinds)
    ]
    words = [index for index, one in enumerate(rows) if one[0].nbytes % 4 == 0]
    filled = data.draw(st.sampled_from([None, *words]))
    word = data.draw(st.integers(-(2**31), 2**31 - 1))
    in_order_of_arrival = data.draw(st.booleans())
    into = [random_rows((ep_size, max_rows, *one.shape[1:]), one.dtype, device, 99) for one in rows]
    num_tokens = torch.tensor(counts, dtype=torch.int32, device=device)
    sent = [one.clone() for one in rows]
    copy = BySource(num_tokens, rows, into, max_rows, filled=filled, word=word, in_order_of_arrival=in_order_of_arrival)
    for _ in range(2):
        copy.run()
        for index, (one, found) in enumerate(zip(sent, into, strict=True)):
            wanted = expected_by_source(one.cpu(), counts, max_rows, word if index == filled else None)
            if in_order_of_arrival:
                wanted = wanted.transpose(0, 1).contiguous()
            assert torch.equal(bits(found).flatten(), bits(wanted).flatten())
        num_tokens.copy_(num_tokens.flip(0))  # counts are read on the device
        counts = counts[::-1]
    assert all(torch.equal(bits(one), bits(before)) for one, before in zip(rows, sent, strict=True))


def test_ids_are_filled_in_place(device: str) -> None:
    num_tokens = torch.tensor([2, 0, 5], dtype=torch.int32, device=device)
    ids = torch.arange(3 * 5 * 8, dtype=torch.int32, device=device).view(3, 5, 8)
    wanted = ids.cpu().clone()
    wanted[0, 2:], wanted[1] = 256, 256
    fill_empty(num_tokens, ids, 5, 256)
    assert torch.equal(ids.cpu(), wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep_size": 0}, "ep_size is 0"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"num_payloads": 9}, "num_payloads is 9"),
        ({"filled": 2}, "filled is 2"),
        ({"to_order": 2}, "to_order is 2"),
        ({"num_tokens": None}, "num_tokens is null"),
        ({"filled": 0}, "no whole words"),
    ],
)
def test_what_the_library_refuses(changes: dict[str, int | None], message: str) -> None:
    counts = torch.zeros(2, dtype=torch.int32)
    rows = torch.zeros(4, 3, dtype=torch.uint8)
    copy = BySource(counts, [rows], [rows.clone()], 2)
    for name, value in changes.items():
        setattr(copy._args, name, value)
    with pytest.raises(ValueError, match=message):
        copy.run()
    assert _abi.last_error()
