"""Expert-major rows and the way back: every bit against the oracle, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import putget
import putget.moe
from putget import reference_moe
from tests.harness import Rank, run_ranks
from tests.harness.cases import APART, COMBINE, SENTINEL, Case, Round, Row
from tests.harness.grouped import GroupedOutcome, check_grouped, play_grouped, play_round

BF16 = torch.bfloat16


def play_and_check(case: Case, alignments: tuple[int, ...], device: str = "cpu") -> None:
    outcomes = run_ranks(case.ep_size, play_grouped, case, alignments, mode="thread", device=device, timeout=60)
    check_grouped(case, alignments, outcomes)


# --- against the oracle -----------------------------------------------------------------------------------------------

PAYLOADS: tuple[Row, ...] = (
    ((64,), torch.float8_e4m3fn),
    ((3,), torch.float32),
    ((5,), torch.uint8),
    ((), torch.int64),
    ((2, 72), BF16),
)


@pytest.mark.parametrize("alignment", [1, 3, 16, 128])
def test_rounds_of_changing_sizes(device: str, alignment: int) -> None:
    """A small round clears the rows that a large one has left, and rows of padding are left alone."""
    sizes = ((7, 9, 0, 12), (1, 0, 0, 2), (0, 0, 0, 0), (12, 12, 12, 12), (3, 1, 4, 1))
    case = Case(
        4,
        tuple(Round(20 + index, counts, addend=index % 2 == 1) for index, counts in enumerate(sizes)),
        num_experts=10,
        top_k=3,
        max_tokens_per_rank=12,
        payloads=PAYLOADS,
        output=((72,), BF16),
    )
    play_and_check(case, (alignment,) * len(sizes), device)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("elements", [1, 7, 256, 1048])
def test_sums_of_every_type_and_width(device: str, dtype: torch.dtype, elements: int) -> None:
    case = Case(
        2,
        (Round(3, (5, 8)), Round(4, (8, 0), halves=(COMBINE, 0))),
        top_k=7,
        output=((elements,), dtype),
        num_experts=9,
    )
    play_and_check(case, (1, 8), device)


@pytest.mark.parametrize("top_k", [1, 2, 31, 32])
def test_an_expert_named_twice_has_two_rows(device: str, top_k: int) -> None:
    case = Case(3, (Round(1, (4, 8, 1)),), top_k=top_k, num_experts=2, output=((16,), torch.float32))
    play_and_check(case, (4,), device)


def test_experts_of_a_rank_need_not_be_neighbours(device: str) -> None:
    """The table is read at every round; a rank may have no expert at all."""
    table = (0, 2, 0, 2, 2, 0, 0)
    moved = (2, 0, 0, 2, 0, 0, 2)
    rounds = (Round(1, (6, 6, 6)), Round(2, (6, 0, 6), table=moved), Round(3, (2, 6, 6)))
    play_and_check(Case(3, rounds, num_experts=7, top_k=4, table=table), (1, 1, 16), device)


def test_more_experts_than_shared_memory_has_room_for(device: str) -> None:
    table = tuple(expert % 3 % 2 for expert in range(5000))
    rounds = (Round(1, (30, 8)), Round(2, (3, 30)))
    case = Case(2, rounds, num_experts=5000, top_k=8, max_tokens_per_rank=30, table=table)
    play_and_check(case, (2, 2), device)


def test_quantised_and_got_sums(device: str) -> None:
    case = Case(2, (Round(1, (7, 3)), Round(2, (8, 8))), top_k=3, output=((128,), BF16))
    for changes in ({"wire": torch.float8_e4m3fn}, {"sentinel_rows": False}):
        play_and_check(dataclasses.replace(case, **changes), (1, 16), device)


def play_asks(rank: Rank, case: Case, asks: tuple[bool, ...]) -> list[GroupedOutcome]:
    """A body: this rank with its own ask."""
    launch = putget.tuning.Launch(sentinel_rows=asks[rank.rank])
    with rank.all_to_all(**case.options(), tuning=putget.tuning.Tuning(combine=launch)) as a2a:
        memory = a2a.expert_major_memory(4)
        return [play_round(a2a, rank, case, index, memory) for index in range(len(case.rounds))]


@pytest.mark.parametrize("asks", list(itertools.product((APART, SENTINEL), repeat=3)), ids=str)
def test_every_rank_as_it_likes(device: str, asks: tuple[bool, ...]) -> None:
    """A rank whose combine sums the experts also sums for ranks that get their rows."""
    rounds = (
        Round(1, (8, 8, 8), addend=True),
        Round(2, (0, 8, 3), halves=(0, COMBINE, 0)),
        Round(3, (0, 0, 0)),
        Round(4, (1, 0, 7), no_expert=0.3),
    )
    for top_k, elements in ((8, 264), (3, 8), (1, 1048)):
        case = Case(3, rounds, num_experts=9, top_k=top_k, output=((elements,), BF16))
        outcomes = run_ranks(3, play_asks, case, asks, mode="thread", device=device, timeout=60)
        check_grouped(case, (4,) * len(rounds), outcomes)


def sums_beside(rank: Rank) -> None:
    """A body: rows that combine must not read late give the same sums: where it writes, and at odd addresses."""
    a2a = rank.all_to_all(num_experts=4, top_k=3, output=putget.Payload((64,), BF16))
    generator = torch.Generator().manual_seed(rank.rank)
    ids = torch.randint(0, 4, (5, 3), generator=generator).int().to(rank.device)
    sent = (ids, torch.rand(5, 3, generator=generator).to(rank.device), torch.zeros(5, 4, device=rank.device))
    results = []
    for case in ("apart", "out is x's beginning", "out is x's end", "odd"):
        grouped = a2a.dispatch(*sent).expert_major(memory=None)
        values = torch.randn(grouped.capacity, 64, generator=torch.Generator().manual_seed(7)).to(BF16)
        room = torch.zeros(values.numel() + 1, dtype=BF16, device=rank.device)
        x = room[1:] if case == "odd" else room[:-1]
        x = x.view_as(values).copy_(values)
        out = {"out is x's beginning": x[:5], "out is x's end": x[-5:]}.get(case)
        rank.meet()
        results.append(a2a.combine(x, layout=grouped, out=out).clone())
        rank.meet()
    for result in results[1:]:
        assert torch.equal(result, results[0])
    a2a.close()


def test_rows_that_combine_must_not_read_late(device: str) -> None:
    run_ranks(2, sums_beside, mode="thread", device=device)


@st.composite
def grouped_cases(draw: st.DrawFn) -> tuple[Case, tuple[int, ...]]:
    """An AllToAll, one to three rounds on it, and their alignments."""
    ep_size = draw(st.integers(1, 8))
    num_experts = draw(st.integers(1, 24))
    max_tokens = draw(st.sampled_from([1, 2, 5, 16, 40]))
    table = draw(st.lists(st.integers(0, ep_size - 1), min_size=num_experts, max_size=num_experts))
    rounds = []
    for _ in range(draw(st.integers(1, 3))):
        counts = tuple(draw(st.lists(st.integers(0, max_tokens), min_size=ep_size, max_size=ep_size)))
        smaller = st.one_of(st.none(), st.integers(max(1, *counts), max(max_tokens, *counts)))
        rounds.append(
            Round(
                seed=draw(st.integers(0, 2**20)),
                num_tokens=counts,
                ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
                table=draw(st.none() | st.permutations(table).map(tuple)),
                max_rows=draw(st.none() | st.lists(smaller, min_size=ep_size, max_size=ep_size).map(tuple)),
                num_valid=draw(
                    st.none()
                    | st.lists(st.none() | st.integers(0, max_tokens), min_size=ep_size, max_size=ep_size).map(tuple)
                ),
                addend=draw(st.booleans()),
                no_expert=draw(st.sampled_from([0.0, 0.3, 1.1])),
                invalid=draw(st.sampled_from([0.0, 0.0, 0.2])),
                halves=draw(
                    st.just(()) | st.lists(st.sampled_from([0, COMBINE]), min_size=ep_size, max_size=ep_size).map(tuple)
                ),
            )
        )
    row = st.tuples(st.tuples(st.integers(1, 40)), st.sampled_from([torch.uint8, BF16, torch.float32]))
    case = Case(
        ep_size=ep_size,
        rounds=tuple(rounds),
        num_experts=num_experts,
        top_k=draw(st.integers(1, 32)),
        max_tokens_per_rank=max_tokens,
        payloads=tuple(draw(st.lists(row, min_size=1, max_size=3))),
        output=(
            (draw(st.sampled_from([1, 5, 8, 40, 264])),),
            draw(st.sampled_from([BF16, torch.float16, torch.float32])),
        ),
        table=tuple(table),
    )
    return case, tuple(draw(st.sampled_from([1, 1, 4, 7, 64])) for _ in rounds)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(drawn=grouped_cases())
def test_any_case_equals_the_oracle(drawn: tuple[Case, tuple[int, ...]], device: str) -> None:
    note(repr(drawn))
    play_and_check(*drawn, device)


def test_the_oracle_on_an_example_by_hand() -> None:
    """Two sources, three experts here (2, 3 and 5), top_k 2; token (1, 0) names expert 3 twice."""
    ids = torch.tensor([[[3, 0], [5, 2], [-1, -1]], [[3, 3], [-1, -1], [-1, -1]]], dtype=torch.int32)
    weights = torch.arange(12.0).view(2, 3, 2)
    table = torch.tensor([0, 0, 1, 1, 0, 1])
    got = reference_moe.expert_major(ids, weights, torch.tensor([2, 1]), table, 1, alignment=2)
    assert got.offsets.tolist() == [0, 2, 6, 8]
    assert got.num_rows.tolist() == [1, 3, 1]
    # row = slot * 2 + source
    assert got.source_rows[:8].tolist() == [2, -1, 0, 1, 1, -1, 2, -1]
    assert got.weights[:8].tolist() == [3.0, 0.0, 0.0, 6.0, 7.0, 0.0, 2.0, 0.0]
    assert got.positions[:3].tolist() == [[2, -1], [3, 4], [6, 0]]
    assert len(got.source_rows) == 16  # 3 * 2 * 2 choices, and padding of 3 groups, aligned


def without_copies(rank: Rank) -> None:
    """A body: the places alone are those of a grouping with rows; rows are where they say; combine takes either."""
    a2a = rank.all_to_all(num_experts=6, top_k=3, payloads=[putget.Payload((32,), BF16), putget.Payload((3,), BF16)])
    roomy = a2a.expert_major_memory(4)  # its room for rows is used in some rounds
    for seed, num_tokens in enumerate((7, 0, 8)):
        generator = torch.Generator().manual_seed(10 * seed + rank.rank)
        ids = torch.randint(-1, 6, (num_tokens, 3), generator=generator).int().to(rank.device)
        weights = torch.rand(num_tokens, 3, generator=generator).to(rank.device)
        rows = [torch.randn(num_tokens, n, generator=generator).to(BF16).to(rank.device) for n in (32, 3)]
        memory = a2a.expert_major_memory(4, copy_rows=False)
        results = []
        for into in (None, memory, roomy):
            own = into is None
            received = a2a.dispatch(ids, weights, *rows)
            copied = received.expert_major(4, memory=roomy if own else None)
            places = received.expert_major(4, copy_rows=False, memory=into)
            assert places.payloads == ()
            for name in ("offsets", "num_rows", "weights", "source_rows", "positions"):
                assert torch.equal(getattr(places, name), getattr(copied, name)), name
            valid = (places.source_rows >= 0).nonzero()[:, 0]
            for flat, payload in zip(received.flat.payloads, copied.payloads, strict=True):
                assert torch.equal(flat[places.source_rows[valid].long()], payload[valid])
            made = torch.randn(places.capacity, 4, generator=generator).to(rank.device)
            made[valid] = places.weights[valid, None] * 2 + torch.arange(4, device=rank.device)
            rank.meet()
            results.append(a2a.combine(made, layout=copied if into is memory else places))
        assert all(torch.equal(results[0], other) for other in results[1:])
    assert memory.num_bytes < a2a.expert_major_memory(4).num_bytes
    a2a.close()


def test_places_alone(device: str) -> None:
    run_ranks(2, without_copies, mode="thread", device=device)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def a2a() -> Any:
    comm = putget.Communicator.local(1)[0]
    with putget.AllToAll(
        comm,
        num_experts=4,
        top_k=2,
        max_tokens_per_rank=8,
        payloads=[putget.Payload((4,), torch.float32)],
        output=putget.Payload((6,), BF16),
        device="cpu",
    ) as made:
        yield made


IDS = torch.tensor([[0, 3], [1, 1], [2, -1]], dtype=torch.int32)
ARGUMENTS = (IDS, torch.rand(3, 2), torch.rand(3, 4))


def rows_for(grouped: putget.ExpertMajor) -> torch.Tensor:
    return torch.randn(grouped.capacity, 6).to(BF16)


@pytest.mark.parametrize("alignment", [0, -1, 4097, 2.0, True, None])
def test_alignment_is_an_int_in_range(a2a: putget.AllToAll, alignment: Any) -> None:
    received = a2a.dispatch(*ARGUMENTS)
    with pytest.raises(ValueError, match=r"alignment is .*, allowed are ints from 1 to 4096"):
        received.expert_major(alignment)
    with pytest.raises(ValueError, match="alignment is"):
        a2a.expert_major_memory(alignment)
    received.expert_major(4096)


@pytest.mark.parametrize("max_rows", [0, 9])
def test_memory_for_rows_in_range(a2a: putget.AllToAll, max_rows: int) -> None:
    with pytest.raises(ValueError, match="max_rows is"):
        a2a.expert_major_memory(1, max_rows)


def test_memory_of_other_sizes(a2a: putget.AllToAll) -> None:
    received = a2a.dispatch(*ARGUMENTS)
    with pytest.raises(ValueError, match="memory is made for alignment 4, expected 8"):
        received.expert_major(8, memory=a2a.expert_major_memory(4))
    with pytest.raises(ValueError, match="memory is made for max_rows 3, expected 8"):
        received.expert_major(4, memory=a2a.expert_major_memory(4, 3))
    with pytest.raises(ValueError, match=r"memory is made for payloads \(\), expected \(Payload"):
        received.expert_major(4, memory=a2a.expert_major_memory(4, copy_rows=False))
    with pytest.raises(ValueError, match="copy_rows is 0, expected a bool"):
        received.expert_major(4, copy_rows=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory is a Tensor"):
        received.expert_major(4, memory=torch.zeros(4))  # type: ignore[arg-type]


def test_rows_of_another_shape(a2a: putget.AllToAll) -> None:
    grouped = a2a.dispatch(*ARGUMENTS).expert_major(4)
    for rows, words in (
        (torch.zeros(16, 6, dtype=BF16), r"x has shape \[16, 6\], expected \[28, 6\]"),
        (torch.zeros(grouped.capacity, 6), "x has dtype float32, expected bfloat16"),
        (torch.zeros(6, grouped.capacity, dtype=BF16).t(), "x has strides"),
        (None, "x is a NoneType, expected a tensor"),
    ):
        for call in (a2a.combine, a2a.combine_start):
            with pytest.raises(ValueError, match=words):
                call(rows, layout=grouped)
    assert a2a.combine(rows_for(grouped), layout=grouped).shape == (3, 6)


def test_another_alignment_of_the_same_round(a2a: putget.AllToAll) -> None:
    received = a2a.dispatch(*ARGUMENTS)
    narrow, wide = received.expert_major(1), received.expert_major(16)
    with pytest.raises(ValueError, match="x has shape"):
        a2a.combine(rows_for(wide), layout=narrow)
    rows = rows_for(narrow)
    placed = torch.zeros(wide.capacity, 6, dtype=BF16)
    for k in range(2):
        here = wide.positions[:, k] >= 0
        placed[wide.positions[here, k].long()] = rows[narrow.positions[here, k].long()]
    first = a2a.combine(rows, layout=narrow)
    again = a2a.dispatch(*ARGUMENTS).expert_major(16)
    assert torch.equal(a2a.combine(placed, layout=again), first)


def test_layout_that_is_none(a2a: putget.AllToAll) -> None:
    a2a.dispatch(*ARGUMENTS)
    with pytest.raises(ValueError, match="layout is a str"):
        a2a.combine(torch.zeros(1), layout="expert_major")  # type: ignore[arg-type]


def test_layout_of_another_round(a2a: putget.AllToAll) -> None:
    received = a2a.dispatch(*ARGUMENTS)
    grouped = received.expert_major()
    rows = rows_for(grouped)
    a2a.combine(rows, layout=grouped)
    with pytest.raises(putget.ProtocolMisuse, match="dispatch 1 has ended"):
        putget.moe.finalize(rows, grouped)
    with pytest.raises(putget.ProtocolMisuse, match="no dispatch came before"):
        a2a.combine(rows, layout=grouped)
    with pytest.raises(putget.ProtocolMisuse, match="the round of these rows has ended"):
        received.expert_major()
    a2a.dispatch(*ARGUMENTS)
    for call in (a2a.combine, a2a.combine_start):
        with pytest.raises(putget.ProtocolMisuse, match="layout is of dispatch 1 of this object, open is dispatch 2"):
            call(rows, layout=grouped)
    a2a.release()
    with pytest.raises(putget.ProtocolMisuse, match="has ended"):
        received.expert_major()


def test_rows_that_are_being_combined(a2a: putget.AllToAll) -> None:
    received = a2a.dispatch(*ARGUMENTS)
    grouped = received.expert_major()
    a2a.combine_start(rows_for(grouped), layout=grouped)
    with pytest.raises(putget.ProtocolMisuse, match="has ended"):
        received.expert_major()
    with pytest.raises(putget.ProtocolMisuse, match="has ended"):
        putget.moe.finalize(rows_for(grouped), grouped)
    a2a.combine_finish()


def test_received_rows_of_another_size(a2a: putget.AllToAll) -> None:
    before = a2a.dispatch(*ARGUMENTS, max_rows=4)
    a2a.dispatch(*ARGUMENTS)
    with pytest.raises(putget.ProtocolMisuse, match="with max_rows 4, the open one has 8"):
        before.expert_major()


def test_objects_share_memory_but_not_layouts(a2a: putget.AllToAll) -> None:
    options = {
        "num_experts": 4,
        "top_k": 2,
        "max_tokens_per_rank": 8,
        "payloads": [putget.Payload((4,), torch.float32)],
        "output": putget.Payload((6,), BF16),
        "device": "cpu",
    }
    with putget.AllToAll(putget.Communicator.local(1)[0], **options) as other:
        memory = other.expert_major_memory(2)
        grouped = a2a.dispatch(*ARGUMENTS).expert_major(2, memory=memory)
        rows = rows_for(grouped)
        theirs = other.dispatch(*ARGUMENTS).expert_major(2, memory=memory)
        with pytest.raises(ValueError, match="layout comes from another AllToAll"):
            a2a.combine(rows, layout=theirs)
        with pytest.raises(putget.ProtocolMisuse, match="memory has been used for other rows since"):
            a2a.combine(rows, layout=grouped)
        assert torch.equal(
            other.combine(rows, layout=theirs),
            a2a.combine(rows, layout=a2a.dispatch(*ARGUMENTS).expert_major(2)),
        )


def test_after_close(a2a: putget.AllToAll) -> None:
    received = a2a.dispatch(*ARGUMENTS)
    grouped = received.expert_major()
    a2a.close()
    with pytest.raises(ValueError, match="this AllToAll is closed"):
        received.expert_major()
    with pytest.raises(putget.ProtocolMisuse, match="has ended"):
        putget.moe.finalize(rows_for(grouped), grouped)


def too_many_experts(rank: Rank) -> str:
    """A body: rank 0 is given a third expert by the table."""
    with rank.all_to_all(num_experts=4, top_k=1, expert_to_rank=torch.tensor([0, 0, 1, 1], dtype=torch.int32)) as a2a:
        memory = a2a.expert_major_memory()
        ids = torch.arange(4, dtype=torch.int32, device=rank.device).view(4, 1)
        weights, payload = torch.ones(4, 1, device=rank.device), torch.ones(4, 4, device=rank.device)
        a2a.expert_to_rank.copy_(torch.tensor([0, 0, 0, 1], dtype=torch.int32))
        rank.meet()
        grouped = a2a.dispatch(ids, weights, payload).expert_major(memory=memory)
        rank.meet()
        found = grouped.num_rows.tolist()
        try:
            a2a.check()
        except putget.ProtocolMisuse as error:
            a2a.check()
            return f"{found} {error}"
        return f"{found}"


def test_a_table_that_gives_a_rank_more_experts(device: str) -> None:
    first, second = run_ranks(2, too_many_experts, mode="thread", device=device)
    assert first.startswith("[2, 2] expert_major: 2 rows were left out, because expert_to_rank gives rank 0 more")
    assert second == "[2, 0]"


def test_sizes(a2a: putget.AllToAll) -> None:
    memory = a2a.expert_major_memory(4, 3)
    assert (memory.alignment, memory.max_rows, memory.capacity, a2a.num_local_experts) == (4, 3, 20, 4)
    assert memory.num_bytes >= memory.capacity * (16 + 8)
    grouped = a2a.dispatch(*ARGUMENTS).expert_major()
    assert grouped.num_local_experts == 4
    assert [field.name for field in dataclasses.fields(grouped) if not field.name.startswith("_")] == [
        "payloads",
        "offsets",
        "num_rows",
        "weights",
        "source_rows",
        "positions",
        "capacity",
        "alignment",
    ]
