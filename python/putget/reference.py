"""The all-to-all in plain torch: what every backend must reproduce bit for bit.

The oracle knows nothing of the implementation and imports torch only. It looks at all ranks at once, so it needs no
communication: `route` gives each (token, k) pair its rank and slot, `dispatch` says what every rank then holds, and
`combine` reduces the rows of the experts in the same fixed order as the kernels, so equality is bitwise, but for which
NaN a NaN is: backends write 0x7fff in 16 bits, as GPUs' conversions do.

The token-rank deduplication and the per-source split of the receive area follow the one-sided MoE all-to-all of
TensorRT-LLM and FlashInfer (`MoeAlltoAll`); slots in prefix order and the pairwise tree are putget's own, and make
placement and sums independent of timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_BLOCK = 128  # elements of a row that share a scale
_SMALLEST_BLOCK = 1e-30  # a block of smaller elements, or of zeros, is scaled as if this were its largest one


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one source rank go.

    Attributes:
        target_ranks: [num_tokens, top_k] int32, the rank that receives the token for this k, or -1 where the expert
            shares its rank with an earlier k, is no expert, or lives on an inactive rank.
        target_slots: [num_tokens, top_k] int32, the slot of the token in this source's split there, -1 likewise.
        rows_per_rank: [ep_size] int64, rows sent to each rank.
        num_invalid: how many ids were neither -1 nor in [0, num_experts).
        clean_ids: [num_tokens, top_k] int32, the ids as they are delivered: invalid ones and those of padding are -1.
        expert_load: [num_experts] int32, choices of each expert on an active rank.
    """

    target_ranks: Tensor
    target_slots: Tensor
    rows_per_rank: Tensor
    num_invalid: int
    clean_ids: Tensor
    expert_load: Tensor


@dataclass(frozen=True)
class Sent:
    """One rank's input of dispatch.

    Attributes:
        topk_ids: [num_tokens, top_k] int32 or int64.
        topk_weights: [num_tokens, top_k] float32.
        payloads: each [num_tokens, *shape], any dtype.
        num_valid_tokens: tokens from this index on are padding; None means that there is none.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    payloads: tuple[Tensor, ...]
    num_valid_tokens: int | None = None


@dataclass(frozen=True)
class Arrived:
    """One rank's rows after dispatch, indexed by source rank and slot.

    Only the first num_tokens[src] slots of a source carry rows. In empty slots topk_ids is -1; weights and payloads are
    zero here and unspecified in the implementation.

    Attributes:
        topk_ids: [ep_size, max_rows, top_k] int32.
        topk_weights: [ep_size, max_rows, top_k] float32.
        payloads: each [ep_size, max_rows, *shape].
        num_tokens: [ep_size] int32.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    payloads: tuple[Tensor, ...]
    num_tokens: Tensor


def default_expert_to_rank(num_experts: int, ep_size: int) -> Tensor:
    """Contiguous blocks of ceil(num_experts / ep_size) experts a rank.

    Args:
        num_experts: number of physical experts, 1 or more; it need not divide by ep_size and may be smaller.
        ep_size: number of ranks, 1 or more.

    Returns:
        [num_experts] int32, the rank of each expert.

    Raises:
        ValueError: if either number is below 1.
    """
    if num_experts < 1 or ep_size < 1:
        raise ValueError(f"num_experts and ep_size must be at least 1, got {num_experts} and {ep_size}")
    experts_per_rank = -(-num_experts // ep_size)
    return torch.arange(num_experts, dtype=torch.int32, device="cpu") // experts_per_rank


def route(
    topk_ids: Tensor,
    expert_to_rank: Tensor,
    ep_size: int,
    active: Sequence[bool] | None = None,
    num_valid_tokens: int | None = None,
) -> Routing:
    """Gives every (token, k) pair of one source rank its target rank and slot.

    A token crosses once to each distinct active rank that owns one of its experts; the first such k carries the slot.
    The slot is the number of earlier tokens of this source that go to the same rank.

    Args:
        topk_ids: [num_tokens, top_k] int32 or int64, expert of each k, -1 for no expert.
        expert_to_rank: [num_experts] int, the rank of each expert; an expert on a rank that does not exist is skipped.
        ep_size: number of ranks.
        active: one flag a rank; experts on inactive ranks are skipped. None means that all are active.
        num_valid_tokens: tokens from this index on have no expert, whatever their ids. None means all are valid.

    Returns:
        The routing, on the device of topk_ids.

    Raises:
        ValueError: if topk_ids is not a matrix, or active has not ep_size entries.
    """
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids must be [num_tokens, top_k], got shape {tuple(topk_ids.shape)}")
    if active is not None and len(active) != ep_size:
        raise ValueError(f"active must have ep_size={ep_size} entries, got {len(active)}")
    num_tokens, top_k = topk_ids.shape
    num_experts = expert_to_rank.numel()
    device = topk_ids.device

    ids = topk_ids.long()
    if num_valid_tokens is not None:
        padding = torch.arange(num_tokens, device=device) >= num_valid_tokens
        ids = ids.masked_fill(padding[:, None], -1)
    is_expert = (ids >= 0) & (ids < num_experts)
    num_invalid = int((~is_expert & (ids != -1)).sum())
    ids = ids.masked_fill(~is_expert, -1)

    ranks = expert_to_rank.to(device).long()[ids.clamp(min=0)].masked_fill(~is_expert, -1)
    ranks = ranks.masked_fill((ranks < 0) | (ranks >= ep_size), -1)
    if active is not None:
        is_active = torch.tensor(active, dtype=torch.bool, device=device)
        ranks = ranks.masked_fill(~is_active[ranks.clamp(min=0)], -1)

    same_rank = ranks[:, :, None] == ranks[:, None, :]
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=device).tril(-1)
    owns_slot = (ranks >= 0) & ~(same_rank & earlier).any(dim=2)

    goes_to = torch.zeros(num_tokens, ep_size + 1, dtype=torch.int64, device=device)
    goes_to.scatter_(1, ranks.masked_fill(~owns_slot, ep_size), 1)
    goes_to = goes_to[:, :ep_size]
    slot_at = goes_to.cumsum(0) - goes_to
    slots = slot_at.gather(1, ranks.clamp(min=0))
    return Routing(
        target_ranks=ranks.masked_fill(~owns_slot, -1).int(),
        target_slots=slots.masked_fill(~owns_slot, -1).int(),
        rows_per_rank=goes_to.sum(0),
        num_invalid=num_invalid,
        clean_ids=ids.int(),
        expert_load=torch.bincount(ids[ranks >= 0], minlength=num_experts).int(),
    )


def dispatch(
    sent: Sequence[Sent],
    expert_to_rank: Tensor,
    *,
    max_rows: int | Sequence[int],
    active: Sequence[bool] | None = None,
) -> tuple[list[Routing], list[Arrived]]:
    """Carries the rows of all ranks to all ranks.

    Args:
        sent: the arguments of each rank, ep_size of them; all with the same top_k, payload shapes and dtypes.
        expert_to_rank: [num_experts] int, the rank of each expert.
        max_rows: slots a source has at each rank, one number or one a rank.
        active: one flag a rank; inactive ranks neither send nor receive. None means that all are active.

    Returns:
        The routing of every source, and what every rank holds afterwards.

    Raises:
        ValueError: if max_rows has not ep_size entries, or a source sends more rows to a rank than it has slots there.
    """
    ep_size = len(sent)
    is_active = [True] * ep_size if active is None else [bool(flag) for flag in active]
    capacity = [max_rows] * ep_size if isinstance(max_rows, int) else list(max_rows)
    if len(capacity) != ep_size:
        raise ValueError(f"max_rows must be one number or ep_size={ep_size} of them, got {len(capacity)}")
    routings = [
        route(mine.topk_ids, expert_to_rank, ep_size, is_active, mine.num_valid_tokens if is_active[src] else 0)
        for src, mine in enumerate(sent)
    ]
    arrived = []
    for dst in range(ep_size):
        num_tokens = [int(routing.rows_per_rank[dst]) for routing in routings]
        for src, rows in enumerate(num_tokens):
            if rows > capacity[dst]:
                raise ValueError(f"source {src} sends {rows} rows to rank {dst}, max_rows there is {capacity[dst]}")
        # The first k of a token at a rank owns its slot, so a token appears here once, and token order is slot order.
        tokens = [(routing.target_ranks == dst).any(dim=1).nonzero()[:, 0] for routing in routings]

        def split(values: Sequence[Tensor], empty: int, dst: int = dst, tokens: list[Tensor] = tokens) -> Tensor:
            like = values[0]
            held = torch.full((ep_size, capacity[dst], *like.shape[1:]), empty, device=like.device).to(like.dtype)
            for src, index in enumerate(tokens):
                held[src, : len(index)] = values[src][index]
            return held

        arrived.append(
            Arrived(
                topk_ids=split([routing.clean_ids for routing in routings], -1),
                topk_weights=split([mine.topk_weights for mine in sent], 0),
                payloads=tuple(split([mine.payloads[i] for mine in sent], 0) for i in range(len(sent[0].payloads))),
                num_tokens=torch.tensor(num_tokens, dtype=torch.int32, device="cpu"),
            )
        )
    return routings, arrived


def tree_sum(leaves: Sequence[Tensor]) -> Tensor:
    """Adds neighbours until one value is left; an odd last one is carried up unchanged.

    ((0+1)+(2+3))+4 for five leaves. The order depends on the number of leaves alone, so a sum has the same bits on
    every backend, whichever path or vector width computes it.

    Args:
        leaves: one or more float32 tensors of equal shape.

    Returns:
        The float32 sum.

    Raises:
        ValueError: if there is no leaf.
    """
    level = list(leaves)
    if not level:
        raise ValueError("leaves must not be empty")
    while len(level) > 1:
        odd = level[len(level) - len(level) % 2 :]
        level = [a + b for a, b in zip(level[0::2], level[1::2], strict=False)] + odd
    return level[0]


def quantised(rows: Tensor) -> Tensor:
    """The values read back from FP8 rows (E4M3 without infinities, OCP 8-bit floating point specification).

    Each block of SCALE_BLOCK elements has a scale, which makes its largest element 448: max(|x|) / 448, where NaNs do
    not count. An element travels as E4M3 of itself times 1 / scale, rounded to nearest even and saturated at 448; a NaN
    stays one. All arithmetic is float32.

    Args:
        rows: [..., elements], any float dtype.

    Returns:
        [..., elements] float32: the E4M3 values times their scales.
    """
    fp8 = torch.float8_e4m3fn
    largest_value = torch.finfo(fp8).max
    values = rows.float()
    elements = rows.shape[-1]
    blocks = -(-elements // SCALE_BLOCK)
    magnitude = torch.zeros(*rows.shape[:-1], blocks * SCALE_BLOCK, device=rows.device)
    magnitude[..., :elements] = values.abs().nan_to_num(0.0, posinf=float("inf"))
    largest = magnitude.view(*rows.shape[:-1], blocks, SCALE_BLOCK).amax(-1, keepdim=True)
    scales = largest.clamp(min=_SMALLEST_BLOCK) / largest_value
    scales = scales.expand(*scales.shape[:-1], SCALE_BLOCK).flatten(-2)[..., :elements]
    scaled = values * (1.0 / scales)
    return scaled.clamp(-largest_value, largest_value).to(fp8).float() * scales


def combine(
    routing: Routing,
    rows: Sequence[Tensor],
    ep_rank: int,
    addend: Tensor | None = None,
    *,
    combine_dtype: torch.dtype | None = None,
    domain_of: Sequence[int] | None = None,
) -> Tensor:
    """Gets the experts' rows of one source rank back and adds them up.

    Args:
        routing: the routing of this source, as dispatch made it.
        rows: for every rank, what its experts wrote: [ep_size, max_rows, *shape], bfloat16, float16 or float32.
            max_rows may differ between ranks.
        ep_rank: the source rank.
        addend: [num_tokens, *shape] of the same dtype, added last in float32, or None.
        combine_dtype: torch.float8_e4m3fn: what is added up is ``quantised(row)`` of each row, flattened; with several
            domains ``quantised(sum)`` of each other domain's rounded sum, and nothing else. None or the dtype of rows:
            the rows and sums themselves.
        domain_of: the domain of each rank, numbered from 0; None: all ranks are one. Each domain adds up its own rows
            by the tree, with +0.0 for those of other domains, and rounds the sum to the dtype of rows. These sums are
            then added in float32, in the order of domains.

    Returns:
        [num_tokens, *shape] of the dtype of rows: the tree sum in float32 over k of the row in target_slots[:, k], with
        +0.0 where there is none, rounded once to nearest even.

    Raises:
        ValueError: if the dtype is none of the three, combine_dtype is another one, or domain_of has not one entry for
            each rank.
    """
    dtype = rows[0].dtype
    if dtype not in OUTPUT_DTYPES:
        raise ValueError(f"rows must be one of {OUTPUT_DTYPES}, got {dtype}")
    if combine_dtype not in (None, dtype, torch.float8_e4m3fn):
        raise ValueError(f"combine_dtype must be {dtype} or torch.float8_e4m3fn, got {combine_dtype}")
    shape = rows[0].shape[2:]
    mine = [held[ep_rank] for held in rows]
    first = torch.tensor([0] + [len(split) for split in mine], device=mine[0].device).cumsum(0)[:-1]
    # One +0.0 row at the end stands for every (token, k) without a row.
    pool = torch.cat([*mine, torch.zeros(1, *shape, dtype=dtype, device=mine[0].device)])
    is_quantised = combine_dtype == torch.float8_e4m3fn
    if is_quantised and (domain_of is None or len(set(domain_of)) == 1):
        pool = quantised(pool.flatten(1)).view(pool.shape)
    domains = torch.tensor([0] * len(rows) if domain_of is None else list(domain_of), device=mine[0].device)
    if len(domains) != len(rows):
        raise ValueError(f"domain_of must have ep_size={len(rows)} entries, got {len(domains)}")
    targets = routing.target_ranks.long()
    index = first[targets.clamp(min=0)] + routing.target_slots.long()
    total = None
    for domain in range(int(domains.max()) + 1):
        has_row = (targets >= 0) & (domains[targets.clamp(min=0)] == domain)
        here = index.masked_fill(~has_row, len(pool) - 1)
        added = tree_sum([pool[here[:, k]].float() for k in range(here.shape[1])])
        if domain_of is not None:
            added = added.to(dtype).float()
            if is_quantised and domain != domain_of[ep_rank]:
                added = quantised(added.flatten(1)).view(added.shape)
        total = added if total is None else total + added
    assert total is not None
    if addend is not None:
        total = total + addend.float()
    return total.to(dtype)


def dense_moe(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_fn: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """A mixture-of-experts layer with no parallelism at all, for demonstrations and tolerance checks.

    Args:
        hidden: [num_tokens, hidden_size], any float dtype.
        topk_ids: [num_tokens, top_k] int, -1 for no expert.
        topk_weights: [num_tokens, top_k] float32.
        expert_fn: `expert_fn(expert, rows)` maps float32 rows [n, hidden_size] to float32 [n, output_size].

    Returns:
        [num_tokens, output_size] float32: the weighted sum over the experts of each token, added in the tree order;
        zeros for a token without expert, and [num_tokens, hidden_size] zeros if no token has one.
    """
    rows = hidden.float()
    leaves: list[Tensor] | None = None
    for expert in sorted(set(topk_ids.flatten().tolist())):
        if expert < 0:
            continue
        token, k = (topk_ids == expert).nonzero(as_tuple=True)
        result = expert_fn(expert, rows[token]) * topk_weights[token, k, None].float()
        if leaves is None:
            leaves = [result.new_zeros(len(hidden), result.shape[1]) for _ in range(topk_ids.shape[1])]
        for i, leaf in enumerate(leaves):
            leaf[token[k == i]] = result[k == i]
    return torch.zeros_like(rows) if leaves is None else tree_sum(leaves)
