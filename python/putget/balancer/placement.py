"""Where experts lie: which expert each slot holds, and which slots each expert has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from putget import _abi_balancer
from putget._arguments import as_array, as_count, as_kind

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Placement:
    """The experts of all slots, for each layer.

    A slot is where the weights of one expert lie. Every rank has as many slots; slot s lies on rank
    ``s // (num_replicas // num_gpus)``. `of` makes a placement from its first table.

    Attributes:
        physical_to_logical: int32 [num_layers, num_replicas]: the expert of each slot; -1 where a slot is empty.
        logical_to_physical: int32 [num_layers, num_experts, most replicas of an expert]: the slots of each expert in
            ascending order, then -1.
        replica_count: int32 [num_layers, num_experts]: how many slots each expert has.
    """

    physical_to_logical: Ints
    logical_to_physical: Ints
    replica_count: Ints

    @classmethod
    def of(cls, physical_to_logical: Any, num_experts: int) -> Placement:
        """Makes the other tables. The first one is copied.

        Args:
            physical_to_logical: integers [num_layers, num_replicas], or [num_replicas] for one layer; -1 is an empty
                slot.
            num_experts: number of experts of a layer.

        Raises:
            ValueError: The table has another shape, holds other numbers, or has no slot for an expert.
        """
        slots = as_table("physical_to_logical", physical_to_logical, num_experts)
        num_layers, num_replicas = slots.shape
        # Empty slots count as one expert more, whose row is left out.
        keys = np.where(slots < 0, num_experts, slots) + (num_experts + 1) * np.arange(num_layers)[:, None]
        count = np.bincount(keys.ravel(), minlength=num_layers * (num_experts + 1))
        count = count.reshape(num_layers, num_experts + 1)
        missing = np.argwhere(count[:, :num_experts] == 0)
        if len(missing):
            layer, expert = missing[0]
            raise ValueError(f"physical_to_logical: layer {layer} has no slot for expert {expert}")
        order = np.argsort(keys.ravel(), kind="stable")
        first = np.cumsum(count.ravel()) - count.ravel()
        nth = np.arange(len(order)) - first[keys.ravel()[order]]
        width = int(count[:, :num_experts].max(initial=1))
        table = np.full((num_layers, num_experts, width), -1, np.int32)
        layer_of, slot_of = np.divmod(order, num_replicas)
        expert_of = slots[layer_of, slot_of]
        held = expert_of >= 0
        table[layer_of[held], expert_of[held], nth[held]] = slot_of[held]
        return cls(slots, table, count[:, :num_experts].astype(np.int32))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return int(self.physical_to_logical.shape[0])

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer."""
        return int(self.replica_count.shape[1])

    @property
    def num_replicas(self) -> int:
        """Number of slots of all ranks."""
        return int(self.physical_to_logical.shape[1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        same = np.array_equal(self.physical_to_logical, other.physical_to_logical)
        return same and self.num_experts == other.num_experts

    __hash__ = None  # type: ignore[assignment]

    def rank_loads(self, load: Any, num_gpus: int) -> NDArray[np.float64]:
        """The load of each rank, if an expert's load is shared evenly by its replicas.

        Args:
            load: [num_layers, num_experts], or [num_experts] for one layer; tokens, or any other weight.
            num_gpus: number of ranks.

        Returns:
            float64 [num_layers, num_gpus].

        Raises:
            ValueError: A shape differs.
        """
        num_gpus = self._ranks(num_gpus)
        weight = as_load(load, self.num_layers, self.num_experts)
        share = weight / self.replica_count
        slots = self.physical_to_logical
        held = np.where(slots < 0, 0.0, np.take_along_axis(share, np.maximum(slots, 0), axis=1))
        sums: NDArray[np.float64] = held.reshape(self.num_layers, num_gpus, -1).sum(axis=2)
        return sums

    def imbalance(self, load: Any, num_gpus: int) -> NDArray[np.float64]:
        """Largest load of a rank over the mean of all ranks; 1 is even. Arguments as for `rank_loads`.

        Returns:
            float64 [num_layers]; 1 for a layer without load.
        """
        num_gpus = self._ranks(num_gpus)
        sums = self.rank_loads(load, num_gpus)
        held = (self.physical_to_logical.reshape(self.num_layers, num_gpus, -1) >= 0).any(axis=2).sum(axis=1)
        total = sums.sum(axis=1)
        return np.where(total > 0, sums.max(axis=1) * held / np.where(total > 0, total, 1), 1.0)

    def moves_from(self, previous: Placement, num_gpus: int) -> NDArray[np.int64]:
        """How many experts ranks have to get that they do not hold in `previous`.

        Returns:
            int64 [num_layers].

        Raises:
            ValueError: The placements differ in shape, or num_gpus does not divide the slots.
        """
        ours, num_gpus = self.physical_to_logical, self._ranks(num_gpus)
        as_kind("previous", previous, Placement)
        if ours.shape != previous.physical_to_logical.shape or self.num_experts != previous.num_experts:
            raise ValueError(
                f"previous is {_sizes(previous)}; the placement is {_sizes(self)}: they are of different sizes"
            )
        held = held_by(previous, num_gpus)
        now = ours.reshape(self.num_layers, num_gpus, -1)
        layers, gpus = np.ogrid[: self.num_layers, :num_gpus]
        arrives = (now >= 0) & ~held[layers[..., None], gpus[..., None], np.maximum(now, 0)]
        moves: NDArray[np.int64] = arrives.sum(axis=(1, 2))
        return moves

    def _ranks(self, num_gpus: Any) -> int:
        ranks = as_count("num_gpus", num_gpus, 1, _abi_balancer.MAX_GPUS)
        if self.num_replicas % ranks:
            raise ValueError(f"num_gpus is {ranks}, which does not divide {self.num_replicas} slots")
        return ranks


def held_by(placement: Placement, num_gpus: int) -> NDArray[np.bool_]:
    """Which rank holds which expert: bool [num_layers, num_gpus, num_experts]."""
    slots = placement.physical_to_logical.reshape(placement.num_layers, num_gpus, -1)
    held = np.zeros((placement.num_layers, num_gpus, placement.num_experts + 1), bool)
    layers, gpus = np.ogrid[: placement.num_layers, :num_gpus]
    held[layers[..., None], gpus[..., None], slots] = True  # -1 is the last one, which is left out
    return held[..., :-1]


def as_table(name: str, table: Any, num_experts: int) -> Ints:
    """Integers of experts, -1 to num_experts - 1, as int32 [num_layers, num_replicas].

    Raises:
        ValueError: They have another shape or hold other numbers.
    """
    num_experts = as_count("num_experts", num_experts, 1, _abi_balancer.MAX_SLOTS)
    found = as_array(name, table)
    if found.ndim == 1:
        found = found[None]
    if found.ndim != 2 or found.dtype.kind not in "iu" or found.shape[1] == 0:
        raise ValueError(f"{name} is {found.dtype} {list(found.shape)}; it must be integers [num_layers, num_replicas]")
    for layer, slot in np.argwhere((found < -1) | (found >= num_experts))[:1]:
        raise ValueError(
            f"{name} holds numbers from {int(found.min())} to {int(found.max())}; allowed are -1 and experts below "
            f"{num_experts}; layer {layer}, slot {slot} has {found[layer, slot]}"
        )
    return np.array(found, np.int32, order="C")  # a copy: the caller may write over the table


def as_load(load: Any, num_layers: int | None, num_experts: int | None) -> NDArray[np.float64]:
    """Loads as float64 [num_layers, num_experts], which may share memory with what was given.

    Raises:
        ValueError: They have another shape, or are not finite numbers from 0 on.
    """
    found = as_array("load", load)
    if found.ndim == 1:
        found = found[None]
    wanted = f"[{num_layers or 'num_layers'}, {num_experts or 'num_experts'}]"
    differs = found.ndim != 2 or any(
        size is not None and size != came for size, came in zip((num_layers, num_experts), found.shape, strict=True)
    )
    if differs or found.dtype.kind not in "iuf":
        raise ValueError(f"load is {found.dtype} {list(found.shape)}; it must be numbers {wanted}")
    loads: NDArray[np.float64] = np.ascontiguousarray(found, np.float64)
    for layer, expert in np.argwhere(~(np.isfinite(loads) & (loads >= 0)))[:1]:
        raise ValueError(
            f"load of layer {layer}, expert {expert} is {loads[layer, expert]}, allowed are finite numbers from 0 on"
        )
    with np.errstate(over="ignore"):
        sums = loads.sum(axis=1)
    for (layer,) in np.argwhere(~np.isfinite(sums))[:1]:
        raise ValueError(f"the sum of load of layer {layer} is too large")
    return loads


def _sizes(placement: Placement) -> str:
    return f"{placement.num_layers} layers, {placement.num_experts} experts, {placement.num_replicas} slots"
