"""A layer whose experts lie in slots: which expert each slot holds, and which slot a token uses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from putget._arguments import as_kind, check_int
from putget.balancer import Placement, ReplicaChoice
from putget.group.communicator import Communicator


@dataclass(frozen=True)
class SlotOptions:
    """Slots of a layer whose experts may have replicas.

    Args:
        num_slots: Slots of all ranks together, a multiple of the ranks. If None, those of `placement`; without one, a
            slot for each expert.
        placement: Which expert each slot holds: a ``putget.balancer.Placement``, the same on all ranks. If None,
            experts in their order, and again from the first one on.
        placement_layer: Which layer of `placement` this one is.
        replica_choice: How a token's replica is chosen: `how` of ``putget.balancer.ReplicaChoice``.
        ranks_per_node: Ranks of a host, for `replica_choice`; all if None.
    """

    num_slots: int | None = None
    placement: Placement | None = None
    placement_layer: int = 0
    replica_choice: str = "round_robin"
    ranks_per_node: int | None = None


class PlacedExperts:
    """The slots of one layer: as many consecutive ones on each rank.

    Args:
        num_experts: Experts as the router numbers them.
        ep_size: Ranks.
        ep_rank: This rank.
        device: Where ids are.
        slots: How many there are, what they hold first, and how one is chosen.

    Attributes:
        choose: From experts to slots.
        local_experts: The expert of each slot of this rank; -1 where a slot is empty.

    Raises:
        ValueError: Sizes do not fit each other.
    """

    def __init__(self, num_experts: int, ep_size: int, ep_rank: int, device: torch.device, slots: SlotOptions) -> None:
        num_slots, placement, layer = slots.num_slots, slots.placement, slots.placement_layer
        if placement is not None and not isinstance(placement, Placement):
            raise ValueError(f"placement is a {type(placement).__name__}, expected a putget.balancer.Placement")
        if num_slots is None:
            num_slots = num_experts if placement is None else placement.num_replicas
        check_int("num_slots", num_slots, 1, 1 << 16)
        if num_slots < num_experts:
            raise ValueError(f"num_slots is {num_slots}, fewer than num_experts, {num_experts}: each needs a slot")
        if num_slots % ep_size:
            raise ValueError(f"num_slots is {num_slots}, expected a multiple of ep_size, {ep_size}")
        if placement is None:
            placement, layer = Placement.of(np.arange(num_slots) % num_experts, num_experts), 0
        found = (placement.num_experts, placement.num_replicas)
        if found != (num_experts, num_slots):
            raise ValueError(
                f"placement has {found[0]} experts and {found[1]} slots; num_experts is {num_experts}, "
                f"num_slots is {num_slots}"
            )
        self.choose = ReplicaChoice(
            placement,
            layer,
            how=slots.replica_choice,
            ep_size=ep_size,
            ep_rank=ep_rank,
            ranks_per_node=slots.ranks_per_node,
            device=device,
        )
        self.local_experts = self.local_of(placement, layer)
        self.note(placement, layer)
        self._first = digest_of(placement, layer)

    @property
    def num_slots(self) -> int:
        """Slots of all ranks."""
        return self.choose.num_slots

    def local_of(self, placement: Placement, layer: int) -> list[int]:
        """The expert of each slot of this rank in a placement; -1 where a slot is empty."""
        each = self.num_slots // self.choose.ep_size
        slots: list[int] = placement.physical_to_logical[layer].tolist()
        return slots[self.choose.ep_rank * each :][:each]

    def note(self, placement: Placement, layer: int) -> None:
        """A placement is in force now."""
        self._slots: list[int] = placement.physical_to_logical[layer].tolist()

    def places(self) -> list[tuple[int, int]]:
        """Expert and rank of each slot that has an expert, by the placement in force as the host knows it."""
        each = self.num_slots // self.choose.ep_size
        return [(expert, slot // each) for slot, expert in enumerate(self._slots) if expert >= 0]

    def configuration(self) -> dict[str, Any]:
        """The values that must be the same on all ranks when a layer is made."""
        return {"placement": self._first, "replica_choice": self.choose.how}


def digest_of(placement: Placement, layer: int) -> str:
    """A word for a layer's placement, by which ranks compare theirs."""
    return hashlib.sha256(placement.physical_to_logical[layer].tobytes()).hexdigest()[:16]


def place_experts(
    comm: Communicator,
    num_experts: int,
    device: torch.device,
    slots: SlotOptions | None,
    all_to_all: Mapping[str, Any],
) -> PlacedExperts | None:
    """The slots of a layer; None where it has none.

    Raises:
        ValueError: Sizes do not fit each other, or all_to_all places experts otherwise.
    """
    if slots is None:
        return None
    as_kind("slots", slots, SlotOptions)
    if all_to_all.get("expert_to_rank") is not None:
        raise ValueError("expert_to_rank is given with slots: they lie in ranks' order")
    return PlacedExperts(num_experts, comm.size, comm.rank, device, slots)
