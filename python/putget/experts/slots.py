"""Which expert, in which version, is in force in each slot of a rank, and which mover may write the slots now."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from putget._arguments import as_count, as_kind, as_list, shown
from putget.experts.blobs import ExpertBlobs

MOVES = "a balancer's moves"
"""The name of a `Mover` that a `Landing` is."""
_TAG = "putget: expert and version"


class Mover:
    """Somebody who writes slots. Two of one name are two."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name


class SlotState(NamedTuple):
    """The state of a slot.

    Attributes:
        expert: the expert whose bytes the slot holds; -1: none.
        version: the version of these bytes; -1: an update is writing them, or has left them half written.
    """

    expert: int
    version: int


class ExpertSlots:
    """The expert slots of one rank, in all layers. The movers that write them share this object.

    Two kinds of movers write slots: a balancer (`Landing`, `Balancer`) and an update of weights
    (``putget_transfer.weights.Rollout(experts=)``). A mover takes the slots before it writes, and gives them back when
    its bytes are whole. One mover has all slots of the rank at a time.

    Each slot has a tag, its expert and version. The tag is a tensor of the expert like its weights (`layers`), so it
    travels with the bytes: an expert that a balancer moves has the version that was in force where it came from.

    The object is local to a rank, and threads may share it.

    Args:
        layers: the experts of each layer, in the placement's order.
        experts: for each layer, the expert of each slot here; -1 for an empty slot.
        version: the version of the weights that the slots hold now.

    Attributes:
        layers: `layers` with the tags, a tuple of `ExpertBlobs`: what a `Landing` and a `HostStore` carry.

    Raises:
        ValueError: An argument is of another form, or `experts` does not fit `layers`.
    """

    def __init__(self, layers: Sequence[ExpertBlobs], experts: Sequence[Sequence[int]], *, version: int = 0) -> None:
        found = [as_kind(f"layers[{index}]", one, ExpertBlobs) for index, one in enumerate(as_list("layers", layers))]
        held = [
            [as_count(f"experts[{index}]", expert, -1, (1 << 31) - 1) for expert in as_list(f"experts[{index}]", one)]
            for index, one in enumerate(as_list("experts", experts))
        ]
        as_count("version", version, 0, (1 << 63) - 1)
        sizes = [blobs.num_slots for blobs in found]
        if not found or [len(one) for one in held] != sizes:
            raise ValueError(f"experts has {[len(one) for one in held]} slots in its layers; layers has {sizes}")
        self._tags = [
            torch.tensor([[expert, version] for expert in one], dtype=torch.int64, device=blobs.device)
            for blobs, one in zip(found, held, strict=True)
        ]
        self.layers = tuple(blobs.with_tensor(_TAG, tag) for blobs, tag in zip(found, self._tags, strict=True))
        self._lock = threading.Lock()
        self._mover: object | None = None
        self._moved = 0

    @property
    def mover(self) -> str | None:
        """The name of the mover that has the slots; None: no mover has them."""
        return _name(self._mover)

    @property
    def moved(self) -> int:
        """How often a mover has given the slots back with other experts in them, on this rank or another one."""
        return self._moved

    def take(self, mover: object) -> str | None:
        """Takes all slots for a mover. A mover that has them keeps them.

        Args:
            mover: a `Mover`, or another object whose ``str`` is its name for errors. Movers that are equal are one.

        Returns:
            None: they are the mover's. Otherwise the name of the mover that has them; nothing has happened.
        """
        with self._lock:
            holder = self._mover  # read once: it may be given back meanwhile
            if holder is None:
                self._mover = holder = mover
            return None if holder == mover else _name(holder)

    def put_in_force(self, mover: object, version: int | None) -> None:
        """Says that all slots hold a version. Returns when the current stream's work is done.

        Args:
            mover: the mover that has the slots.
            version: the version of their bytes; None while they are being written.

        Raises:
            ValueError: Another mover has the slots, or none, or the version is no version.
        """
        word = -1 if version is None else as_count("version", version, 0, (1 << 63) - 1)
        self._require("put_in_force", mover)
        for tag in self._tags:
            tag[:, 1] = word
        device = self._tags[0].device
        if device.type == "cuda":  # the next mover's stream or thread may be another one
            torch.cuda.current_stream(device).synchronize()

    def give_back(self, mover: object, *, moved: bool = False) -> None:
        """Ends what `take` began.

        Args:
            mover: the mover that has the slots.
            moved: whether slots hold other experts than before.

        Raises:
            ValueError: Another mover has the slots, or none.
        """
        self._require("give_back", mover)
        # Without the lock, since finalisers give slots back: the one mover that has the slots changes these alone.
        self._moved += moved
        self._mover = None

    def _require(self, call: str, mover: object) -> None:
        holder = self._mover
        if holder is None or holder != mover:
            raise ValueError(f"{call}: {shown(_name(mover))} came; {shown(_name(holder))} has the slots")

    def in_force(self, layer: int, slot: int) -> SlotState:
        """The expert and version of a slot. On CUDA the call waits for the current stream.

        Raises:
            ValueError: There is no such layer or slot.
        """
        as_count("layer", layer, 0, len(self._tags) - 1)
        as_count("slot", slot, 0, len(self._tags[layer]) - 1)
        return SlotState(*self._tags[layer][slot].tolist())

    def versions(self) -> tuple[int, ...]:
        """The versions that slots with experts hold, ascending: one, where all experts are of one version."""
        found: set[int] = set()
        for tag in self._tags:
            found.update(version for expert, version in tag.tolist() if expert >= 0)
        return tuple(sorted(found))

    def experts(self, layer: int) -> list[int]:
        """The expert of each slot of a layer.

        Raises:
            ValueError: There is no such layer.
        """
        as_count("layer", layer, 0, len(self._tags) - 1)
        return [int(expert) for expert in self._tags[layer][:, 0].tolist()]


def _name(mover: object | None) -> str | None:
    return None if mover is None else str(mover)


def tagged(slots: ExpertSlots, layers: Sequence[ExpertBlobs]) -> list[ExpertBlobs]:
    """The blobs of layers with their tags.

    Raises:
        ValueError: The slots were made for other tensors.
    """
    found = list(as_kind("slots", slots, ExpertSlots).layers)
    theirs: list[list[int]] = [[address for _, address in blobs.parts()][:-1] for blobs in found]
    own = [[address for _, address in blobs.parts()] for blobs in layers]
    if theirs != own:
        raise ValueError("slots were made for other tensors than those of the layers: give ExpertSlots the layers' own")
    return found
