"""putget's part in a trace of torch's profiler, as engines write it."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

CALLS = ("putget_dispatch", "putget_combine")


@dataclass
class Part:
    """The part of one rank.

    Attributes:
        calls: How often each of CALLS ran.
        share: Their time over that from the trace's first operation to its last one.
    """

    calls: dict[str, int]
    share: float


def part_of(trace: Path) -> Part:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")]
    ours = [event for event in timed if event["name"] in CALLS]
    begin, end = min(event["ts"] for event in timed), max(event["ts"] + event["dur"] for event in timed)
    calls = {name: sum(event["name"] == name for event in ours) for name in CALLS}
    return Part(calls, sum(event["dur"] for event in ours) / (end - begin))


def check_parts(traces: list[Path], num_ranks: int, num_layers: int) -> None:
    """A trace a rank, in which whole rounds ran: as many on each, because their calls belong together."""
    assert len(traces) == num_ranks, traces
    parts = [part_of(trace) for trace in traces]
    print(parts)
    for part in parts:
        dispatches, combines = (part.calls[name] for name in CALLS)
        assert dispatches == combines == parts[0].calls[CALLS[0]] > 0
        assert dispatches % num_layers == 0
        assert 0 < part.share < 1
