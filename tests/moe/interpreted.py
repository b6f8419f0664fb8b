"""The Triton kernels of putget.moe under Triton's interpreter: TRITON_INTERPRET=1 python -m tests.moe.interpreted."""

from __future__ import annotations

import torch

from putget.balancer import ReplicaChoice, rebalance
from putget.balancer.choice import BY_PAIR
from putget.moe import GroupLimitedRouting, SoftmaxRouting, grouped_fp8, grouped_fp8_triton, router_triton
from putget.moe.expert_rows import ExpertRows
from tests.moe.test_grouped_fp8 import PRODUCTS

RULES = (
    (SoftmaxRouting(), 24, 5),
    (SoftmaxRouting(renormalise=False, scale=2.0), 8, 8),
    (GroupLimitedRouting(4, 2), 16, 3),
    (GroupLimitedRouting(8, 3, renormalise=False, rated_by=1), 32, 6),
    (GroupLimitedRouting(1, 1), 12, 1),
)


def check_rules() -> None:
    """Says "chosen" for every rule, with logits that are coarse, so that there are ties."""
    generator = torch.Generator().manual_seed(7)
    for rule, num_experts, top_k in RULES:
        logits = (torch.rand(6, num_experts, generator=generator) * 4).round()
        bias = (torch.rand(num_experts, generator=generator) * 2).round() / 4
        groups = (1, 1, 1)
        if isinstance(rule, GroupLimitedRouting):
            groups = (rule.num_groups, rule.topk_groups, rule.rated_by)
        assert router_triton.fits(num_experts, *groups)
        for added in (None, bias):
            ids, weights = router_triton.choose(
                logits,
                added,
                top_k,
                groups=groups,
                sigmoid=isinstance(rule, GroupLimitedRouting),
                renormalise=rule.renormalise,
                scale=rule.scale,
                tiny=1e-20,
            )
            want_ids, want = rule.route(logits, top_k, added)
            right = torch.equal(ids, want_ids) and torch.allclose(weights, want, rtol=1e-5, atol=1e-7)
            print("chosen" if right else f"otherwise: {rule}, {ids.tolist()}, {want_ids.tolist()}")


def check_placed() -> None:
    """Says "placed" for every way that the router's kernel knows: the slots and counts of ReplicaChoice and torch."""
    generator = torch.Generator().manual_seed(9)
    logits = (torch.rand(40, 24, generator=generator) * 4).round()
    placement = rebalance(torch.arange(1, 25).pow(2).tolist(), 40, 1, 1, 4)
    want_ids, _ = SoftmaxRouting().route(logits, 5)
    for rank, how in enumerate(BY_PAIR, start=1):
        for valid in (None, 17):
            count = None if valid is None else torch.tensor([valid], dtype=torch.int32)
            choose = ReplicaChoice(placement, how=how, ep_size=4, ep_rank=rank, ranks_per_node=2)
            load = torch.full((24,), 3, dtype=torch.int32)
            slots, _ = router_triton.choose(
                logits,
                None,
                5,
                groups=(1, 1, 1),
                sigmoid=False,
                renormalise=True,
                scale=1.0,
                tiny=1e-20,
                replicas=choose,
                expert_load=load,
                num_valid_tokens=count,
            )
            want_load = 3 + torch.bincount(want_ids[slice(valid)].flatten(), minlength=24).int()
            right = torch.equal(slots, choose(want_ids, num_valid_tokens=count)) and torch.equal(load, want_load)
            print("placed" if right else f"otherwise: {how}, {slots.tolist()}")


def check_quantised() -> None:
    """Says "quantised" for all rows and for the rows before a count, also with more of them than programs."""
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(6))
    want, want_scales = grouped_fp8.quantise_rows(x)
    for count in (None, 0, 1, 30):
        codes, scales = torch.full((37, 256), 7, dtype=torch.uint8), torch.full((37, 2), -1.0)
        num_rows = None if count is None else torch.tensor([count], dtype=torch.int32)
        grouped_fp8_triton.quantise_rows(x, codes.view(torch.float8_e4m3fn), scales, num_rows)
        here = slice(count)
        # Where rounding carries, the interpreter leaves the exponent as it was.
        off = want[here].view(torch.uint8).int() - codes[here].int()
        right = bool(((off == 0) | (off == 8)).all()) and torch.equal(scales[here], want_scales[here])
        rest = slice(37 if count is None else count, None)
        right = right and bool((codes[rest] == 7).all()) and bool((scales[rest] == -1).all())
        print("quantised" if right else f"otherwise: {count}")


def check_bf16() -> None:
    """Says "close" for every kind of tiles without scales. The interpreter takes bfloat16 for integers: so float16."""
    generator = torch.Generator().manual_seed(8)
    starts, counts = (torch.tensor(one, dtype=torch.int32) for one in ([2, 5, 5], [3, 0, 40]))
    rows = torch.randn(45, 192, generator=generator).half()
    weights = (torch.randn(3, 256, 192, generator=generator) / 14).half()
    for expected_rows in (1, 6, 16, 1000):
        out = torch.full((45, 256), float("nan"), dtype=torch.bfloat16)
        given = ExpertRows(rows, None, starts, counts)
        grouped_fp8_triton.grouped_mm(given, weights, None, out, expected_rows, num_sms=None)
        want = torch.cat([rows[2:5].float() @ weights[0].float().T, rows[5:].float() @ weights[2].float().T])
        error = (out[2:].float() - want).norm(dim=1) / want.norm(dim=1)
        right = bool(out[:2].isnan().all()) and bool((error <= 2.0**-7).all())  # rounded once, towards zero
        print("close" if right else f"otherwise: {expected_rows}, {error.max()}")


def main() -> None:
    """Says "right" for every product and every kind of tiles."""
    check_bf16()
    check_rules()
    check_placed()
    check_quantised()
    for product in PRODUCTS:
        made = product.make()
        for expected_rows in (1, 16, 1000):
            out = torch.full((made.rows.capacity, product.n), float("nan"), dtype=torch.bfloat16)
            if len(out):
                grouped_fp8_triton.grouped_mm(
                    made.rows, made.weights, made.weight_scales, out, expected_rows, num_sms=None
                )
            belongs = torch.zeros(len(out), dtype=torch.bool)
            for start, count in zip(made.rows.starts.tolist(), product.counts, strict=True):
                belongs[start : start + count] = True
            untouched = bool(out[~belongs].isnan().all())
            wrong = product.wrong_rows(made, out)
            print("right" if untouched and not wrong else f"wrong: {product}, {expected_rows}, {wrong}, {untouched}")


if __name__ == "__main__":
    main()
