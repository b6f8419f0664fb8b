"""The trainers' side of deltas in one version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from putget_transfer._native import Engine
from putget_transfer.weights._delta import Change, Kept, size_of, write_record
from putget_transfer.weights._native import Writer
from putget_transfer.weights._offer import Delta
from putget_transfer.weights._staging import Staging, Writes


class Deltas:
    """Which rollout ranks get changes, and the kept bytes that these come from.

    Attributes:
        refused: Rollout ranks that get the version whole though changes were asked for, and why.
    """

    def __init__(
        self, kept: Kept | None, engine: Engine, since: int | None, offers: Mapping[int, Delta | None]
    ) -> None:
        self.kept, self.engine = kept, engine
        self.offers: dict[int, Delta] = {}
        self.refused: dict[int, str] = {}
        for target, offer in offers.items() if since is not None and kept is not None else ():
            assert kept is not None
            if kept.version != since:
                self.refused[target] = f"version {since} came as the base; this rank keeps {kept.version}"
            elif offer is None or offer.base != since:
                base = "no version that changes apply to" if offer is None else f"version {offer.base}"
                self.refused[target] = f"version {since} came as the base; rollout rank {target} holds {base}"
            else:
                self.offers[target] = offer
        if kept is not None:
            kept.version = None  # until all of this version is kept

    def kept_all(self, version: int) -> None:
        """Note that the kept bytes are those of a version."""
        if self.kept is not None:
            self.kept.version = version

    def skip(self, number: int) -> None:
        """Forget a task that goes nowhere in this version."""
        if self.kept is not None:
            self.kept.bytes.pop(number, None)

    def changed(
        self, number: int, task: Any, new: Any, targets: Sequence[int], writer: Writer
    ) -> dict[int, list[Change]]:
        """Return the changes of a task for rollout ranks to which they are less than all, and keep its bytes."""
        found: dict[int, list[Change]] = {}
        if self.kept is None:
            return found
        wanted = [target for target in targets if target in self.offers and number in self.offers[target].records]
        if wanted and number in self.kept.bytes:
            changes = self.kept.changes(number, task, new, _Widths())
            for target in wanted:
                own = self.kept.for_target(number, target, changes)
                most = min(self.offers[target].records[number][1], task.num_bytes, writer.num_bytes(number, target) - 1)
                if size_of(own) <= most:
                    found[target] = own
        self.kept.keep(number, new)
        _settle(new)  # the bytes may be used again as soon as their writes are over
        return found

    def write(self, number: int, target: int, changes: Sequence[Change], staging: Staging, writes: Writes) -> None:
        """Write a record of changes to a rollout rank, which counts it as it counts the whole task."""
        offer = self.offers[target]
        num_bytes = size_of(changes)
        first = writes.piece(num_bytes)
        record = staging.bytes[first : first + num_bytes]
        write_record(record, offer.token, changes)
        _settle(record)
        submit = partial(
            self.engine.submit_single_write,
            num_bytes,
            offer.imm,
            (staging.handle, first),
            (offer.desc, offer.records[number][0]),
            deadline_s=writes.left(),
        )
        writes.write(target, submit)
        report = writes.report
        report.wrote(target, num_bytes)
        report.num_deltas += 1
        report.delta_bytes += num_bytes


def _settle(memory: Any) -> None:
    """Wait until a GPU has done what was ordered so far: the engine copies on streams of its own."""
    import torch

    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()


class _Widths(dict[str, int]):
    """Bytes of an element, by torch's name of its type."""

    def __missing__(self, name: str) -> int:
        import torch

        self[name] = int(getattr(torch, name).itemsize)
        return self[name]
