"""Memory for prepared bytes, and the writes that are under way from it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from putget_transfer._native import Engine, EngineError, MrHandle, Transfer
from putget_transfer.weights._report import Report

CALLBACK_S = 10.0
"""How long the callback of a write that has ended may take, before a report goes without it."""


class Staging:
    """A ring of registered memory: what was taken first comes back first.

    `num_bytes` is the watermark, or the longest task where that is longer: such a task runs alone.
    """

    def __init__(self, engine: Engine, num_bytes: int, device: Any) -> None:
        import torch

        self.num_bytes = max(num_bytes, 1)
        if torch.device(device).type == "cpu":
            # Memory of the engine travels fastest over `host`.
            self.handle: MrHandle = engine.alloc_mr(self.num_bytes)[0]
            raw = (ctypes.c_uint8 * self.num_bytes).from_address(self.handle.address)
            self.bytes = torch.frombuffer(raw, dtype=torch.uint8)
        else:
            self.bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
            self.handle = engine.reg_mr(self.bytes)[0]


class _Sent:
    """A task's bytes and its writes."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.transfers: list[tuple[int, Transfer]] = []


class Writes:
    """The writes of one version."""

    def __init__(self, staging: Staging, report: Report, deadline: float) -> None:
        self.staging, self.report, self.deadline = staging, report, deadline
        self.sent: deque[_Sent] = deque()
        self.next = 0
        self.lock = threading.Condition()
        self.running, self.since = 0, 0.0

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return max(self.deadline - time.monotonic(), 0.0)

    def room(self, num_bytes: int) -> int:
        """Take so many bytes of the ring, as soon as writes from them are over; return where they begin."""
        if not self.sent:
            self.next = 0
        while True:
            oldest = self.sent[0].first if self.sent else None
            first = self.next
            if oldest is None or first > oldest:
                if first + num_bytes <= self.staging.num_bytes:
                    break
                if oldest is not None and num_bytes < oldest:
                    first = 0
                    break
            elif first + num_bytes < oldest:
                break
            self.end_oldest()
            if not self.sent:
                self.next = 0
        self.next = first + num_bytes
        self.sent.append(_Sent(first, first + num_bytes))
        held = sum(sent.end - sent.first for sent in self.sent)
        self.report.peak_bytes = max(self.report.peak_bytes, held)
        return first

    def write(self, target: int, submit: Callable[[], Transfer]) -> None:
        """Submit a write from the newest bytes."""
        if target in self.report.failed:
            return
        try:
            transfer = submit()
        except EngineError as error:
            self.report.failed[target] = str(error)
            return
        with self.lock:
            if not self.running:
                self.since = time.perf_counter()
            self.running += 1
        self.sent[-1].transfers.append((target, transfer))
        transfer.add_done_callback(self._over)

    def _over(self, _error: Any) -> None:
        with self.lock:
            self.running -= 1
            if not self.running:
                self.report.ran("write", self.since, time.perf_counter())
                self.lock.notify_all()

    def end_oldest(self) -> None:
        """Wait for the writes of the oldest task."""
        begin = time.perf_counter()
        for target, transfer in self.sent[0].transfers:
            try:
                transfer.wait()  # it ends at its deadline, and grace, at the latest
            except EngineError as error:
                self.report.failed.setdefault(target, str(error))
        self.sent.popleft()
        self.report.ran("wait", begin, time.perf_counter())

    def end(self) -> None:
        """Wait for all of them."""
        while self.sent:
            self.end_oldest()
        with self.lock:  # all have ended; their callbacks may still run
            self.lock.wait_for(lambda: not self.running, CALLBACK_S)

    def cancel(self) -> None:
        """Call back what is under way, and wait for its end."""
        for sent in self.sent:
            for _, transfer in sent.transfers:
                transfer.cancel()
        self.end()
