"""From one placement to another in batches, each of which leaves every expert somewhere and fits the landing areas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from putget import _abi_balancer
from putget._arguments import as_count, as_kind
from putget.balancer.placement import Ints, Placement

Loads = NDArray[np.float64]
MOST_PUTS = 256  # of a rank in one batch
_DIGITS = 6  # behind the point, of loads that are scaled to a mean of 1 for a rank


@dataclass(frozen=True)
class Transfer:
    """An expert that comes into a slot, from another rank's slot. Slots are those of all ranks."""

    layer: int
    src: int
    dst: int


@dataclass(frozen=True)
class Batch:
    """Changes that come into force at once.

    Attributes:
        transfers: the experts that come.
        slots: int32 [num_layers, num_replicas]: the experts of all slots behind it.
        layers: those that change, ascending.
    """

    transfers: tuple[Transfer, ...]
    slots: Ints
    layers: tuple[int, ...]


def batches(
    current: Placement,
    target: Placement,
    num_gpus: int,
    cells: int,
    order: Sequence[int] | None = None,
    load: Loads | None = None,
) -> Iterator[Batch]:
    """Plans how `current` becomes `target`.

    Experts whose rank keeps them stay in their slots, so the result may differ from `target` in the order of a rank's
    slots. A second replica on a rank that has the expert already is left out. Every batch takes experts from slots that
    held them before it. Behind every batch each expert has a slot: an expert that would lose its last one gets its new
    slot in the same batch. The same arguments give the same batches on every rank.

    With a load, no batch makes a layer less even for it: changes that would are taken in another order, or together. A
    change for which there is no such batch is left out.

    Args:
        current: the placement in force.
        target: the wanted one, of the same sizes; slots that are empty in it are empty in `current` too.
        num_gpus: ranks.
        cells: the most experts that come to one rank in a batch.
        order: layers, the most urgent first, others stay as they are; 0, 1, ... if None.
        load: float64 [num_layers, num_experts], or None.

    Raises:
        ValueError: The placements differ in size, or a number is out of range.
    """
    before = as_kind("current", current, Placement).physical_to_logical
    wanted = as_kind("target", target, Placement).physical_to_logical
    num_gpus = as_count("num_gpus", num_gpus, 1, _abi_balancer.MAX_GPUS)
    cells = as_count("cells", cells, 0, 1 << 20)
    if before.shape != wanted.shape or before.shape[1] % num_gpus or cells < 1:
        raise ValueError(
            f"current has slots {list(before.shape)}, target {list(wanted.shape)}; they must be alike, and divide by "
            f"num_gpus, {num_gpus}; cells is {cells}, allowed are numbers from 1 on"
        )
    weights = [None if load is None else load[layer] for layer in range(len(before))]
    layers = range(len(before)) if order is None else order
    changes = {layer: _LayerChanges(before[layer], wanted[layer], num_gpus, weights[layer]) for layer in layers}
    return _batches(before, changes, num_gpus, cells)


def _batches(before: Ints, changes: dict[int, _LayerChanges], num_gpus: int, cells: int) -> Iterator[Batch]:
    slots = before.copy()
    while left := sum(len(one.pending) for one in changes.values()):
        room = np.full(num_gpus, cells)
        puts = np.zeros(num_gpus, np.int64)
        found: list[Transfer] = []
        changed = []
        for layer, one in changes.items():
            taken = one.fill_evenly(room, puts)
            if taken:
                found += [Transfer(layer, src, dst) for src, dst in taken]
                changed.append(layer)
                slots = slots.copy()
                slots[layer] = one.slots
        if found:
            yield Batch(tuple(found), slots, tuple(sorted(changed)))
        elif left == sum(len(one.pending) for one in changes.values()):
            return  # the rest comes from nowhere: its slots keep what they have


class _LayerChanges:
    """The slots of one layer that get another expert.

    Attributes:
        slots: [num_slots] experts behind the batches so far.
        pending: slots that are to change.
    """

    def __init__(self, before: Ints, wanted: Ints, num_gpus: int, weight: NDArray[np.float64] | None) -> None:
        self.slots = before.copy()
        # Scaled, so that the mean rank has 1: rounding hides what the order of a sum does.
        total = 0.0 if weight is None else float(weight.sum())
        self._weight = None if weight is None else weight * (num_gpus / total) if total > 0 else None
        self._each = len(before) // num_gpus
        self._wanted = self._keeping(before, wanted)
        self.pending: list[int] = np.flatnonzero(self._wanted != before).tolist()
        most = int(max(before.max(), wanted.max())) + 1
        self._count = np.bincount(before[before >= 0], minlength=most if weight is None else len(weight))

    def _keeping(self, before: Ints, wanted: Ints) -> Ints:
        """The wanted experts, in an order of each rank's slots that leaves what stays where it is."""
        result: Ints = before.copy()
        for first in range(0, len(before), self._each):
            rank = slice(first, first + self._each)
            held, coming = before[rank].tolist(), wanted[rank].tolist()
            free = []
            for slot, expert in enumerate(held):
                if expert in coming:
                    coming.remove(expert)
                else:
                    free.append(slot)
            for slot, expert in zip(free, coming, strict=True):
                is_new = expert >= 0 and expert not in held and expert not in result[rank].tolist()
                if is_new:
                    result[first + slot] = expert
        return result

    def fill_evenly(self, room: NDArray[np.int64], puts: NDArray[np.int64]) -> list[tuple[int, int]]:
        """`fill`, as far as the layer becomes no less even.

        If nothing of the changes in their order is so, those that help most by themselves go first.
        """
        if self._weight is None or not self.pending:
            return self.fill(room, puts)
        taken = self._fill_best(list(self.pending), room, puts)
        if not taken and self.pending:
            taken = self._fill_best(self._helping_first(room, puts), room, puts)
        return taken

    def _fill_best(self, order: list[int], room: NDArray[np.int64], puts: NDArray[np.int64]) -> list[tuple[int, int]]:
        """As many of the changes, in this order, as leave the layer most even; none if all leave it less so."""
        start = best = self._save(room, puts)
        least, found = self._unevenness(), []
        for taken in self._filled(order, room, puts):
            now = self._unevenness()
            if now < least or (not self.pending and now[0] <= least[0]):
                least, found, best = now, list(taken), self._save(room, puts)
        self._restore(best if found else start, room, puts)
        return found

    def _helping_first(self, room: NDArray[np.int64], puts: NDArray[np.int64]) -> list[int]:
        """The pending changes by what each does alone."""
        scores = []
        for slot in list(self.pending):
            start = self._save(room, puts)
            done = next(self._filled([slot], room, puts), None)
            scores.append((*(self._unevenness() if done else (np.inf, np.inf)), slot))
            self._restore(start, room, puts)
        return [slot for *_, slot in sorted(scores)]

    def _unevenness(self) -> tuple[float, float]:
        """The largest load of a rank, and the sum of their squares; less is more even."""
        share = np.append(np.asarray(self._weight) / np.maximum(self._count, 1), 0.0)  # the last one: empty slots
        sums = share[self.slots].reshape(-1, self._each).sum(axis=1)
        return round(float(sums.max()), _DIGITS), round(float(sums @ sums), _DIGITS)

    def _save(self, room: NDArray[np.int64], puts: NDArray[np.int64]) -> list[NDArray[Any]]:
        pending = np.array(self.pending, np.int64)
        return [one.copy() for one in (self.slots, self._wanted, self._count, pending, room, puts)]

    def _restore(self, saved: list[NDArray[Any]], room: NDArray[np.int64], puts: NDArray[np.int64]) -> None:
        self.slots, self._wanted, self._count = (one.copy() for one in saved[:3])
        self.pending = saved[3].tolist()
        room[:], puts[:] = saved[4:]

    def fill(self, room: NDArray[np.int64], puts: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Takes what fits into a batch: pairs of the slot that an expert comes from and the one that it comes into.

        Args:
            room: [num_gpus] experts that may still come to each rank; what is taken is subtracted.
            puts: [num_gpus] experts that each rank gives; what is taken is added.
        """
        taken: list[tuple[int, int]] = []
        for taken in self._filled(list(self.pending), room, puts):  # noqa: B007  (the last one)
            pass
        return taken

    def _filled(
        self, order: list[int], room: NDArray[np.int64], puts: NDArray[np.int64]
    ) -> Iterator[list[tuple[int, int]]]:
        """Yields the moves taken so far, after each change that fits."""
        held = self.slots.copy()  # sources are what stood there before the batch
        taken: list[tuple[int, int]] = []
        for slot in order:
            if slot not in self.pending or room[slot // self._each] == 0:
                continue
            chain = self._chain(slot, room)
            if chain is None:
                continue
            sources = self._sources(chain, held, puts)
            if sources is None:
                continue
            for src, dst in zip(sources, chain, strict=True):
                self._replace(dst)
                room[dst // self._each] -= 1
                taken.append((src, dst))
            yield taken

    def _chain(self, slot: int, room: NDArray[np.int64]) -> list[int] | None:
        """Slots that change together: none but the last loses an expert's last slot. None where there is no room."""
        chain: list[int] = []
        ranks: list[int] = []
        while True:
            rank = slot // self._each
            if rank in ranks:  # a circle: what comes here takes the place of what leaves here
                first = ranks.index(rank)
                one = chain[first]
                self._wanted[one], self._wanted[slot] = self._wanted[slot], self._wanted[one]
                return chain[first:]
            if room[rank] == 0:
                return None
            chain.append(slot)
            ranks.append(rank)
            lost = int(self.slots[slot])
            if lost < 0 or self._count[lost] > 1:
                return chain
            following = [other for other in self.pending if self._wanted[other] == lost]
            if not following:  # nobody gets it, so it stays
                self._wanted[slot] = lost
                self.pending.remove(slot)
                return None
            slot = following[0]

    def _sources(self, chain: list[int], held: Ints, puts: NDArray[np.int64]) -> list[int] | None:
        """For each slot of a chain, where its expert comes from: of several, the rank that gives the fewest."""
        counts = puts.copy()
        sources = []
        for dst in chain:
            holders = [
                int(slot)
                for slot in np.flatnonzero(held == self._wanted[dst])
                if slot // self._each != dst // self._each and counts[slot // self._each] < MOST_PUTS
            ]
            if not holders:
                return None
            sources.append(min(holders, key=lambda slot: (counts[slot // self._each], slot)))
            counts[sources[-1] // self._each] += 1
        puts[:] = counts
        return sources

    def _replace(self, slot: int) -> None:
        old, new = int(self.slots[slot]), int(self._wanted[slot])
        if old >= 0:
            self._count[old] -= 1
        self._count[new] += 1
        self.slots[slot] = new
        self.pending.remove(slot)
