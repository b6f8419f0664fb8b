"""Which kernels a round of a contender launches, and how long each takes, by torch's profiler (CUPTI)."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from putget_bench.contender import Contender
from putget_bench.timing import capture

_ROUNDS = 20


def breakdown(contender: Contender, cuda_graph: bool) -> list[dict[str, Any]]:
    """Calls and times of everything that runs on this rank's GPU in some rounds, the most time first. Collective.

    The rounds follow each other without barriers. With a graph the host does not hold a rank back, so that what a
    kernel waits for is the link and not another rank's launches; but the first one waits for the slowest rank's
    profiler, which is in its mean and not in its median.
    """
    from torch.profiler import ProfilerActivity, profile

    def rounds() -> None:
        for _ in range(_ROUNDS):
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
    times: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return [
        {"name": name, "calls": len(taken), "mean_us": sum(taken) / len(taken), "median_us": median(taken)}
        for name, taken in sorted(times.items(), key=lambda item: -sum(item[1]))
        if sum(taken) > 0
    ]
