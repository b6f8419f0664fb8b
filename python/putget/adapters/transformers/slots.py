"""Expert slots of a spread model: more slots than experts, so that experts can move, and come back with a lost rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from putget import Communicator
from putget.adapters.placement import Table, linear
from putget.balancer import (
    BalancedLayer,
    Balancer,
    ExpertBlobs,
    HostStore,
    Placement,
    PlanOptions,
    ReplicaChoice,
)

BALANCE = ("off", "static", "online")
NEVER = PlanOptions(interval=1 << 24)  # passes between two plans of a placement that stays
_MOST_STATS = 256  # numbers in a round's statistics; loads of many experts travel in several passes


class LayerSlots:
    """The slots of one layer on this rank, and the map from experts to slots.

    Args:
        weights: [num_experts, ...] each, of all experts, by name.
        placement: Of all layers.
        number: This layer.
        comm: The ranks.
        store: Where this rank saves its share of the experts.

    Attributes:
        owners: The rank of each slot of all ranks.
        own: The weights of this rank's slots, by name; empty slots hold zeros.
    """

    def __init__(
        self, weights: dict[str, Tensor], placement: Placement, number: int, comm: Communicator, store: HostStore
    ) -> None:
        blobs = ExpertBlobs(weights)
        for expert in range(comm.rank, placement.num_experts, comm.size):
            store.save(number, expert, blobs, expert)
        each = placement.num_replicas // comm.size
        held = torch.from_numpy(placement.physical_to_logical[number, comm.rank * each : (comm.rank + 1) * each])
        self.owners: Table = tuple(slot // each for slot in range(placement.num_replicas))
        self.own: dict[str, Tensor] = {}
        for name, weight in weights.items():
            part = weight[held.clamp(min=0).to(weight.device)]
            part[(held < 0).to(weight.device)] = 0
            self.own[name] = part
        self._begin(placement, number, comm)

    def _begin(self, placement: Placement, number: int, comm: Communicator) -> None:
        device = next(iter(self.own.values())).device
        self._choose = ReplicaChoice(placement, number, ep_size=comm.size, ep_rank=comm.rank, device=device)
        self._load = torch.zeros(placement.num_experts, dtype=torch.int32, device=device)

    def again(
        self, placement: Placement, number: int, comm: Communicator, store: HostStore, before: HostStore
    ) -> LayerSlots:
        """The same slots for other ranks, with loads of their own. ``bring`` gives them the placement's experts.

        Args:
            placement: To be in force.
            number: This layer.
            comm: The ranks.
            store: Where this rank saves its share of the experts.
            before: Where it has them from.
        """
        for expert in range(comm.rank, placement.num_experts, comm.size):
            store.write(number, expert, before.view(number, expert))
        found = copy.copy(self)
        found._begin(placement, number, comm)
        return found

    def bring(self, placement: Placement, number: int, rank: int, store: HostStore) -> None:
        """Loads this rank's experts of a layer into their slots."""
        blobs = ExpertBlobs(self.own)
        mine = placement.physical_to_logical[number, rank * blobs.num_slots : (rank + 1) * blobs.num_slots]
        for slot, expert in enumerate(mine.tolist()):
            if expert >= 0:
                store.load(number, expert, blobs, slot, verify=False)

    def choose(self, ids: Tensor) -> Tensor:
        """The slot of each token's expert."""
        return self._choose(ids.contiguous())

    def count(self, ids: Tensor) -> None:
        """Counts the experts of a batch of this rank."""
        self._load += torch.bincount(ids.flatten(), minlength=len(self._load)).int()

    def balanced(self) -> BalancedLayer:
        """The layer, as a ``Balancer`` takes it."""
        return BalancedLayer(ExpertBlobs(self.own), self._load, self._choose.tables, self._choose.tables_of)


def expert_bytes(experts: Any) -> int:
    """Bytes of an expert of a layer in a ``HostStore``."""
    return ExpertBlobs({name: weight.detach() for name, weight in experts.named_parameters(recurse=False)}).slot_bytes


def slots_of(num_slots: int | None, balance: str, num_experts: int, ep_size: int) -> int | None:
    """Slots of all ranks together; None: each rank has its experts once.

    Raises:
        ValueError: They do not divide, are fewer than the experts, or balance is not known.
    """
    if balance not in BALANCE:
        raise ValueError(f"balance is {balance!r}, allowed are {', '.join(BALANCE)}")
    if num_slots is None:
        return None if balance == "off" else (-(-num_experts // ep_size) + 1) * ep_size
    if not isinstance(num_slots, int) or isinstance(num_slots, bool) or num_slots % ep_size or num_slots < num_experts:
        raise ValueError(
            f"num_slots is {num_slots!r}, expected a multiple of the {ep_size} ranks from the {num_experts} experts on"
        )
    return num_slots


def placement_of(num_layers: int, num_experts: int, num_slots: int, ep_size: int, filled: bool) -> Placement:
    """Experts in contiguous blocks, in front of each rank's slots; the others are empty, or filled with replicas.

    Args:
        num_layers: Layers, which all have the same placement.
        num_experts: Experts of a layer.
        num_slots: Slots of all ranks.
        ep_size: Ranks.
        filled: Whether spare slots hold experts of the next ranks.
    """
    each, owners = num_slots // ep_size, linear(num_experts, ep_size)
    row: list[int] = []
    for rank in range(ep_size):
        own = [expert for expert, owner in enumerate(owners) if owner == rank]
        row += own + [(own[-1] + 1 + spare) % num_experts if filled else -1 for spare in range(each - len(own))]
    return Placement.of([row] * num_layers, num_experts)


@dataclass(frozen=True)
class Terms:
    """Decisions about a model with spare slots, which hold for every process of a rank.

    Attributes:
        said: What ranks compare when they meet.
        placement: At first, and again when a process joins.
        expert_bytes: Of an expert of each layer.
        plan: When the balancer plans; ``NEVER``: when a rank is lost.
        timeout_s: The balancer's deadline in seconds when ranks are lost.
    """

    said: dict[str, Any]
    placement: Placement
    expert_bytes: list[int]
    plan: PlanOptions | None
    timeout_s: float

    def host_store(self, comm: Communicator, timeout_s: float) -> HostStore:
        """Memory for all experts. Collective."""
        return HostStore(comm, self.expert_bytes, self.placement.num_experts, timeout_s=timeout_s)

    def balancer(self, comm: Communicator, layers: Sequence[LayerSlots], store: HostStore) -> Balancer:
        """The balancer of the layers. Collective.

        Args:
            comm: The ranks.
            layers: Their slots.
            store: With all experts.
        """
        return Balancer(
            comm,
            [layer.balanced() for layer in layers],
            self.placement,
            num_stats=min(_MOST_STATS, 2 + len(layers) * self.placement.num_experts),
            plan=self.plan,
            store=store,
            device="cpu",
            timeout_s=self.timeout_s,
        )
