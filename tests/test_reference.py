"""The oracle itself, against worked examples and a second, scalar reading of the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from putget import reference


def ids(*rows: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


def scalar_route(topk_ids, table, ep_size, active, num_valid):  # type: ignore[no-untyped-def]
    """The specification's sentences, one token and one k at a time."""
    sent = [0] * ep_size
    target_ranks, target_slots, clean, invalid = [], [], [], 0
    for token, row in enumerate(topk_ids):
        seen: set[int] = set()
        target_ranks.append([])
        target_slots.append([])
        clean.append([])
        for expert in row:
            if token >= num_valid:
                expert = -1
            elif expert != -1 and not 0 <= expert < len(table):
                invalid += 1
                expert = -1
            clean[-1].append(expert)
            rank = table[expert] if expert >= 0 else -1
            if rank >= 0 and active[rank] and rank not in seen:
                seen.add(rank)
                target_ranks[-1].append(rank)
                target_slots[-1].append(sent[rank])
            else:
                target_ranks[-1].append(-1)
                target_slots[-1].append(-1)
        for rank in seen:
            sent[rank] += 1
    return target_ranks, target_slots, sent, invalid, clean


def test_default_table_is_contiguous_blocks() -> None:
    assert reference.default_expert_to_rank(8, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert reference.default_expert_to_rank(7, 4).tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert reference.default_expert_to_rank(9, 4).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert reference.default_expert_to_rank(2, 4).tolist() == [0, 1]
    with pytest.raises(ValueError, match="num_experts"):
        reference.default_expert_to_rank(0, 4)


def test_first_k_owns_the_slot_and_duplicates_are_minus_one() -> None:
    table = reference.default_expert_to_rank(8, 4)
    routing = reference.route(ids([6, 7, 0], [1, 0, 7], [2, 3, 2]), table, 4)
    assert routing.target_ranks.tolist() == [[3, -1, 0], [0, -1, 3], [1, -1, -1]]
    assert routing.target_slots.tolist() == [[0, -1, 0], [1, -1, 1], [0, -1, -1]]
    assert routing.rows_per_rank.tolist() == [2, 1, 0, 2]
    assert routing.target_ranks.dtype == routing.target_slots.dtype == routing.clean_ids.dtype == torch.int32


def test_invalid_ids_are_counted_and_not_truncated() -> None:
    table = reference.default_expert_to_rank(4, 2)
    wide = ids([2**32 + 3, -1], [-2, 3], [4, -(2**63)], dtype=torch.int64)
    routing = reference.route(wide, table, 2)
    assert routing.num_invalid == 4
    assert routing.clean_ids.tolist() == [[-1, -1], [-1, 3], [-1, -1]]
    assert routing.rows_per_rank.tolist() == [0, 1]


def test_padding_has_no_expert_and_is_not_counted_as_invalid() -> None:
    table = reference.default_expert_to_rank(4, 2)
    routing = reference.route(ids([0, 3], [99, 1]), table, 2, num_valid_tokens=1)
    assert routing.num_invalid == 0
    assert routing.clean_ids.tolist() == [[0, 3], [-1, -1]]
    assert routing.rows_per_rank.tolist() == [1, 1]


def test_experts_on_inactive_ranks_are_skipped_but_their_ids_delivered() -> None:
    table = reference.default_expert_to_rank(4, 2)
    routing = reference.route(ids([2, 0], [3, 2]), table, 2, active=[True, False])
    assert routing.target_ranks.tolist() == [[-1, 0], [-1, -1]]
    assert routing.clean_ids.tolist() == [[2, 0], [3, 2]]
    with pytest.raises(ValueError, match="active"):
        reference.route(ids([2, 0]), table, 2, active=[True])
    with pytest.raises(ValueError, match="topk_ids"):
        reference.route(ids([2, 0])[0], table, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_route_agrees_with_the_scalar_reading(data: st.DataObject) -> None:
    ep_size = data.draw(st.integers(1, 9))
    table = data.draw(st.lists(st.integers(0, ep_size - 1), min_size=1, max_size=20))
    top_k = data.draw(st.integers(1, 9))
    expert = st.integers(-3, len(table) + 2)
    rows = data.draw(st.lists(st.lists(expert, min_size=top_k, max_size=top_k), max_size=12))
    active = data.draw(st.lists(st.booleans(), min_size=ep_size, max_size=ep_size))
    num_valid = data.draw(st.integers(0, 12))
    topk_ids = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), top_k)
    routing = reference.route(topk_ids, torch.tensor(table, dtype=torch.int32), ep_size, active, num_valid)
    ranks, slots, sent, invalid, clean = scalar_route(rows, table, ep_size, active, num_valid)
    assert routing.target_ranks.tolist() == ranks
    assert routing.target_slots.tolist() == slots
    assert routing.rows_per_rank.tolist() == sent
    assert routing.num_invalid == invalid
    assert routing.clean_ids.tolist() == clean


def test_dispatch_puts_each_row_once_in_its_own_split() -> None:
    table = reference.default_expert_to_rank(4, 2)
    sent = [
        reference.Sent(
            topk_ids=ids([0, 1], [3, 0]),
            topk_weights=torch.tensor([[0.1, 0.2], [0.3, 0.4]]),
            payloads=(torch.tensor([10, 11]), torch.tensor([[True], [False]])),
        ),
        reference.Sent(
            topk_ids=ids([-1, 2]),
            topk_weights=torch.tensor([[0.5, 0.6]]),
            payloads=(torch.tensor([20]), torch.tensor([[True]])),
        ),
    ]
    _, arrived = reference.dispatch(sent, table, max_rows=[2, 3])
    assert arrived[0].num_tokens.tolist() == [2, 0]
    assert arrived[1].num_tokens.tolist() == [1, 1]
    assert arrived[0].topk_ids.tolist() == [[[0, 1], [3, 0]], [[-1, -1], [-1, -1]]]
    assert arrived[1].topk_ids[:, 0].tolist() == [[3, 0], [-1, 2]]
    assert arrived[0].payloads[0].tolist() == [[10, 11], [0, 0]]
    assert arrived[1].payloads[0].tolist() == [[11, 0, 0], [20, 0, 0]]
    assert arrived[1].payloads[1].shape == (2, 3, 1)
    assert arrived[1].payloads[1].dtype == torch.bool
    assert arrived[1].topk_weights[1, 0].tolist() == pytest.approx([0.5, 0.6])
    with pytest.raises(ValueError, match="source 0 sends 2 rows to rank 0, max_rows there is 1"):
        reference.dispatch(sent, table, max_rows=1)
    with pytest.raises(ValueError, match="max_rows"):
        reference.dispatch(sent, table, max_rows=[1])

    _, without_0 = reference.dispatch(sent, table, max_rows=2, active=[False, True])
    assert without_0[0].num_tokens.tolist() == [0, 0]
    assert without_0[1].num_tokens.tolist() == [0, 1]


@pytest.mark.parametrize("count", range(1, 33))
def test_tree_sum_has_the_bits_of_the_written_tree(count: int) -> None:
    generator = np.random.default_rng(count)
    leaves = generator.standard_normal((count, 64)) * 2.0 ** generator.integers(-12, 12, (count, 64))
    leaves = leaves.astype(np.float32)

    def tree(first: int, size: int) -> np.ndarray:
        # The left half is the largest power of two below size: carrying odd nodes up gives this very tree.
        if size == 1:
            return leaves[first]
        left = 1 << (size - 1).bit_length() - 1
        return tree(first, left) + tree(first + left, size - left)

    got = reference.tree_sum([torch.from_numpy(leaf) for leaf in leaves])
    assert np.array_equal(got.numpy().view(np.uint32), tree(0, count).view(np.uint32))


def test_tree_sum_order_is_observable() -> None:
    big, one = torch.tensor([2.0**25]), torch.tensor([1.0])
    assert reference.tree_sum([big, one, -big, one]).item() == 0.0
    assert reference.tree_sum([big, -big, one, one]).item() == 2.0
    assert reference.tree_sum([one, one, big, -big, one]).item() == 3.0
    with pytest.raises(ValueError, match="leaves"):
        reference.tree_sum([])


@pytest.mark.parametrize("dtype", reference.OUTPUT_DTYPES, ids=str)
def test_combine_adds_in_float32_and_rounds_once(dtype: torch.dtype) -> None:
    table = torch.tensor([0, 1, 2])
    routing = reference.route(ids([0, 1, 2], [2, 2, -1], [-1, -1, -1]), table, 3)
    half_ulp = torch.finfo(dtype).eps / 2
    rows = [torch.zeros(3, size, 2, dtype=dtype) for size in (3, 2, 4)]
    rows[0][1, 0] = 1
    rows[1][1, 0] = half_ulp
    rows[2][1, 0] = half_ulp
    rows[2][1, 1] = 7
    out = reference.combine(routing, rows, 1)
    assert out.dtype == dtype
    # Rounding after every addition would lose both halves in bfloat16 and float16; float32 itself does lose them.
    first = 1 if dtype == torch.float32 else 1 + 2 * half_ulp
    assert out.tolist() == [[first, first], [7, 7], [0, 0]]
    assert reference.combine(routing, rows, 1, torch.ones(3, 2, dtype=dtype))[1:].tolist() == [[8, 8], [1, 1]]
    with pytest.raises(ValueError, match="rows"):
        reference.combine(routing, [held.double() for held in rows], 1)


@pytest.mark.parametrize("elements", [1, 16, 127, 128, 129, 300])
def test_quantised_rows_are_near_the_rows(elements: int) -> None:
    rows = torch.randn(64, elements) * 2.0 ** torch.randint(-30, 30, (64, 1))
    rows *= 2.0 ** torch.randint(-12, 1, rows.shape)
    back = reference.quantised(rows)
    for first in range(0, elements, reference.SCALE_BLOCK):
        block = slice(first, first + reference.SCALE_BLOCK)
        scale = rows[:, block].abs().amax(1, keepdim=True) / 448
        # Half a unit in the last of four places, and below 2^-6 half of the smallest step; rounding of the scale apart.
        bound = torch.maximum(rows[:, block].abs() / 16, scale * 2.0**-10) * (1 + 1e-5)
        assert bool(((back[:, block] - rows[:, block]).abs() <= bound).all())
        assert bool((back[:, block].abs().amax(1) >= rows[:, block].abs().amax(1) * (1 - 1e-5)).all())


def test_quantised_zeros_stay_zeros() -> None:
    back = reference.quantised(torch.tensor([[0.0, -0.0, 1e-38, -1e-45]]))
    assert back.tolist() == [[0, 0, 0, 0]]
    assert torch.signbit(back).tolist() == [[False, True, False, True]]


def test_combine_adds_quantised_rows() -> None:
    table = torch.tensor([0, 1])
    routing = reference.route(ids([0, 1], [1, -1]), table, 2)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, 2, 3, 50, generator=generator).bfloat16() for _ in range(2)]
    got = reference.combine(routing, rows, 0, combine_dtype=torch.float8_e4m3fn)
    read = [reference.quantised(held[0].flatten(1)).view(2, 3, 50) for held in rows]
    assert torch.equal(got, torch.stack([read[0][0] + read[1][0], read[1][1]]).bfloat16())
    assert torch.equal(
        reference.combine(routing, rows, 0, combine_dtype=torch.bfloat16), reference.combine(routing, rows, 0)
    )
    with pytest.raises(ValueError, match="combine_dtype"):
        reference.combine(routing, rows, 0, combine_dtype=torch.float16)


def test_combine_adds_quantised_sums_of_other_domains() -> None:
    routing = reference.route(ids([0, 1, 2], [2, -1, 1]), torch.tensor([0, 1, 2]), 3)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(3, 2, 150, generator=generator).bfloat16() for _ in range(3)]
    first, second, third = (held[0].float() for held in rows)
    fp8 = torch.float8_e4m3fn
    got = reference.combine(routing, rows, 0, combine_dtype=fp8, domain_of=(0, 1, 1))
    far = reference.quantised(torch.stack([second[0] + third[0], third[1] + second[1]]).bfloat16())
    assert torch.equal(got, torch.stack([first[0] + far[0], far[1]]).bfloat16())
    assert torch.equal(
        reference.combine(routing, rows, 0, combine_dtype=fp8, domain_of=(0, 0, 0)),
        reference.combine(routing, rows, 0, combine_dtype=fp8),
    )


def test_combine_of_no_rows_is_positive_zero() -> None:
    table = torch.tensor([0])
    rows = [torch.full((1, 1, 1), -0.0)]
    no_expert = reference.combine(reference.route(ids([-1, -1]), table, 1), rows, 0)
    one_k = reference.combine(reference.route(ids([0]), table, 1), rows, 0)
    two_k = reference.combine(reference.route(ids([0, 0]), table, 1), rows, 0)
    assert [torch.signbit(value).item() for value in (no_expert, one_k, two_k)] == [False, True, False]


def test_dispatch_experts_combine_equals_the_dense_layer() -> None:
    torch.manual_seed(0)
    ep_size, num_experts, top_k, hidden_size = 4, 10, 4, 8
    weight = torch.randn(num_experts, hidden_size, 6)
    table = reference.default_expert_to_rank(num_experts, ep_size)
    sent = [
        reference.Sent(
            topk_ids=torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)]).int(),
            topk_weights=torch.rand(tokens, top_k),
            payloads=(torch.randn(tokens, hidden_size),),
        )
        for tokens in (3, 1, 5, 2)
    ]
    routings, arrived = reference.dispatch(sent, table, max_rows=5)
    rows = []
    for rank, got in enumerate(arrived):
        produced = torch.zeros(ep_size, 5, 6)
        for k in range(top_k):
            expert = got.topk_ids[:, :, k].long()
            here = (expert >= 0) & (table[expert.clamp(min=0)] == rank)
            term = torch.einsum("srh,srho->sro", got.payloads[0], weight[expert.clamp(min=0)])
            produced += torch.where(here[..., None], term * got.topk_weights[:, :, k, None], 0.0)
        rows.append(produced)
    for rank, mine in enumerate(sent):
        dense = reference.dense_moe(
            mine.payloads[0], mine.topk_ids, mine.topk_weights, lambda expert, held: held @ weight[expert]
        )
        torch.testing.assert_close(reference.combine(routings[rank], rows, rank), dense)


def test_dense_layer_without_experts_is_zero() -> None:
    hidden = torch.randn(2, 3, dtype=torch.bfloat16)
    out = reference.dense_moe(hidden, ids([-1], [-1]), torch.ones(2, 1), lambda _, rows: rows)
    assert out.dtype == torch.float32
    assert not out.any()


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_combine_over_domains_agrees_with_the_scalar_reading(data: st.DataObject) -> None:
    """Each domain's tree alone, one rounding, then a sum in the order of domains, and one rounding."""
    ep_size = data.draw(st.integers(1, 6))
    domain_of = sorted(data.draw(st.integers(0, 2)) for _ in range(ep_size))
    domain_of = [sorted(set(domain_of)).index(domain) for domain in domain_of]
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    top_k, num_tokens, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5)), data.draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    topk_ids = torch.randint(-1, ep_size, (num_tokens, top_k), generator=generator)
    routing = reference.route(topk_ids, reference.default_expert_to_rank(ep_size, ep_size), ep_size)
    rows = [torch.randn(ep_size, max(1, num_tokens), 3, generator=generator).to(dtype) for _ in range(ep_size)]
    addend = torch.randn(num_tokens, 3, generator=generator).to(dtype)
    got = reference.combine(routing, rows, 0, addend, domain_of=domain_of)
    for token in range(num_tokens):
        total = None
        for domain in range(max(domain_of) + 1):
            leaves = []
            for rank, slot in zip(routing.target_ranks[token], routing.target_slots[token], strict=True):
                is_here = rank >= 0 and domain_of[rank] == domain
                leaves.append(rows[rank][0, slot].float() if is_here else torch.zeros(3))
            added = reference.tree_sum(leaves).to(dtype).float()
            total = added if total is None else total + added
        assert total is not None
        assert torch.equal(got[token], (total + addend[token].float()).to(dtype))


def test_one_domain_adds_up_as_no_domain_does() -> None:
    rows = [torch.randn(2, 4, 5, dtype=torch.float32).bfloat16() for _ in range(2)]
    routing = reference.route(ids([0, 1], [1, -1], [1, 0]), reference.default_expert_to_rank(2, 2), 2)
    plain = reference.combine(routing, rows, 1)
    assert torch.equal(reference.combine(routing, rows, 1, domain_of=[0, 0]), plain)


def test_domains_show_in_the_bits() -> None:
    """256 + 1 + 1 is 258 in one domain; a bfloat16 sum of 256 + 1 is 256."""
    rows = [torch.tensor([[[value]]]).bfloat16().expand(3, 1, 1) for value in (256.0, 1.0, 1.0)]
    routing = reference.route(ids([0, 1, 2]), reference.default_expert_to_rank(3, 3), 3)
    assert reference.combine(routing, rows, 0).item() == 258
    assert reference.combine(routing, rows, 0, domain_of=[0, 0, 1]).item() == 256
    with pytest.raises(ValueError, match="domain_of must have ep_size=3 entries, got 2"):
        reference.combine(routing, rows, 0, domain_of=[0, 1])
