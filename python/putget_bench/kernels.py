"""Which kernels a round of a contender launches, and how long each takes, by torch's profiler (CUPTI)."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from putget_bench.contender import Contender
from putget_bench.timing import capture

ROUNDS = 20
Interval = tuple[str, float, float]  # a kernel's name, its start and its end in us on this rank's own clock


def intervals(contender: Contender, cuda_graph: bool) -> list[Interval]:
    """When everything ran that some rounds put on this rank's GPU, by start. Collective.

    The rounds follow each other without barriers. With a graph the host does not hold a rank back, so that what a
    kernel waits for is the link and not another rank's launches; but the first one waits for the slowest rank's
    profiler.
    """
    from torch.profiler import ProfilerActivity, profile

    def rounds() -> None:
        for _ in range(ROUNDS):
            contender.dispatch()
            contender.write_rows()
            contender.combine()

    run = capture(rounds) if cuda_graph else rounds
    run()
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    dist.barrier()
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(found, key=lambda interval: interval[1])


def breakdown(contender: Contender, cuda_graph: bool) -> list[dict[str, Any]]:
    """Calls and times of all kernels of some rounds, the most time first. Collective; see ``intervals``.

    What the first kernel waits for is in its mean and not in its median.
    """
    return by_kernel(intervals(contender, cuda_graph))


def by_kernel(found: list[Interval]) -> list[dict[str, Any]]:
    """Calls and times of each kernel, the most time first."""
    times: dict[str, list[float]] = {}
    for name, start, end in found:
        times.setdefault(name, []).append(end - start)
    return [
        {"name": name, "calls": len(taken), "mean_us": sum(taken) / len(taken), "median_us": median(taken)}
        for name, taken in sorted(times.items(), key=lambda item: -sum(item[1]))
        if sum(taken) > 0
    ]


def of_one_round(found: list[Interval]) -> list[Interval]:
    """The kernels of a round in the middle, from its first kernel's start on; none where rounds differ in kernels."""
    count, rest = divmod(len(found), ROUNDS)
    if rest or not count:
        return []
    chosen = found[count * (ROUNDS // 2) : count * (ROUNDS // 2 + 1)]
    return [(name, start - chosen[0][1], end - chosen[0][1]) for name, start, end in chosen]
