"""Counts bytes: what crosses between ranks, what it would be without deduplication or by collectives, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from putget import reference


@dataclass(frozen=True)
class Shape:
    """The bytes that one round moves.

    Attributes:
        ep_size: ranks.
        num_experts: experts of all ranks together.
        top_k: experts of one token.
        max_tokens_per_rank: capacity that memory is laid out for.
        dispatch_row_bytes: one row of dispatch: payloads, ids and weights.
        combine_row_bytes: one row of combine.
    """

    ep_size: int
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    dispatch_row_bytes: int
    combine_row_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round. Except for memory, they left one rank for another, as the mean over ranks.

    Attributes:
        dispatch: one put per (token, rank), as putget does; to other domains one row per (token, domain). What a domain
            then passes on among its ranks does not count.
        combine: one get per (token, rank); likewise.
        combine_between_domains: the part of it that leaves a domain.
        dispatch_per_pair: one put per (token, k), without deduplication.
        combine_per_pair: one get per (token, k).
        all_gather: every token to every rank.
        reduce_scatter: every rank's partial sum of every token back.
        dispatch_algorithm: tokens x min(ep_size, top_k) x row bytes: the published formula, own rank counted.
        combine_algorithm: likewise.
        token_major_memory: receive area and combine input of one rank, one slot per (source, token).
        expert_major_memory: the same with one slot per (source, token, local expert).
    """

    dispatch: float
    combine: float
    combine_between_domains: float
    dispatch_per_pair: float
    combine_per_pair: float
    all_gather: float
    reduce_scatter: float
    dispatch_algorithm: float
    combine_algorithm: float
    token_major_memory: int
    expert_major_memory: int


def count(shape: Shape, topk_ids: Sequence[Tensor], domain_of: Sequence[int] | None = None) -> Traffic:
    """Counts the bytes of one round.

    Args:
        shape: sizes of rows and memory.
        topk_ids: the ids of every rank, each [num_tokens, top_k], -1 for no expert.
        domain_of: the domain of each rank; None: all ranks are one.
    """
    domains = torch.tensor([0] * shape.ep_size if domain_of is None else list(domain_of))
    expert_to_rank = reference.default_expert_to_rank(shape.num_experts, shape.ep_size)
    rows = far = pairs = tokens = 0
    for src, ids in enumerate(topk_ids):
        ids = ids.cpu().long()
        routing = reference.route(ids, expert_to_rank, shape.ep_size)
        near = routing.rows_per_rank[domains == domains[src]].sum()
        to_others = _rows_to_others(routing.target_ranks, domains, src)
        rows += int(near - routing.rows_per_rank[src]) + to_others
        far += to_others
        targets = expert_to_rank.long()[ids.clamp(min=0)]
        pairs += int(((ids >= 0) & (targets != src)).sum())
        tokens += len(ids)
    ranks = shape.ep_size
    fan_out = min(ranks, shape.top_k)
    slots = ranks * shape.max_tokens_per_rank
    slot_bytes = shape.dispatch_row_bytes + shape.combine_row_bytes
    num_local_experts = -(-shape.num_experts // ranks)
    return Traffic(
        dispatch=rows * shape.dispatch_row_bytes / ranks,
        combine=rows * shape.combine_row_bytes / ranks,
        combine_between_domains=far * shape.combine_row_bytes / ranks,
        dispatch_per_pair=pairs * shape.dispatch_row_bytes / ranks,
        combine_per_pair=pairs * shape.combine_row_bytes / ranks,
        all_gather=tokens * (ranks - 1) * shape.dispatch_row_bytes / ranks,
        reduce_scatter=tokens * (ranks - 1) * shape.combine_row_bytes / ranks,
        dispatch_algorithm=tokens * fan_out * shape.dispatch_row_bytes / ranks,
        combine_algorithm=tokens * fan_out * shape.combine_row_bytes / ranks,
        token_major_memory=slots * slot_bytes,
        expert_major_memory=slots * num_local_experts * slot_bytes,
    )


def _rows_to_others(target_ranks: Tensor, domains: Tensor, src: int) -> int:
    """Rows that cross to other domains than the source's: one for each (token, domain)."""
    rows = 0
    for domain in range(int(domains.max()) + 1):
        if domain != domains[src]:
            rows += int(((target_ranks >= 0) & (domains[target_ranks.clamp(min=0)] == domain)).any(1).sum())
    return rows


def gigabytes_per_second(num_bytes: float, latency_us: float) -> float:
    """10^9 bytes a second."""
    return num_bytes / latency_us / 1e3


def readable(num_bytes: float) -> str:
    """A byte count with a binary prefix and three digits."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB" if num_bytes < 1000 else f"{num_bytes:.0f} GiB"
