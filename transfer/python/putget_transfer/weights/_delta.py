"""Deltas: the changed elements of a task's areas, as runs of indices and values, checked by a digest of the result.

A record is what one task of one trainer rank has for one rollout rank. It lands in a place of its own in the rollout
rank's inbox, and begins with the token of the attempt that it belongs to: a place with another token has no record, and
its task came whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from putget_transfer.weights._native import Schedule

WORD = 8
HEADER, ENTRY = 3, 4
"""Words of a record: token, entries, bytes. Words of an entry: item, runs, elements, digest."""
_MIX, _ADD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


def _integers(flat: Any, width: int) -> Any:
    """Return flat bytes as integers of an element's width."""
    import torch

    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])


def digest(flat: Any) -> int:
    """Return 64 bits that follow from bytes and their places, the same on each device."""
    import torch

    values = flat.to(torch.int64) if flat.dtype != torch.int64 else flat
    places = torch.arange(values.numel(), dtype=torch.int64, device=values.device) * _MIX + _ADD
    mixed = (values + 1) * ((places ^ (places >> 29)) | 1)  # an odd factor loses no bit
    return int((mixed ^ (mixed >> 32)).sum())


class Change:
    """Changed elements of an item."""

    def __init__(self, number: int, width: int, starts: Any, lengths: Any, values: Any, total: int) -> None:
        self.number, self.width, self.total = number, width, total
        self.starts, self.lengths, self.values = starts, lengths, values
        self.num_bytes = _padded(8 * starts.numel()) + _padded(values.numel() * width)

    @classmethod
    def between(cls, number: int, old: Any, new: Any, width: int) -> Change:
        """Compare an item's bytes with those of the version before, bit for bit."""
        import torch

        old, new = _integers(old, width), _integers(new, width)
        places = (old != new).nonzero().flatten()
        first = torch.ones_like(places, dtype=torch.bool)
        first[1:] = places[1:] != places[:-1] + 1
        heads = first.nonzero().flatten()
        ends = torch.cat([heads[1:], heads.new_tensor([places.numel()])]) if heads.numel() else heads
        return cls(
            number, width, places[first].to(torch.int32), (ends - heads).to(torch.int32), new[places], digest(new)
        )

    def words(self) -> list[int]:
        """Return its entry."""
        return [self.number, self.starts.numel(), self.values.numel(), self.total]

    def parts(self) -> Iterable[Any]:
        """Return its flat bytes, padded."""
        import torch

        for tensor in (torch.cat([self.starts, self.lengths]), self.values):
            flat = tensor.contiguous().view(torch.uint8)
            yield flat
            yield flat.new_zeros(_padded(flat.numel()) - flat.numel())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // WORD) * WORD


def size_of(changes: Sequence[Change]) -> int:
    """Return the bytes of a record."""
    return WORD * (HEADER + ENTRY * len(changes)) + sum(change.num_bytes for change in changes)


def write_record(to: Any, token: int, changes: Sequence[Change]) -> None:
    """Write a record into flat bytes of its size."""
    import torch

    words = [token, len(changes), to.numel(), *(word for change in changes for word in change.words())]
    parts = [torch.tensor(words, dtype=torch.int64, device=to.device).view(torch.uint8)]
    parts += [part for change in changes for part in change.parts()]
    to.copy_(torch.cat(parts))


class Unsound(Exception):
    """A record cannot be applied; `sender` is the trainer rank that it came from."""

    sender = -1


def first_entry(count: int) -> int:
    """Return where the runs of a record's first entry begin."""
    return WORD * (HEADER + ENTRY * count)


def read_record(flat: Any, token: int) -> list[tuple[int, ...]] | None:
    """Return item, runs, elements and digest of each entry; None if nothing of this attempt is there.

    Raises:
        Unsound: The record does not fit into its place.
    """
    import torch

    if flat.numel() < WORD * HEADER:
        return None
    found, count, num_bytes = flat[: WORD * HEADER].view(torch.int64).tolist()
    if found != token:
        return None
    at = WORD * (HEADER + ENTRY * count)
    if not (count >= 0 and at <= num_bytes <= flat.numel()):
        raise Unsound(f"{num_bytes} bytes with {count} entries do not fit into {flat.numel()}")
    return [tuple(words) for words in flat[WORD * HEADER : at].view(torch.int64).view(count, ENTRY).tolist()]


def apply_entry(flat: Any, at: int, runs: int, elements: int, values: Any) -> int:
    """Change an item's values, flat integers of its width; return where the next entry begins.

    Raises:
        Unsound: The entry does not fit.
    """
    import torch

    width = values.element_size()
    end = at + _padded(8 * runs) + _padded(elements * width)
    if min(runs, elements) < 0 or end > flat.numel():
        raise Unsound(f"{runs} runs of {elements} elements do not fit")
    numbers = flat[at : at + 8 * runs].view(torch.int32).to(torch.int64)
    starts, lengths = numbers[:runs], numbers[runs:]
    ends = lengths.cumsum(0)
    sound = int(lengths.sum()) == elements and bool((lengths > 0).all())
    if not sound or bool((starts < 0).any() or (starts + lengths > values.numel()).any()):
        raise Unsound("its runs do not fit the item")
    places = torch.arange(elements, dtype=torch.int64, device=flat.device)
    places += (starts - (ends - lengths)).repeat_interleave(lengths)
    first = at + _padded(8 * runs)
    values[places] = flat[first : first + elements * width].view(values.dtype)
    return end


def dests_of(schedule: Schedule, sender: int, rank: int) -> list[list[list[int]]]:
    """Return the slots of a rollout rank that hold a trainer rank's areas: by task and item.

    Where ranks have copies of a shard, an area may be here that another of them sends. A record may change it too: both
    make the same bytes.
    """
    known: dict[tuple[str, str, str], list[tuple[int, list[int], list[int]]]] = {}
    for number, (name, start, size, _, _, _, dtype, recipe) in enumerate(schedule.slots(rank)):
        ends = [first + count for first, count in zip(start, size, strict=True)]
        known.setdefault((name, recipe, dtype), []).append((number, start, ends))
    params = schedule.params

    def dests(item: Any) -> list[int]:
        param, recipe, dtype, start, size, _, _, num_bytes = item
        if not num_bytes:
            return []
        return [
            number
            for number, first, ends in known.get((params[param][0], recipe, dtype), [])
            if all(
                low <= at and at + count <= end for low, end, at, count in zip(first, ends, start, size, strict=True)
            )
        ]

    return [[dests(item) for item in task.items] for task in schedule.tasks(sender)]


Places = dict[tuple[int, int], tuple[int, int]]
"""By trainer rank and task: where a record may lie in the inbox, and how long it may be."""


def places_of(schedule: Schedule, rank: int, num_bytes: int) -> tuple[Places, int]:
    """Divide an inbox of about so many bytes over the tasks that write to a rollout rank, by their bytes."""
    sizes: dict[tuple[int, int], int] = {}
    for sender in schedule.senders(rank):
        tasks = schedule.tasks(sender)
        for number, items in enumerate(dests_of(schedule, sender, rank)):
            own = sum(tasks[number].items[item][7] for item, dests in enumerate(items) if dests)
            if own:
                sizes[sender, number] = own
    total, at, places = sum(sizes.values()), 0, {}
    for key, own in sizes.items():
        length = _padded(num_bytes * own // total)
        places[key] = (at, length)
        at += length
    return places, at


class Kept:
    """The bytes of a trainer rank's last version, by task: what the next one is compared with."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.dests: dict[int, list[list[list[int]]]] = {}
        self.version: int | None = None
        self.bytes: dict[int, Any] = {}

    def changes(self, number: int, task: Any, new: Any, widths: Mapping[str, int]) -> dict[int, Change]:
        """Compare a task's bytes with the kept ones; return what has changed, by item."""
        old = self.bytes[number]
        found = {}
        for at, item in enumerate(task.items):
            first, num_bytes = item[6], item[7]
            if num_bytes:
                part = slice(first, first + num_bytes)
                found[at] = Change.between(at, old[part], new[part], widths[item[2]])
        return found

    def keep(self, number: int, new: Any) -> None:
        """Keep a task's bytes."""
        if number in self.bytes:
            self.bytes[number].copy_(new)
        else:
            self.bytes[number] = new.clone()

    def for_target(self, number: int, target: int, changes: Mapping[int, Change]) -> list[Change]:
        """Return the changes that concern a rollout rank."""
        part = target % self.schedule.replica_size  # all replicas have the same slots
        if part not in self.dests:
            self.dests[part] = dests_of(self.schedule, self.rank, part)
        items = self.dests[part][number]
        return [change for at, change in changes.items() if items[at]]
