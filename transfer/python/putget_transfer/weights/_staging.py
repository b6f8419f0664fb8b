"""Memory for all temporary bytes of an update, and the writes that are under way from it."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from putget_transfer._native import Engine, EngineError, MrHandle, Transfer
from putget_transfer.weights._report import Report

ALIGNMENT = 256
"""Pieces begin at multiples of it."""


def padded(num_bytes: int) -> int:
    """Return the bytes that a piece takes; each takes some."""
    return max(-(-num_bytes // ALIGNMENT), 1) * ALIGNMENT


class Room:
    """Pieces of some memory, and other memory, whose sum stays within a limit; what needs more is alone.

    Attributes:
        num_bytes: The memory that pieces lie in.
        limit: The most bytes of pieces and other memory, unless something is alone.
        held: The bytes that are held now.
        peak: The most bytes that were held.
    """

    def __init__(self, num_bytes: int, limit: int) -> None:
        self.num_bytes, self.limit = num_bytes, limit
        self.held = self.peak = 0
        self.used: list[tuple[int, int]] = []

    def take(self, pieces: Sequence[int], outside: int = 0, *, beside: int = 0) -> list[int] | None:
        """Take pieces and other memory; return where the pieces begin, or None if they do not fit now.

        `beside` bytes are held by what goes on while this does: they leave it alone.
        """
        total = sum(map(padded, pieces)) + outside
        if self.held > beside and self.held + total > self.limit:
            return None
        before, found = list(self.used), []
        for num_bytes in pieces:
            first = self._gap(padded(num_bytes))
            if first is None:
                self.used = before
                return None
            found.append(first)
        self.held += total
        self.peak = max(self.peak, self.held)
        return found

    def _gap(self, num_bytes: int) -> int | None:
        """Take the first gap that is long enough."""
        first = 0
        for at, (begin, end) in enumerate(self.used):
            if begin - first >= num_bytes:
                self.used.insert(at, (first, first + num_bytes))
                return first
            first = end
        if self.num_bytes - first < num_bytes:
            return None
        self.used.append((first, first + num_bytes))
        return first

    def hold(self, num_bytes: int) -> None:
        """Hold so many bytes of other memory more, or less."""
        self.held += num_bytes
        self.peak = max(self.peak, self.held)

    def give(self, pieces: Sequence[int], outside: int = 0) -> None:
        """Give pieces back, by where they begin, and other memory."""
        gone = set(pieces)
        self.held -= sum(end - begin for begin, end in self.used if begin in gone) + outside
        self.used = [(begin, end) for begin, end in self.used if begin not in gone]


class Staging:
    """Registered memory for an update's pieces: prepared bytes, and parts of parameters that come to the device.

    Args:
        engine: The engine that writes.
        num_bytes: Bytes of memory.
        limit: The most temporary memory, unless a task is alone.
        device: Where it lies.
    """

    def __init__(self, engine: Engine, num_bytes: int, limit: int, device: Any) -> None:
        import torch

        self.num_bytes, self.limit = padded(num_bytes), limit
        if torch.device(device).type == "cpu":
            # Memory of the engine travels fastest over `host`.
            self.handle: MrHandle = engine.alloc_mr(self.num_bytes)[0]
            raw = (ctypes.c_uint8 * self.num_bytes).from_address(self.handle.address)
            self.bytes: Any = torch.frombuffer(raw, dtype=torch.uint8)
        else:
            self.bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
            self.handle = engine.reg_mr(self.bytes)[0]

    def close(self, engine: Engine) -> None:
        """Give the memory back."""
        self.bytes = None
        engine.dereg_mr(self.handle)

    def room(self) -> Room:
        """Return all of it, free."""
        return Room(self.num_bytes, self.limit)


class _Sent:
    """A piece with prepared bytes, or none where they lie elsewhere, and its writes."""

    def __init__(self, piece: int | None) -> None:
        self.piece = piece
        self.transfers: list[tuple[int, float, Transfer]] = []
        """Rollout rank, time of the submission, and the write."""


class Writes:
    """The writes of one version, and the memory that they come from.

    Attributes:
        room: The memory.
        kept: Bytes of it that are held from one task to the next.
    """

    def __init__(self, staging: Staging, report: Report, deadline: float) -> None:
        self.room, self.report, self.deadline = staging.room(), report, deadline
        self.sent: deque[_Sent] = deque()
        self.since: float | None = None
        self.until = 0.0
        """From `since` to `until` something was under way without a gap, as far as writes have been waited for."""
        self.kept = 0

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return max(self.deadline - time.monotonic(), 0.0)

    def keep(self, num_bytes: int) -> None:
        """Note how many bytes are held from now on, until the next call."""
        self.room.hold(num_bytes - self.kept)
        self.kept = num_bytes

    def begin(self, piece: int | None) -> None:
        """Begin with the writes of prepared bytes. Their piece, if they have one, is given back when these are over."""
        self.sent.append(_Sent(piece))

    def piece(self, num_bytes: int) -> int:
        """Take a piece, as soon as writes from others are over, and begin with its writes; return where it begins."""
        while (found := self.room.take([num_bytes], beside=self.kept)) is None:
            self.end_oldest()
        self.begin(found[0])
        return found[0]

    def write(self, target: int, submit: Callable[[], Transfer]) -> None:
        """Submit a write from the newest bytes."""
        if target in self.report.failed:
            return
        begun = time.perf_counter()
        try:
            # One call of C: an interrupt comes before it or behind it, so no write is under way that is not known here.
            self.sent[-1].transfers.extend(zip((target,), (begun,), iter(submit, None), strict=False))
        except EngineError as error:
            self.report.failed[target] = str(error)

    def _ran(self, begin: float, end: float) -> None:
        """Note a write that has ended; they come in the order in which they have begun."""
        if self.since is None or begin > self.until:
            self._note()
            self.since = begin
        self.until = max(self.until, end)

    def _note(self) -> None:
        """Tell the report of the time until now."""
        if self.since is not None:
            self.report.ran("write", self.since, self.until)
        self.since = None

    def end_oldest(self) -> None:
        """Wait for the writes of the oldest bytes, and give their piece back."""
        begin = time.perf_counter()
        for target, begun, transfer in self.sent[0].transfers:
            try:
                transfer.wait()  # it ends at its deadline, and grace, at the latest
            except EngineError as error:
                self.report.failed.setdefault(target, str(error))
            since_end = transfer.seconds_since_end or 0.0  # before the clock: another thread may run between the two
            self._ran(begun, time.perf_counter() - since_end)
        piece = self.sent.popleft().piece
        if piece is not None:
            self.room.give([piece])
        self.report.ran("wait", begin, time.perf_counter())

    def end(self) -> None:
        """Wait for all of them."""
        while self.sent:
            self.end_oldest()
        self._note()

    def cancel(self) -> None:
        """Call back what is under way, and wait for its end."""
        for sent in self.sent:
            for *_, transfer in sent.transfers:
                transfer.cancel()
        self.end()
