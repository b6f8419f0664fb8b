"""A layer whose experts lie in slots: which expert each slot holds, and which slot a token uses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from putget._arguments import check_int
from putget.balancer import Placement, ReplicaChoice
from putget.group.communicator import Communicator


class PlacedExperts:
    """The slots of one layer: as many consecutive ones on each rank.

    Args:
        num_experts: Experts as the router numbers them.
        ep_size: Ranks.
        ep_rank: This rank.
        device: Where ids are.
        num_slots: Slots of all ranks; those of `placement` if None.
        placement: Which expert each slot holds; if None, experts in their order, again from the first one on.
        layer: Which layer of the placement.
        how: See ``ReplicaChoice``.
        ranks_per_node: Ranks of a host; all if None.

    Attributes:
        choose: From experts to slots.
        local_experts: The expert of each slot of this rank; -1 where a slot is empty.

    Raises:
        ValueError: Sizes do not fit each other.
    """

    def __init__(
        self,
        num_experts: int,
        ep_size: int,
        ep_rank: int,
        device: torch.device,
        num_slots: int | None,
        placement: Placement | None,
        layer: int,
        how: str,
        ranks_per_node: int | None,
    ) -> None:
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
            how=how,
            ep_size=ep_size,
            ep_rank=ep_rank,
            ranks_per_node=ranks_per_node,
            device=device,
        )
        self.local_experts = self.local_of(placement, layer)
        self.note(placement, layer)
        self._digest = hashlib.sha256(placement.physical_to_logical[layer].tobytes()).hexdigest()[:16]

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
        """What must be the same on all ranks when a layer is made."""
        return {"placement": self._digest, "replica_choice": self.choose.how}


def place_experts(
    comm: Communicator,
    num_experts: int,
    device: torch.device,
    num_slots: int | None,
    placement: Placement | None,
    layer: int,
    how: str,
    ranks_per_node: int | None,
    all_to_all: Mapping[str, Any],
) -> PlacedExperts | None:
    """The slots of a layer; None where it has none: neither num_slots nor a placement is given.

    Raises:
        ValueError: Sizes do not fit each other, or all_to_all places experts otherwise.
    """
    if num_slots is None and placement is None:
        return None
    if all_to_all.get("expert_to_rank") is not None:
        raise ValueError("expert_to_rank is given with num_slots or placement: slots lie in ranks' order")
    return PlacedExperts(num_experts, comm.size, comm.rank, device, num_slots, placement, layer, how, ranks_per_node)
