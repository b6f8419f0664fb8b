"""From experts to slots: what the mapping costs in the router's kernel, and as a kernel of its own.

    python benchmarks/replica_choice.py --output_file choice.json

One GPU stands for one rank. The router has the shape of DeepSeek-V3's: 256 experts in 8 groups, 8 of a token. Slots
are checked against the CPU's before anything is timed. A figure is the time of one call in a CUDA graph of many, with
nothing in between. The ways are timed in turns, so that all of them see the same clocks; the table has medians, and
what each way adds to the router alone. On the CPU (--device cpu) it runs too: that checks this program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from putget.balancer import Placement, ReplicaChoice, rebalance
from putget.moe import GroupLimitedRouting
from putget.moe.router import Placing
from putget_bench import environment
from putget_bench.timing import capture

EXPERTS, TOP_K = 256, 8
WAYS = ("nearest", "round_robin", "hash", "balanced", "activated")
IN_ROUTER = WAYS[:3]
CALLS = 50  # of a graph

Run = Callable[[], object]


def planned(slots: int, ep_size: int) -> Placement:
    """A placement for a few hot experts."""
    load = np.random.default_rng(0).permutation(1e4 / np.arange(1, EXPERTS + 1) ** 0.7)
    return rebalance(load, slots, 1, 1, ep_size)


class Subject:
    """A batch of one size and the ways to route it.

    Attributes:
        ways: what is timed, by name; the first is the router alone.
    """

    def __init__(self, tokens: int, placement: Placement, ep_size: int, device: torch.device) -> None:
        self.logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens)).to(device)
        self.bias = torch.zeros(EXPERTS, device=device)
        self.load = torch.zeros(EXPERTS, dtype=torch.int32, device=device)
        options = {"ep_size": ep_size, "ep_rank": 1, "ranks_per_node": min(8, ep_size)}
        self.choices = {how: ReplicaChoice(placement, how=how, device=device, **options) for how in WAYS}
        self._on_host = {how: ReplicaChoice(placement, how=how, **options) for how in WAYS}
        self.ids, _ = self.route(Placing())
        out = torch.empty_like(self.ids)
        self.ways: dict[str, Run] = {"router": lambda: self.route(Placing())}
        self.ways["router, counting"] = lambda: self.route(Placing(expert_load=self.load))
        for how in IN_ROUTER:
            self.ways[f"router, {how}"] = lambda how=how: self.route(Placing(self.choices[how]))
        self.ways["router, round_robin, counting"] = lambda: self.route(Placing(self.choices["round_robin"], self.load))
        for how in WAYS:
            self.ways[f"kernel, {how}"] = lambda how=how: self.choices[how](self.ids, out=out)
        for how in WAYS:
            self.ways[f"router then kernel, {how}"] = lambda how=how: self.behind(how, out)

    def route(self, placing: Placing) -> tuple[Tensor, Tensor]:
        """ids or slots, and weights."""
        return GroupLimitedRouting().route(self.logits, TOP_K, self.bias, placing)

    def behind(self, how: str, out: Tensor) -> None:
        """The router alone, then a kernel for the mapping."""
        ids, _ = self.route(Placing())
        self.choices[how](ids, out=out)

    def check(self) -> None:
        """Compares slots and counts with the CPU's.

        Raises:
            ValueError: They differ.
        """
        ids = self.ids.cpu()
        for how in WAYS:
            want = self._on_host[how](ids)
            for name, got in (
                ("kernel", self.choices[how](self.ids)),
                ("router", self.route(Placing(self.choices[how]))[0]),
            ):
                if not torch.equal(got.cpu(), want):
                    raise ValueError(f"{name}, {how}, {len(ids)} tokens: other slots than the CPU's")
        self.load.zero_()
        self.route(Placing(expert_load=self.load))
        if not torch.equal(self.load.cpu(), torch.bincount(ids.flatten(), minlength=EXPERTS).int()):
            raise ValueError(f"{len(ids)} tokens: other counts than the CPU's")


def series(run: Run, device: torch.device) -> Run:
    """CALLS calls; on CUDA one graph."""

    def several() -> None:
        for _ in range(CALLS):
            run()

    several()
    return capture(several) if device.type == "cuda" else several


def microseconds(run: Run, device: torch.device) -> float:
    """The time of one call in a series."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) / CALLS * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS * 1e3


def measure(subject: Subject, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Times of all rounds, by way; the ways take turns."""
    runs = {name: series(run, device) for name, run in subject.ways.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 2):
        for name, run in runs.items():
            took = microseconds(run, device)
            if round_ >= 2:  # the first ones warm up
                times[name].append(took)
    return times


def main() -> int:
    """Prints a table and writes a report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--slots", type=int, default=288)
    parser.add_argument("--ep_size", type=int, default=32)
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    device = torch.device(args.device)
    placement = planned(args.slots, args.ep_size)
    sizes = []
    for tokens in args.tokens:
        subject = Subject(tokens, placement, args.ep_size, device)
        subject.check()
        medians = {name: statistics.median(times) for name, times in measure(subject, args.rounds, device).items()}
        sizes.append({"tokens": tokens, "us": medians})
        print(f"{tokens} tokens: slots and counts are the CPU's")
        for name, took in medians.items():
            more = "" if name.startswith("kernel") else f"  {took - medians['router']:+7.2f}"
            print(f"  {name:36} {took:8.2f} us{more}", flush=True)
    if args.output_file is not None:
        report = {
            **environment.describe(args.commit),
            "command": sys.argv,
            "slots": args.slots,
            "ep_size": args.ep_size,
        }
        args.output_file.write_text(json.dumps({**report, "sizes": sizes}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
