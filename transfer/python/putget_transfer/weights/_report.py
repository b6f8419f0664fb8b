"""Reports of an update's times."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

JOINED = 0.01
"""Spans of a stage are joined where the gap is less than this share of the time so far: a report stays short."""


@dataclass
class Report:
    """The times of publishing a version on one trainer rank.

    Attributes:
        version: The version.
        rank: The trainer rank.
        num_bytes: Bytes that were written.
        num_writes: Writes, each counted once by its rollout rank.
        seconds: All of it.
        gather_s: Bringing parameters together, and copying from the host to the device (by the GPU's own clock).
        prepare_s: Slicing, rounding and quantising (on a GPU by its own clock).
        write_s: Time in which something was under way on the network.
        wait_s: Time in which nothing could begin, for want of room below the watermark.
        barrier_s: Waiting for the other trainer ranks.
        peak_bytes: The most temporary memory: parts on their way, parameters that are brought together, prepared bytes.
        failed: Rollout ranks that could not be written to, and why.
        delta_bytes: Those of the bytes that were records of deltas.
        num_deltas: Tasks that went as a delta, counted for each rollout rank.
        whole: Rollout ranks that got a version whole though a delta was asked for, and why.
        received: Bytes that each rollout rank was sent, by rank.
        spans: When stages ran: name, begin and end, in seconds from the begin of `publish`.
    """

    version: int
    rank: int
    num_bytes: int = 0
    num_writes: int = 0
    seconds: float = 0.0
    gather_s: float = 0.0
    prepare_s: float = 0.0
    write_s: float = 0.0
    wait_s: float = 0.0
    barrier_s: float = 0.0
    peak_bytes: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    delta_bytes: int = 0
    num_deltas: int = 0
    whole: dict[int, str] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Take the time."""
        self.begun = time.perf_counter()
        self._last: dict[str, int] = {}

    def ran(self, stage: str, begin: float, end: float) -> None:
        """Note that a stage ran (gather, prepare, write, wait, barrier), between two times of `perf_counter`."""
        name = f"{stage}_s"
        setattr(self, name, getattr(self, name) + end - begin)
        begin, end = begin - self.begun, end - self.begun
        last = self._last.get(stage)
        if last is not None and begin - self.spans[last][2] <= JOINED * end:
            self.spans[last] = (stage, self.spans[last][1], max(end, self.spans[last][2]))
        else:
            self._last[stage] = len(self.spans)
            self.spans.append((stage, begin, end))

    def wrote(self, target: int, num_bytes: int) -> None:
        """Note a write to a rollout rank."""
        self.num_writes += 1
        self.num_bytes += num_bytes
        self.received[target] = self.received.get(target, 0) + num_bytes

    @property
    def overlap(self) -> float:
        """How many stages ran at a time, on average: 1 is one after the other."""
        busy = self.gather_s + self.prepare_s + self.write_s + self.barrier_s
        return busy / self.seconds if self.seconds else 0.0

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps({**asdict(self), "overlap": self.overlap})


def metrics_text(side: str, totals: Mapping[str, int]) -> str:
    """Return counters as text for Prometheus."""
    lines = []
    for name, value in totals.items():
        full = f"putget_weights_{side}_{name}_total"
        lines += [f"# TYPE {full} counter", f"{full} {value}"]
    return "\n".join(lines) + "\n"
