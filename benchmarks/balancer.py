"""The cost of moving experts on one GPU: a step with nothing to do, the mover's rate, an iteration while experts move.

    python3 benchmarks/balancer.py --output_file balancer.json

Two ranks share the GPU, as threads' ranks do: one puts experts, the other takes them. So bytes go from memory to the
same memory, and every figure is one GPU's, not a link's. Parts:

``step``: `Balancer.step` in a CUDA graph of many, with one rank, the statistics of a round heard in each, and no move.

``mover``: one expert of 44 MiB through `Landing.move` in one call, by SMs: bytes put a second, and bytes checked a
second on the rank that gets it. Beside them ``copy_`` of torch with as many bytes. Each expert that came is compared.

``iteration``: 16 layers that read the weights of 36 slots each (products of 8 tokens a slot, BF16, DeepSeek-V3's bytes
in FP8), captured as one graph with a step at its end. Its time with nothing on its way, and with one expert that the
step's kernel puts, or that a thread copies, in every iteration; p50, p99 and the longest. Each expert is compared.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import putget
from putget.balancer import BalancedLayer, Balancer, ExpertBlobs, Landing, Move, Placement, PlanOptions, ReplicaChoice
from putget_bench import environment

EXPERT_BYTES = 44 << 20
EXPERTS, TOP_K, LAYERS, SLOTS = 256, 8, 16, 36
SMS = (1, 2, 4, 8, 16, 32)
ROWS, HIDDEN = 8, 7168
BEHIND_CYCLES = 1_000_000  # half a millisecond: what is timed has been launched by then
COLUMNS = EXPERT_BYTES // 2 // HIDDEN  # of a slot's BF16 weights, as many bytes as an expert in FP8


def timed(work: Callable[[], object], repeats: int, behind_cycles: int = 0) -> list[float]:
    """Microseconds of each call, by events on the current stream, which is kept busy before for so many cycles."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if behind_cycles:
            torch.cuda._sleep(behind_cycles)  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The work as a graph, after it has run once."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def step_times(device: torch.device, steps: int = 200, repeats: int = 50) -> dict[str, float]:
    """Microseconds of a step, and of what hands it the statistics."""
    (comm,) = putget.Communicator.local(1)
    placement = Placement.of(list(range(EXPERTS)) + list(range(32)), EXPERTS)
    choose = ReplicaChoice(placement, ep_size=1, device=device)
    load = torch.zeros(EXPERTS, dtype=torch.int32, device=device)
    blobs = ExpertBlobs({"w": torch.zeros(EXPERTS + 32, 16, device=device)})
    layer = BalancedLayer(blobs, load, choose.tables, choose.tables_of)
    told = torch.zeros(1, EXPERTS + 2, dtype=torch.int32, device=device)
    plan = PlanOptions(in_thread=False)
    with Balancer(comm, [layer], placement, num_stats=EXPERTS + 2, plan=plan, device=device) as balancer:

        def many(with_step: bool) -> None:
            for _ in range(steps):
                balancer.hear(told)
                if with_step:
                    balancer.step()

        times = {}
        for name, with_step in (("hear", False), ("hear_and_step", True)):
            graph = captured(functools.partial(many, with_step))
            times[name] = statistics.median(timed(graph.replay, repeats)) / steps
    comm.close()
    return {**times, "step": times["hear_and_step"] - times["hear"]}


class Pair:
    """Two ranks with the landing areas of one layer; rank 0 puts, rank 1 takes."""

    def __init__(self, num_sms: int, device: torch.device, mover: str = "kernel") -> None:
        self.mover = mover
        self.comms = putget.Communicator.local(2)
        generator = torch.Generator(device).manual_seed(num_sms)
        size = (2, EXPERT_BYTES // 4)
        low, high = -(1 << 31), (1 << 31) - 1
        self.slots = [
            torch.randint(low, high, size, generator=generator, dtype=torch.int32, device=device) for _ in range(2)
        ]
        self.landings = _on_all(lambda rank: self._landing(rank, num_sms, device))
        self.batch = torch.zeros(1, dtype=torch.int32, device=device)

    def _landing(self, rank: int, num_sms: int, device: torch.device) -> Landing:
        return Landing(
            self.comms[rank],
            [ExpertBlobs({"w": self.slots[rank]})],
            cells=1,
            num_sms=num_sms,
            mover=self.mover,
            device=device,
        )

    def post(self) -> None:
        """The next batch: slot 0 of rank 0 for slot 1 of rank 1."""
        for landing in self.landings:
            if not landing.post([Move(0, 0, 0, 1, 1)]):
                raise RuntimeError("the batch before has not been taken")

    def close(self) -> None:
        """Frees all."""
        torch.cuda.synchronize()
        for landing in self.landings:
            landing.close()
        for comm in self.comms:
            comm.close()


def _on_all(make: Callable[[int], Any]) -> list[Any]:
    """The collective calls, on two threads."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(make, range(2)))


def mover_rate(num_sms: int, device: torch.device, repeats: int = 15) -> dict[str, float]:
    """GB a second that rank 0 puts and that rank 1 checks, and of torch's copy."""
    pair = Pair(num_sms, device)
    source, target = pair.landings
    put, checked, taken, copied = [], [], [], []
    for _ in range(repeats):
        pair.slots[1][1].zero_()
        pair.post()
        source.move(16)  # a kernel works on what the one before has seen
        put += timed(lambda: source.move(EXPERT_BYTES), 1, BEHIND_CYCLES)
        target.move(16)
        checked += timed(lambda: target.move(EXPERT_BYTES), 1, BEHIND_CYCLES)
        pair.batch += 1
        taken += timed(lambda: target.take(pair.batch), 1, BEHIND_CYCLES)
        source.take(pair.batch)
        torch.cuda.synchronize()
        if not torch.equal(pair.slots[0][0], pair.slots[1][1]):
            raise RuntimeError("an expert arrived with other bytes")
        copied += timed(lambda: pair.slots[1][0].copy_(pair.slots[0][1]), 1, BEHIND_CYCLES)
    pair.close()
    every = {"put": put, "checked": checked, "taken": taken, "copy": copied}
    return {name: EXPERT_BYTES / statistics.median(times) / 1e3 for name, times in every.items()}


class Iteration:
    """An iteration of rank 0 as a graph, and what lands meanwhile on rank 1."""

    def __init__(self, num_sms: int, device: torch.device, mover: str) -> None:
        self.pair = Pair(num_sms, device, mover)
        self.beside = torch.cuda.Stream()
        self.puts = self.late = 0  # late: looks of rank 0 behind its graph before an expert was copied
        rows = torch.randn(SLOTS, ROWS, HIDDEN, device=device, dtype=torch.bfloat16)
        weights = torch.randn(SLOTS, HIDDEN, COLUMNS, device=device, dtype=torch.bfloat16)
        out = torch.empty(SLOTS, ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
        source = self.pair.landings[0]

        def iterate() -> None:
            for _ in range(LAYERS):
                torch.bmm(rows, weights, out=out)
            source.take(self.pair.batch)
            source.move(EXPERT_BYTES)

        self.graph = captured(iterate)

    def time(self, moves: bool) -> float:
        """Microseconds of a replay; with `moves` one expert is put in it, which rank 1 has behind it."""
        source = self.pair.landings[0]
        if moves:
            self.pair.slots[1][1].zero_()
            self.pair.post()
            source.move(16)  # the graph's kernel puts what this one has seen, or the thread does
            self.puts += 1
        if not moves or self.pair.mover == "kernel":
            torch.cuda.synchronize()
        (took,) = timed(self.graph.replay, 1)
        if moves:
            self.receive()
        return took

    def receive(self) -> None:
        """Rank 1 takes the expert, and rank 0 the batch."""
        source, target = self.pair.landings
        end = time.monotonic() + 10
        with torch.cuda.stream(self.beside):
            while source.progress().put < self.puts:  # the thread was later than the graph
                if time.monotonic() > end:
                    raise RuntimeError("the thread has not copied an expert in ten seconds")
                self.late += 1
                source.move(16)
                torch.cuda.synchronize()
            for _ in range(2):  # one sees what has come, and one looks at it
                target.move(EXPERT_BYTES)
            self.pair.batch += 1
            target.take(self.pair.batch)
            torch.cuda.synchronize()
        source.take(self.pair.batch)
        torch.cuda.synchronize()
        if not torch.equal(self.pair.slots[0][0], self.pair.slots[1][1]):
            raise RuntimeError("an expert arrived with other bytes")


def iteration_times(num_sms: int, device: torch.device, mover: str, repeats: int = 200) -> dict[str, list[float]]:
    """Microseconds of an iteration, by what moves meanwhile; turns of both."""
    iteration = Iteration(num_sms, device, mover)
    found: dict[str, list[float]] = {"nothing": [], f"one expert, by {mover}": []}
    for _ in range(repeats):
        for moves, times in enumerate(found.values()):
            times.append(iteration.time(bool(moves)))
    if iteration.late:
        print(f"by {mover}: {iteration.late} looks behind the graph before an expert was copied", flush=True)
    iteration.pair.close()
    return found


def quantiles(times: list[float]) -> dict[str, float]:
    """p50, p99 and the longest."""
    ordered = sorted(times)
    return {"p50": statistics.median(ordered), "p99": ordered[len(ordered) * 99 // 100], "longest": ordered[-1]}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_file", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    found: dict[str, Any] = {"environment": environment.describe(), "step_us": step_times(device)}
    print("a step, us: " + ", ".join(f"{name} {value:.2f}" for name, value in found["step_us"].items()), flush=True)
    found["mover_gb_s"] = {}
    print("| SMs | put GB/s | checked | taken | copy_ |\n|---|---|---|---|---|")
    for num_sms in SMS:
        rates = found["mover_gb_s"][num_sms] = mover_rate(num_sms, device)
        print(f"| {num_sms} | " + " | ".join(f"{rate:.0f}" for rate in rates.values()) + " |", flush=True)
    found["iteration_us"] = {}
    print("| SMs | moves | p50 us | p99 | longest |\n|---|---|---|---|---|")
    for num_sms, mover in ((8, "kernel"), (8, "thread"), (32, "kernel"), (32, "thread")):
        times = iteration_times(num_sms, device, mover)
        rows = found["iteration_us"][f"{num_sms}, {mover}"] = {name: quantiles(one) for name, one in times.items()}
        for name, one in rows.items():
            print(f"| {num_sms} | {name} | " + " | ".join(f"{value:.1f}" for value in one.values()) + " |", flush=True)
    if options.output_file is not None:
        options.output_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
