"""Shapes, routings, token counts and rank counts that nobody thought of, against the oracle."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.harness import run_ranks
from tests.harness.cases import COMBINE, DISPATCH, ENDINGS, Case, Round, Row
from tests.harness.compare import check_case, play

PAYLOAD_DTYPES = (
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int64,
)
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 40)),
    st.tuples(st.sampled_from([56, 64, 128, 257, 1024])),
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
)
quantised_shapes = st.one_of(
    st.tuples(st.integers(1, 20).map(lambda packs: 16 * packs)),
    st.tuples(st.sampled_from([128, 288, 1024])),
    st.tuples(st.integers(1, 5), st.sampled_from([16, 48])),
)


@st.composite
def rounds(draw: st.DrawFn, ep_size: int, num_experts: int, max_tokens: int) -> Round:
    """One round that every rank can play: max_rows, where drawn, holds whatever the routing sends."""
    num_tokens = tuple(draw(st.lists(st.integers(0, max_tokens), min_size=ep_size, max_size=ep_size)))
    largest = max(1, *num_tokens)
    smaller = st.one_of(st.none(), st.integers(largest, max(largest, max_tokens)))
    per_rank: dict[str, Any] = {"min_size": ep_size, "max_size": ep_size}
    table = st.lists(st.integers(0, ep_size - 1), min_size=num_experts, max_size=num_experts)
    return Round(
        seed=draw(st.integers(0, 2**20)),
        num_tokens=num_tokens,
        ending=draw(st.sampled_from(ENDINGS)),
        ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        table=draw(st.none() | table.map(tuple)),
        max_rows=draw(st.none() | st.lists(smaller, **per_rank).map(tuple)),
        num_valid=draw(st.none() | st.lists(st.none() | st.integers(0, max_tokens), **per_rank).map(tuple)),
        out=draw(st.booleans()),
        addend=draw(st.booleans()),
        no_expert=draw(st.sampled_from([0.0, 0.2, 1.1])),
        invalid=draw(st.sampled_from([0.0, 0.0, 0.2])),
        halves=draw(st.just(()) | st.lists(st.integers(0, DISPATCH + COMBINE), **per_rank).map(tuple)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An AllToAll and one to four rounds on it."""
    ep_size = draw(st.integers(1, 8))
    num_experts = draw(st.integers(1, 24))
    max_tokens = draw(st.sampled_from([1, 2, 5, 16, 70]))
    rows: st.SearchStrategy[Row] = st.tuples(shapes, st.sampled_from(PAYLOAD_DTYPES))
    wire = draw(st.sampled_from([None, None, torch.float8_e4m3fn]))
    return Case(
        ep_size=ep_size,
        num_experts=num_experts,
        top_k=draw(st.integers(1, 32)),
        max_tokens_per_rank=max_tokens,
        payloads=tuple(draw(st.lists(rows, min_size=1, max_size=8))),
        output=(draw(shapes if wire is None else quantised_shapes), draw(st.sampled_from(OUTPUT_DTYPES))),
        sentinel_rows=draw(st.sampled_from([None, True, False] if wire is None else [None, True])),
        blocks=draw(st.sampled_from([None, None, 2, 5])),
        wire=wire,
        table=draw(
            st.none() | st.lists(st.integers(0, ep_size - 1), min_size=num_experts, max_size=num_experts).map(tuple)
        ),
        rounds=tuple(draw(st.lists(rounds(ep_size, num_experts, max_tokens), min_size=1, max_size=4))),
    )


def check_examples(count: int, drawn: st.SearchStrategy[Case], mode: str, device: str) -> None:
    """Plays so many cases. A failing one takes seconds when it hangs, so the harness bounds it, not a deadline."""

    @settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])
    @given(case=drawn)
    def check(case: Case) -> None:
        note(repr(case))
        check_case(case, run_ranks(case.ep_size, play, case, mode=mode, device=device, timeout=30))

    check()


# The same text decides on both backends. On GPUs, where an example takes longer, the first ones are drawn again, and
# tests/gpu/test_equality.py has cases of real size.
def test_any_case_equals_the_oracle_in_threads(device: str) -> None:
    check_examples({"cpu": 150, "cuda": 50}[device], cases(), "thread", device)


def test_any_case_equals_the_oracle_in_processes(device: str) -> None:
    drawn = cases().filter(lambda case: case.ep_size in (2, 3, 4, 8))
    check_examples({"cpu": 30, "cuda": 12}[device], drawn, "process", device)
