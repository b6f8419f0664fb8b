"""Reports of an update's times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass
class Report:
    """The times of publishing a version on one trainer rank.

    Attributes:
        version: The version.
        rank: The trainer rank.
        num_bytes: Bytes that were written.
        num_writes: Writes, each counted once by its rollout rank.
        seconds: All of it.
        gather_s: Bringing parameters together, and copying from the host to the device.
        prepare_s: Slicing, rounding and quantising.
        write_s: Time in which something was under way on the network.
        wait_s: Time in which nothing could be prepared, for want of room below the watermark.
        barrier_s: Waiting for the other trainer ranks.
        peak_bytes: The most memory that held prepared bytes.
        failed: Rollout ranks that could not be written to, and why.
        delta_bytes: Those of the bytes that were records of deltas.
        num_deltas: Tasks that went as a delta, counted for each rollout rank.
        whole: Rollout ranks that got a version whole though a delta was asked for, and why.
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
