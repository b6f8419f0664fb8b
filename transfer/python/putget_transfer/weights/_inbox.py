"""A rollout rank's inbox: memory that records of deltas land in, and what becomes of them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from putget_transfer.weights._delta import (
    Unsound,
    _integers,
    apply_entry,
    dests_of,
    digest,
    first_entry,
    places_of,
    read_record,
)
from putget_transfer.weights._model import Slot
from putget_transfer.weights._native import Schedule


class Inbox:
    """Memory that is divided over the tasks of all trainer ranks that write to this rank.

    Attributes:
        bytes: The memory, flat.
        token: What records of this attempt begin with.
    """

    def __init__(self, schedule: Schedule, rank: int, num_bytes: int, device: Any) -> None:
        import torch

        self.places, total = places_of(schedule, rank, num_bytes)
        self.bytes = torch.zeros(max(total, 1), dtype=torch.uint8, device=device)
        self.token = 0
        senders = {sender for sender, _ in self.places}
        self.tasks = {sender: schedule.tasks(sender) for sender in senders}
        self.dests = {sender: dests_of(schedule, sender, rank) for sender in senders}

    def begin(self) -> int:
        """Begin an attempt; what has landed before counts no more."""
        self.token = secrets.randbits(62) + 1
        return self.token

    def records(self, sender: int) -> list[list[int]]:
        """Return where a trainer rank's records may lie: task, offset and length of each."""
        return [[task, at, length] for (rank, task), (at, length) in self.places.items() if rank == sender]

    def apply(self, slots: Sequence[Slot], memory: Sequence[Any]) -> int:
        """Change the weights in some memory by all records that have come; return how many there were.

        Raises:
            Unsound: A record does not fit, or its result has another digest; its trainer rank is in `sender`.
        """
        count = 0
        for (sender, task), (at, length) in self.places.items():
            record = self.bytes[at : at + length]
            try:
                entries = read_record(record, self.token)
                if entries is None:
                    continue
                count += 1
                first = first_entry(len(entries))
                for entry in entries:
                    if not 0 <= entry[0] < len(self.dests[sender][task]):
                        raise Unsound(f"there is no item {entry[0]}")
                    first = self._change((sender, task), entry, (record, first), slots, memory)
            except Unsound as error:
                error.sender = sender
                raise
        return count

    def _change(
        self,
        key: tuple[int, int],
        entry: Sequence[int],
        place: tuple[Any, int],
        slots: Sequence[Slot],
        memory: Sequence[Any],
    ) -> int:
        """Change an item in all its slots; return where the next entry's runs begin."""
        (sender, task), (item, runs, elements, total), (record, at) = key, entry, place
        _, _, _, start, size, _, _, num_bytes = self.tasks[sender][task].items[item]
        end = at
        for number in self.dests[sender][task][item]:
            slot = slots[number]
            width = num_bytes
            for one in size:
                width //= max(one, 1)
            offset = slot.offset + sum(
                (first - own) * stride for first, own, stride in zip(start, slot.start, slot.strides, strict=True)
            )
            flat = memory[slot.memory]
            view = flat.as_strided((*size, width), (*slot.strides, 1), flat.storage_offset() + offset)
            packed = view.contiguous().view(-1)
            values = _integers(packed, width)
            end = apply_entry(record, at, runs, elements, values)
            if digest(values) != total:
                raise Unsound(f"the result for {slot.name!r} has another digest")
            if packed.data_ptr() != view.data_ptr():
                view.copy_(packed.view(view.shape))
        return end
