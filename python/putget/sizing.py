"""How much memory a workspace needs, before there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from putget.core.geometry import Geometry
from putget.payload import Payload


def workspace_bytes(
    *,
    ep_size: int,
    max_tokens_per_rank: int,
    top_k: int,
    payloads: Sequence[Payload],
    output: Payload,
    num_experts: int | None = None,
    combine_dtype: torch.dtype | None = None,
    num_stats: int = 0,
    domain_size: int | None = None,
) -> int:
    """Symmetric bytes that each rank needs, before anything is allocated.

    Up to two fifths of them, and up to 32 MiB for each rank of a domain, are for sentinel rows of combine; with
    ``combine_dtype`` as much as all of them need.

    Args:
        ep_size: Ranks of the expert-parallel group.
        max_tokens_per_rank: Capacity: most tokens that one rank sends in one round.
        top_k: Experts of a token.
        payloads: Kinds of rows that dispatch moves.
        output: The row that experts write and combine reduces.
        num_experts: Accepted for symmetry with ``AllToAll``; the size does not depend on it.
        combine_dtype: As given to ``AllToAll``; there is room for the quantised rows of all tokens.
        num_stats: As given to ``AllToAll``.
        domain_size: Ranks of the largest domain, where there are several; by default all are in one.

    Raises:
        ValueError: A size is not allowed.
    """
    experts = 1 if num_experts is None else num_experts
    geometry = Geometry.checked(
        ep_size,
        experts,
        top_k,
        max_tokens_per_rank,
        payloads,
        output,
        combine_dtype,
        num_stats,
        domain_ranks=domain_size,
    )
    return int(geometry.layout().total_bytes)
