"""Routers against a plain reference: one token at a time, Python lists, sorted by (score, id)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from putget.balancer import ReplicaChoice, rebalance
from putget.moe import GroupLimitedRouting, Router, SoftmaxRouting
from putget.moe.router import Placing, largest


def best(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def softmax_by_hand(logits: Tensor, top_k: int, rule: SoftmaxRouting, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    ids, weights = [], []
    for row in logits.double():
        scores = (row - row.max()).exp()
        scores = (scores / scores.sum()).float()
        chosen = best((scores if bias is None else scores + bias).tolist(), top_k)
        ids.append(chosen)
        weights.append(weights_by_hand(scores, chosen, rule))
    return torch.tensor(ids), torch.stack(weights)


def groups_by_hand(logits: Tensor, top_k: int, rule: GroupLimitedRouting, bias: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = [], []
    each = logits.shape[1] // rule.num_groups
    for row in logits:
        scores = torch.sigmoid(row)
        biased = (scores + bias).tolist()
        rating = []
        for group in range(rule.num_groups):
            top = sorted(biased[group * each : (group + 1) * each], reverse=True)[: rule.rated_by]
            rating.append(float(torch.tensor(top).sum()))
        allowed = best(rating, rule.topk_groups)
        chosen = best([s if index // each in allowed else float("-inf") for index, s in enumerate(biased)], top_k)
        ids.append(chosen)
        weights.append(weights_by_hand(scores, chosen, rule))
    return torch.tensor(ids), torch.stack(weights)


def weights_by_hand(scores: Tensor, chosen: list[int], rule: Any) -> Tensor:
    picked = scores[chosen]
    if rule.renormalise:
        picked = picked / picked.sum()
    return picked * rule.scale


@st.composite
def logits_of(draw: st.DrawFn, num_experts: int) -> Tensor:
    """Coarse values, so that ties are common; sometimes so large that scores saturate."""
    num_tokens = draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**31))
    spread = draw(st.sampled_from([1.0, 4.0, 200.0]))
    steps = draw(st.sampled_from([1, 3, 1000]))
    raw = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) - 0.5
    return (raw * steps).round() / steps * spread


@given(st.data())
def test_softmax_equals_the_reference(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 24))
    top_k = data.draw(st.integers(1, num_experts))
    rule = SoftmaxRouting(data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 2.5])))
    logits = data.draw(logits_of(num_experts))
    bias = torch.zeros(num_experts) if data.draw(st.booleans()) else None
    ids, weights = rule.route(logits, top_k, bias)
    scores = torch.softmax(logits, dim=-1)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    # The choice is judged on the scores that torch gives, whose last bit decides between near equals.
    assert ids.tolist() == [best(row.tolist(), top_k) for row in scores]
    _, by_hand = softmax_by_hand(logits, top_k, rule, bias)
    torch.testing.assert_close(weights, by_hand, rtol=1e-5, atol=1e-7)


@given(st.data())
def test_group_limits_equal_the_reference(data: st.DataObject) -> None:
    num_groups = data.draw(st.sampled_from([1, 2, 4, 8]))
    each = data.draw(st.integers(1, 6))
    topk_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, topk_groups * each))
    rule = GroupLimitedRouting(
        num_groups,
        topk_groups,
        data.draw(st.booleans()),
        data.draw(st.sampled_from([1.0, 2.5])),
        data.draw(st.integers(1, 3)),
    )
    logits = data.draw(logits_of(num_groups * each))
    seed = data.draw(st.integers(0, 2**31))
    bias = (torch.randn(num_groups * each, generator=torch.Generator().manual_seed(seed)) * 4).round() / 8
    ids, weights = rule.route(logits, top_k, bias)
    expected_ids, expected = groups_by_hand(logits, top_k, rule, bias)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


@given(st.data())
def test_largest_breaks_ties_by_index(data: st.DataObject) -> None:
    special = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), 1e-45, -1e-45, 3e38, -3e38]
    row = data.draw(st.lists(st.sampled_from(special), min_size=1, max_size=12))
    count = data.draw(st.integers(1, len(row)))
    assert largest(torch.tensor([row]), count).tolist() == [best(row, count)]


def test_deepseek_v3_shape() -> None:
    """256 experts, 8 groups: at most 4 groups, 8 different experts, weights that sum to the factor."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 256, generator=generator)
    bias = torch.randn(256, generator=generator) * 0.1
    ids, weights = GroupLimitedRouting().route(logits, 8, bias)
    assert all(len({expert // 32 for expert in row}) <= 4 and len(set(row)) == 8 for row in ids.tolist())
    torch.testing.assert_close(weights.sum(dim=1), torch.full((50,), 2.5))
    unbiased, _ = GroupLimitedRouting().route(logits, 8)
    assert not torch.equal(ids, unbiased)


def test_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    ids, weights = GroupLimitedRouting(1, 1, renormalise=False, scale=1.0).route(logits, 2, bias)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0, 2.0]])))


def test_router_module(device: str) -> None:
    router = Router(64, 8, 3, dtype=torch.bfloat16, device=device)
    x = torch.randn(5, 64, device=device).bfloat16()
    ids, weights = router(x)
    scores = torch.softmax(x.double() @ router.weight.double().T, dim=-1)
    expected = scores.gather(1, ids.long())
    torch.testing.assert_close(weights, (expected / expected.sum(1, keepdim=True)).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(expected, scores.topk(3).values, rtol=1e-5, atol=1e-7)
    empty_ids, empty_weights = router(x[:0])
    assert empty_ids.shape == empty_weights.shape == (0, 3)


WAYS = ("nearest", "round_robin", "hash", "balanced", "activated")


@pytest.mark.parametrize("rule", [SoftmaxRouting(), GroupLimitedRouting(4, 2)], ids=["softmax", "groups"])
@pytest.mark.parametrize("how", WAYS)
def test_ids_are_placed_and_counted(how: str, rule: SoftmaxRouting | GroupLimitedRouting, device: str) -> None:
    placement = rebalance(torch.arange(1, 65).pow(2).tolist(), 96, 1, 1, 8)
    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(1), device="cpu").to(device)
    want, _ = rule.route(logits, 6)
    for valid in (None, 20):
        count = None if valid is None else torch.tensor([valid], dtype=torch.int32, device=device)
        choose = ReplicaChoice(placement, how=how, ep_size=8, ep_rank=1, ranks_per_node=4, device=device)
        load = torch.full((64,), 7, dtype=torch.int32, device=device)
        slots, weights = rule.route(logits, 6, None, Placing(choose, load, count))
        torch.testing.assert_close(weights, rule.route(logits, 6)[1], rtol=0, atol=0)
        on_host = ReplicaChoice(placement, how=how, ep_size=8, ep_rank=1, ranks_per_node=4)
        assert torch.equal(slots.cpu(), on_host(want.cpu(), num_valid_tokens=None if count is None else count.cpu()))
        assert torch.equal(load.cpu() - 7, torch.bincount(want.cpu()[:valid].flatten(), minlength=64).int())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((16, 4, 5), "top_k is 5"),
        ((16, 6, 2, GroupLimitedRouting(4, 2)), "num_experts is 6"),
        ((16, 8, 5, GroupLimitedRouting(4, 2)), "top_k is 5, allowed are ints from 1 to 4"),
        ((16, 8, 2, GroupLimitedRouting(4, 5)), "topk_groups is 5"),
        ((16, 8, 2, "sigmoid"), "routing is 'sigmoid'"),
        ((0, 8, 2), "hidden_size is 0"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Router(*arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("rule", "num_experts", "top_k"),
    [
        (SoftmaxRouting(), 256, 8),
        (SoftmaxRouting(renormalise=False), 60, 4),
        (GroupLimitedRouting(), 256, 8),
        (GroupLimitedRouting(1, 1), 384, 8),
        (GroupLimitedRouting(5, 2), 40, 8),  # left to torch
    ],
)
def test_gpu_chooses_as_the_cpu(rule: Any, num_experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(11)
    for steps in (4.0, 1e6):
        logits = (torch.randn(300, num_experts, generator=generator) * steps).round() / steps
        bias = (torch.randn(num_experts, generator=generator) * 4).round() / 8
        for added in (None, bias):
            ids, weights = rule.route(logits.cuda(), top_k, None if added is None else added.cuda())
            want_ids, want = rule.route(logits, top_k, added)
            same = (ids.cpu() == want_ids).all(1)
            # Scores that differ in the last bit may be ordered otherwise: equal logits never.
            assert same.float().mean() >= (1.0 if steps == 4.0 and added is None else 0.98)
            torch.testing.assert_close(weights.cpu()[same], want[same], rtol=1e-5, atol=1e-7)
