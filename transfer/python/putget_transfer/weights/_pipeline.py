"""Tasks of one version: several are on their way at a time, as far as temporary memory goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from putget_transfer._native import Transfer
from putget_transfer.weights._deltas import Deltas
from putget_transfer.weights._model import UpdateFailed
from putget_transfer.weights._native import Writer
from putget_transfer.weights._prepare import Preparer, Work
from putget_transfer.weights._sources import Ready, Sources
from putget_transfer.weights._staging import Staging, Writes

MOST_SENT = 32
"""Tasks whose writes may be under way when another one begins that takes no memory: the engine has other users, too."""


@dataclass(frozen=True)
class _Begun:
    """A task that is prepared, or is being so.

    Attributes:
        pieces: Where its pieces begin.
        outside: Bytes of other memory that it holds.
        gathers: Parameters that had been brought together when it had begun.
        ready: Where each of its items lies, if nothing has to be prepared.
    """

    number: int
    pieces: list[int]
    outside: int
    gathers: int
    event: Any
    ready: Ready | None = None


class Pipeline:
    """Tasks begin in their order, and are written in their order.

    A task begins as soon as its memory fits beside that of the others: with its prepared bytes until they are written,
    with the rest until it is prepared. On a GPU several are prepared while an earlier one is written. A task with
    deltas is written before the next one begins: how long they are is not known before.
    """

    def __init__(
        self,
        rank: int,
        tasks: Sequence[Any],
        works: Sequence[Work],
        staging: Staging,
        preparer: Preparer,
        writes: Writes,
        writer: Writer,
        deltas: Deltas,
        sources: Sources | None = None,
    ) -> None:
        self.rank, self.sources, self.tasks, self.works, self.staging = rank, sources, tasks, works, staging
        self.preparer, self.writes, self.writer, self.deltas = preparer, writes, writer, deltas
        self.begun: deque[_Begun] = deque()

    def _targets(self, number: int) -> list[int]:
        return [target for target in self.writer.targets(number) if target not in self.writes.report.failed]

    def begin(self, number: int) -> None:
        """Begin with a task, as soon as there is memory for it.

        Raises:
            UpdateFailed: The deadline has come.
        """
        work, room = self.works[number], self.writes.room
        if not self._targets(number):
            self.deltas.skip(number)
            if not any(part.gathered for part in work.parts):
                return
        if self.preparer.whole is not None and not work.uses(self.preparer.whole[0]):
            self.release()
        ready = None if self.sources is None else self.sources.of(number)
        if ready is not None:
            self._in_time(number)
            while len(self.writes.sent) >= MOST_SENT:
                self.writes.end_oldest()
            self.begun.append(_Begun(number, [], 0, self.preparer.gathers, self.preparer.began, ready))
            return self._write_ready()
        while True:
            self._in_time(number)
            kept = self.writes.kept
            outside = max(work.outside - kept, 0)
            pieces = room.take(work.pieces, outside, beside=kept)
            if pieces is not None:
                break
            # Writes are short beside copies from the host; where they are not, those that can begin do so first.
            if self.writes.sent and not (self.begun and _is_over(self.begun[0].event)):
                self.writes.end_oldest()
            else:
                self._write()
        memory = [self.staging.bytes[first : first + count] for first, count in zip(pieces, work.pieces, strict=True)]
        event = self.preparer.prepare(work, memory)
        self.begun.append(_Begun(number, pieces, outside, self.preparer.gathers, event))
        self._write_ready()

    def _in_time(self, number: int) -> None:
        if not self.writes.left():
            where = f"task {number} of {len(self.tasks)}"
            raise UpdateFailed(f"trainer rank {self.rank}: the deadline came before {where}")

    def _write_ready(self) -> None:
        """Submit the writes of those that are prepared, in their order."""
        while self.begun and (self.deltas.kept is not None or _is_over(self.begun[0].event)):
            self._write()

    def release(self) -> None:
        """Give back the parameter that is kept."""
        self.preparer.whole = None
        self.writes.keep(0)

    def flush(self) -> None:
        """Submit the writes of all tasks that have begun."""
        while self.begun:
            self._write()

    def _write(self) -> None:
        """Wait until the oldest task that has begun is prepared, and submit its writes."""
        begun = self.begun.popleft()
        if begun.event is not None:
            begun.event.synchronize()
        task, writes = self.tasks[begun.number], self.writes
        writes.room.give(begun.pieces[1:], begun.outside)
        # A later task that has brought another one together holds it with its own memory, until it is written.
        writes.keep(self.preparer.kept_bytes if self.preparer.gathers == begun.gathers else 0)
        targets = self._targets(begun.number)
        if begun.ready is not None:
            writes.begin(None)
            for target in targets:
                self._submit(begun.number, target, partial(self.writer.write_each, begun.number, target, *begun.ready))
            return
        first = begun.pieces[0]
        writes.begin(first)
        prepared = self.staging.bytes[first : first + task.num_bytes]
        changed = self.deltas.changed(begun.number, task, prepared, targets, self.writer)
        for target in targets:
            if target in changed:
                continue
            self._submit(
                begun.number, target, partial(self.writer.write, begun.number, target, self.staging.handle, first)
            )
        for target, changes in changed.items():
            self.deltas.write(begun.number, target, changes, self.staging, writes)

    def _submit(self, number: int, target: int, write: Callable[[float], Transfer]) -> None:
        """Submit a task's write to one rollout rank."""
        self.writes.write(target, partial(write, self.writes.left()))
        self.writes.report.wrote(target, self.writer.num_bytes(number, target))


def _is_over(event: Any) -> bool:
    return event is None or bool(event.query())
