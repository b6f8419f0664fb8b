"""The cost of agreeing on each pass (``putget.lockstep``), on this machine's CPUs.

    python3 benchmarks/lockstep.py --ranks 4 --passes 2000

- *say*: a rank with work says that it begins: from the call to its end.
- *wake*: from that call to the moment when a rank that slept knows of it, the slowest one of each pass.

Medians and 99th percentiles, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

import putget
from putget.lockstep import Lockstep

_PAUSE_S = 0.001  # between two passes, so that the others sleep


def run_rank(rank: int, ranks: int, passes: int, folder: str, found: Any) -> None:
    """Rank 0 begins all passes; the others sleep until it does."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    comm = putget.Communicator()
    step = Lockstep(comm)
    times: list[tuple[int, int]] = []
    for number in range(passes):
        if rank == 0:
            time.sleep(_PAUSE_S)
            began = time.monotonic_ns()
            step.begin()
            times.append((began, time.monotonic_ns()))
        else:
            while step.begun() is None:
                step.wait(None, 1.0)
            times.append((time.monotonic_ns(), 0))
        step.end(was_idle=rank > 0)
        if number % 64 == 63:
            comm.exchange("behind", number, 60.0)  # nobody falls far behind
    found.put((rank, times))
    step.close()
    comm.close()
    dist.destroy_process_group()


def summary(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(values)
    return {"p50_us": statistics.median(ordered), "p99_us": ordered[int(0.99 * (len(ordered) - 1))]}


def main() -> None:
    """Starts the ranks, and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, metavar="N")
    parser.add_argument("--passes", type=int, default=2000, metavar="N")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, args.ranks, args.passes, folder, found))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        times = dict(found.get() for _ in ranks)
        for process in ranks:
            process.join()
    said = [(end - begin) / 1e3 for begin, end in times[0]]
    woken = [
        max(times[rank][number][0] for rank in range(1, args.ranks)) - begin
        for number, (begin, _) in enumerate(times[0])
    ]
    report = {"ranks": args.ranks, "say": summary(said), "wake": summary([one / 1e3 for one in woken])}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
