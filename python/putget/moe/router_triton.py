"""The choice of experts as one Triton kernel: see ``putget.moe.router``, which imports this on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from putget.balancer import ReplicaChoice


@triton.jit
def mix(value):
    """As ``putget::balancer::mix`` (native/balancer/choice.h): uint32."""
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def slots_of(
    chosen, token, choice, tables, num_experts, rank, HOW: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr
):
    """Slots of one token's experts: ``replica_of`` of native/balancer/choice.h, with tables as in tables.h."""
    if HOW == "nearest":
        replica = tl.load(tables + 2 * num_experts + chosen)
    else:
        count = tl.load(tables + chosen)
        if HOW == "round_robin":
            replica = (token.to(tl.int32) + rank) % count
        else:
            pair = (token.to(tl.int32) * TOP_K + choice + 1).to(tl.uint32)
            own = (choice * 0 + rank).to(tl.uint32)  # the compiler takes a rank of 1 for a constant, which has no type
            replica = (mix(mix(mix(pair) ^ own)) % count.to(tl.uint32)).to(tl.int32)
    return tl.load(tables + 5 * num_experts + 1 + chosen * WIDTH + replica)


@triton.jit
def choose_kernel(
    logits,
    bias,
    ids,
    weights,
    tables,
    expert_load,
    num_valid_tokens,
    num_experts,
    rank,
    scale,
    tiny,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    RATED_BY: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HOW: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_LOAD: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    """One warp a token. Grid: num_tokens. No shared memory, no synchronisation.

    Parameters: logits [num_tokens, num_experts] float32; bias [num_experts] float32, read where HAS_BIAS; ids
    [num_tokens, TOP_K] int32; weights, the same of float32; EXPERTS and PLACES, powers of two from num_experts and
    TOP_K on. With TOPK_GROUPS below GROUPS, experts and groups are powers of two themselves. With HOW, not empty, ids
    are slots: tables are those of a ReplicaChoice, WIDTH its max_replicas, rank its ep_rank. expert_load [num_experts]
    int32 is added to where HAS_LOAD. num_valid_tokens, one int32, is read where HAS_VALID.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    lowest = float("-inf")
    logit = tl.load(logits + token * num_experts + expert, mask=inside, other=lowest)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        scores = tl.exp(logit - tl.max(logit, 0))
        scores = scores / tl.sum(scores, 0)
    left = tl.where(inside, scores, lowest)
    if HAS_BIAS:
        left += tl.load(bias + expert, mask=inside, other=0.0)
    if TOPK_GROUPS < GROUPS:
        grouped = tl.reshape(left, (GROUPS, EXPERTS // GROUPS))
        place = tl.arange(0, EXPERTS // GROUPS)
        unrated = grouped
        rating = tl.zeros((GROUPS,), tl.float32)
        for _ in range(RATED_BY):
            rating += tl.max(unrated, 1)
            best = tl.argmax(unrated, 1, tie_break_left=True)
            unrated = tl.where(place[None, :] == best[:, None], lowest, unrated)
        group = tl.arange(0, GROUPS)
        is_allowed = tl.zeros((GROUPS,), tl.int32)
        for _ in range(TOPK_GROUPS):
            best_group = tl.argmax(tl.where(is_allowed != 0, lowest, rating), 0, tie_break_left=True)
            is_allowed = tl.where(group == best_group, 1, is_allowed)
        left = tl.reshape(tl.where(is_allowed[:, None] != 0, grouped, lowest), (EXPERTS,))
    choice = tl.arange(0, PLACES)
    chosen = tl.zeros((PLACES,), tl.int32)
    weight = tl.zeros((PLACES,), tl.float32)
    for k in range(TOP_K):
        best_expert = tl.argmax(left, 0, tie_break_left=True)
        chosen = tl.where(choice == k, best_expert, chosen)
        weight = tl.where(choice == k, tl.sum(tl.where(expert == best_expert, scores, 0.0), 0), weight)
        left = tl.where(expert == best_expert, lowest, left)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, 0) + tiny)
    is_counted = choice < TOP_K
    if HAS_VALID:
        is_counted = is_counted & (token < tl.load(num_valid_tokens))
    if HAS_LOAD:
        tl.atomic_add(expert_load + chosen, 1, mask=is_counted, sem="relaxed")
    if HOW != "":
        slots = slots_of(chosen, token, choice, tables, num_experts, rank, HOW, TOP_K, WIDTH)
        chosen = tl.where(is_counted, slots, -1)
    at = token * TOP_K + choice
    tl.store(ids + at, chosen, mask=choice < TOP_K)
    tl.store(weights + at, weight * scale, mask=choice < TOP_K)


def fits(num_experts: int, num_groups: int, topk_groups: int, rated_by: int) -> bool:
    """Whether the kernel knows this shape; the rest is left to torch."""
    if num_experts > 4096:
        return False
    if topk_groups == num_groups:
        return True
    powers = num_experts & (num_experts - 1) == 0 and num_groups & (num_groups - 1) == 0
    return powers and rated_by <= num_experts // num_groups


def choose(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    groups: tuple[int, int, int],
    sigmoid: bool,
    renormalise: bool,
    scale: float,
    tiny: float,
    replicas: ReplicaChoice | None = None,
    expert_load: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ids and weights, [num_tokens, top_k].

    Args:
        logits: [num_tokens, num_experts] float32, contiguous.
        bias: [num_experts] float32, or None.
        top_k: Experts of a token.
        groups: num_groups, topk_groups, rated_by.
        sigmoid: Whether scores are sigmoids; otherwise softmax.
        renormalise: Whether weights are divided by their sum.
        scale: What weights are multiplied by in the end.
        tiny: Added to the sum.
        replicas: Of a way that looks at one pair alone; ids are slots then.
        expert_load: [num_experts] int32, to which each token adds 1 for each of its experts; or None.
        num_valid_tokens: One int32: tokens from there on are not counted, and have no slots; or None.
    """
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), device=logits.device)
    kernel: Any = choose_kernel
    if num_tokens:
        kernel[(num_tokens,)](
            logits,
            logits if bias is None else bias,
            ids,
            weights,
            ids if replicas is None else replicas.tables,
            ids if expert_load is None else expert_load,
            ids if num_valid_tokens is None else num_valid_tokens,
            num_experts,
            0 if replicas is None else replicas.ep_rank,
            scale,
            tiny,
            EXPERTS=triton.next_power_of_2(num_experts),
            GROUPS=groups[0],
            TOPK_GROUPS=groups[1],
            RATED_BY=groups[2],
            TOP_K=top_k,
            PLACES=triton.next_power_of_2(top_k),
            SIGMOID=sigmoid,
            HAS_BIAS=bias is not None,
            RENORMALISE=renormalise,
            HOW="" if replicas is None else replicas.how,
            WIDTH=1 if replicas is None else replicas.max_replicas,
            HAS_LOAD=expert_load is not None,
            HAS_VALID=num_valid_tokens is not None,
            num_warps=1,
        )
    return ids, weights
