"""Which rank owns which expert, in the forms in which engines hold it.

An adapter asks its engine and passes the table on as ``expert_to_rank``. It never relies on the default of
``putget.AllToAll``: engines that divide experts unevenly do it in other ways.
"""

from __future__ import annotations

from typing import Any

import torch

Table = tuple[int, ...]


def linear(num_experts: int, ep_size: int) -> Table:
    """Contiguous experts; the first ``num_experts % ep_size`` ranks have one more. FlashInfer's rule, and vLLM's."""
    each, more = divmod(num_experts, ep_size)
    return tuple(rank for rank in range(ep_size) for _ in range(each + (rank < more)))


def round_robin(num_experts: int, ep_size: int) -> Table:
    """Expert e is on rank ``e % ep_size``. vLLM's ``--expert-placement-strategy round_robin``."""
    return tuple(expert % ep_size for expert in range(num_experts))


def even(num_experts: int, ep_size: int, *, engine: str, num_local_experts: int | None = None) -> Table:
    """Contiguous blocks of equal size, for engines that divide experts in no other way.

    Args:
        num_experts: Physical experts of all ranks together.
        ep_size: Ranks of the expert-parallel group.
        engine: Its name, for messages.
        num_local_experts: Experts of this rank, as the engine says; None: it does not say.

    Raises:
        ValueError: The number does not divide, or the engine gives this rank another number.
    """
    if num_experts < 1 or num_experts % ep_size:
        raise ValueError(
            f"num_experts is {num_experts}, expected a multiple of the {ep_size} ranks: how {engine} would place the "
            "rest is not known"
        )
    if num_local_experts not in (None, num_experts // ep_size):
        raise ValueError(
            f"num_local_experts is {num_local_experts}, {num_experts} experts on {ep_size} ranks are "
            f"{num_experts // ep_size} each: where {engine} has the others is not known"
        )
    return linear(num_experts, ep_size)


def of_expert_map(expert_map: torch.Tensor, ep_rank: int, ep_size: int) -> Table:
    """The table of vLLM's expert map, which names this rank's experts alone.

    Args:
        expert_map: [num_experts] int; the local index of this rank's experts, -1 for others. It is read by the host.
        ep_rank: This rank.
        ep_size: Ranks of the expert-parallel group.

    Raises:
        ValueError: These experts are not those of the linear or the round-robin placement.
    """
    mine = [expert for expert, local in enumerate(expert_map.tolist()) if local >= 0]
    for table in (linear(len(expert_map), ep_size), round_robin(len(expert_map), ep_size)):
        if mine == [expert for expert, rank in enumerate(table) if rank == ep_rank]:
            return table
    raise ValueError(
        f"expert_map gives rank {ep_rank} of {ep_size} the experts {mine} of {len(expert_map)}; supported are the "
        "linear and the round-robin placement"
    )


def given(value: Any, num_experts: int, ep_size: int) -> Table:
    """A table that a caller passes: [num_experts] ranks, as a tensor or a sequence.

    Raises:
        ValueError: It has another length, or holds something else than ranks.
    """
    listed = value.tolist() if isinstance(value, torch.Tensor) else list(value)
    if len(listed) != num_experts:
        raise ValueError(f"expert_to_rank has {len(listed)} entries, expected {num_experts}")
    wrong = [rank for rank in listed if not isinstance(rank, int) or not 0 <= rank < ep_size]
    if wrong:
        raise ValueError(f"expert_to_rank holds {wrong[0]!r}, allowed are ranks from 0 to {ep_size - 1}")
    return tuple(listed)
