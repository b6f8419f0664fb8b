"""The worth of the balancer where each rank has a GPU: rates over the link, and steps while a task changes.

    python3 benchmarks/balancer_ranks.py --ep_size 2 --output_file balancer.json

``mover``: all ranks at once put an expert of 44 MiB into the landing area of the next rank, by SMs. Beside it the plain
stores of `putget roofline` with as many SMs and bytes a peer. Bytes are compared.

``steps``: layers of experts (BF16) with routing that a table gives: Zipf's law over the experts, in another order for
each task and layer. The task changes halfway. An iteration is one CUDA graph of all layers, with the balancer's step
and moves in it where there is one; the ranks meet before each. Ways:

  contiguous   experts in their order, the rest of the slots again from the first one on
  static       a plan of the first task
  online       begins with that plan; a `Balancer` follows the load
  own          a plan of the task that runs, known beforehand: ranks are even, experts are not
  even         contiguous, with routing that gives every expert as many tokens

An iteration's time is the slowest rank's, by events around the graph. Each way has the same rows and expert sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import putget
from putget.balancer import (
    Balancer,
    ExpertBlobs,
    Landing,
    LoadHistory,
    Move,
    MoveOptions,
    Placement,
    PlanOptions,
    rebalance,
)
from putget.moe import ExpertParallelMoE, SlotOptions
from putget.moe.router import Placing
from putget_bench import environment, launch
from putget_bench.roofline import Link

EXPERT_BYTES = 44 << 20
SMS = (2, 4, 8, 16, 32)
WAYS = ("contiguous", "static", "online", "own", "even")
BEHIND = 50  # iterations after which online is to have followed


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layers, and of the run."""

    ep_size: int
    layers: int
    experts: int
    slots: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: int
    iterations: int
    zipf: float


class Scripted(ExpertParallelMoE):
    """A layer whose ids come from outside instead of from a router."""

    ids: Tensor
    weights: Tensor

    def route(self, x: Tensor, num_valid_tokens: Tensor | None = None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The ids that stand in `ids`, counted and turned into slots."""
        ids = Placing(self.choose, self.expert_load, num_valid_tokens)(self.ids)
        return ids, self.weights, self.experts.prepare(x)


def slowest(value: float) -> float:
    """The largest of all ranks."""
    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


# --- the mover


def mover_rates(comm: putget.Communicator, context: launch.RankContext, num_sms: int, repeats: int = 9) -> list[float]:
    """Microseconds in which the slowest rank puts an expert to the next one, of each repeat."""
    rank, size = context.rank, context.size
    generator = torch.Generator(context.device).manual_seed(rank)
    slots = torch.randint(0, 1 << 30, (2, EXPERT_BYTES // 4), generator=generator, dtype=torch.int32, device="cuda")
    landing = Landing(comm, [ExpertBlobs({"w": slots})], cells=1, num_sms=num_sms, device=context.device)
    batch = torch.zeros(1, dtype=torch.int32, device=context.device)
    before = (rank - 1) % size
    expected = torch.randint(
        0,
        1 << 30,
        (2, EXPERT_BYTES // 4),
        generator=torch.Generator(context.device).manual_seed(before),
        dtype=torch.int32,
        device="cuda",
    )[0]
    moves = [Move(0, one, 0, (one + 1) % size, 1) for one in range(size)]
    times = []
    for _ in range(repeats):
        slots[1].zero_()
        if not landing.post(moves):
            raise RuntimeError("the batch before has not been taken")
        landing.move(16)  # a kernel works on what the one before has seen
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the timed work has been launched by then
        begin.record()
        landing.move(EXPERT_BYTES)
        end.record()
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(2):  # one sees what has come, and one looks at it
            landing.move(EXPERT_BYTES)
        batch += 1
        landing.take(batch)
        torch.cuda.synchronize()
        dist.barrier()
        if not torch.equal(slots[1], expected):
            raise RuntimeError(f"rank {rank}: an expert arrived with other bytes")
        times.append(slowest(begin.elapsed_time(end) * 1e3))
    landing.close()
    return times


def movers(comm: putget.Communicator, context: launch.RankContext) -> list[dict[str, float]]:
    """GB a second out of each rank by SMs, beside plain stores."""
    link = Link(comm, context, EXPERT_BYTES, cuda_graph=True)
    found = []
    for num_sms in SMS:
        put = EXPERT_BYTES / statistics.median(mover_rates(comm, context, num_sms)) / 1e3
        stores = link.rate("write", EXPERT_BYTES // (context.size - 1) // 16 * 16, num_sms, 5).gbps
        found.append({"num_sms": num_sms, "put_gb_s": put, "stores_gb_s": stores, "fraction": put / stores})
    link.close()
    return found


# --- steps


def tables(sizes: Sizes, rank: int) -> Tensor:
    """int32 [2 tasks and an even one, iterations, layers, tokens, top_k]: ids of this rank's tokens."""
    likely = 1 / np.arange(1, sizes.experts + 1) ** sizes.zipf
    shape = (sizes.iterations, sizes.layers, sizes.tokens, sizes.top_k)
    found = np.zeros((3, *shape), np.int32)
    for task in range(2):
        order = np.random.default_rng(task)  # the same on every rank
        own = np.random.default_rng([task, rank])
        for layer in range(sizes.layers):
            keys = np.log(order.permutation(likely))
            for iteration in range(sizes.iterations):
                noisy = keys + own.gumbel(size=(sizes.tokens, sizes.experts))  # top_k of these: without replacement
                found[task, iteration, layer] = np.argpartition(-noisy, sizes.top_k, axis=1)[:, : sizes.top_k]
    entries = np.arange(sizes.tokens * sizes.top_k).reshape(sizes.tokens, sizes.top_k)
    found[2] = (entries + rank) % sizes.experts
    return torch.from_numpy(found)


def load_of(ids: Tensor, experts: int) -> np.ndarray[Any, Any]:
    """Tokens of all ranks for each expert, [layers, experts], of [iterations, layers, tokens, top_k]."""
    count = torch.stack([torch.bincount(layer.flatten().long(), minlength=experts) for layer in ids.transpose(0, 1)])
    dist.all_reduce(count)
    return count.numpy()


class Way:
    """The layers of one way, captured."""

    def __init__(
        self, name: str, comm: putget.Communicator, context: launch.RankContext, sizes: Sizes, placement: Placement
    ) -> None:
        self.name, self.sizes, self.device = name, sizes, context.device
        self.layers = [self._layer(comm, placement, number) for number in range(sizes.layers)]
        self.x = torch.randn(sizes.tokens, sizes.hidden, device=self.device).bfloat16()
        self.balancer = None
        if name == "online":
            plan = PlanOptions(interval=4, history=LoadHistory(decay=0.5))
            moves = MoveOptions(most_bytes=8 << 20)
            self.balancer = Balancer(comm, self.layers, placement, plan=plan, moves=moves, device=self.device)
        for _ in range(2):
            self._iterate()
        torch.cuda.synchronize()
        dist.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._iterate()

    def _layer(self, comm: putget.Communicator, placement: Placement, number: int) -> Scripted:
        sizes = self.sizes
        layer = Scripted(
            comm,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            max_tokens_per_rank=sizes.tokens,
            slots=SlotOptions(placement=placement, placement_layer=number),
            count_experts=True,
            num_stats=sizes.experts + 2,
            device=self.device,
            timeout_s=20.0,
        )
        with torch.no_grad():
            for weights in layer.experts.parameters():
                weights.copy_(torch.randn(weights.shape, device=self.device) * 0.02)
        layer.ids = torch.zeros(sizes.tokens, sizes.top_k, dtype=torch.int32, device=self.device)
        layer.weights = torch.full((sizes.tokens, sizes.top_k), 1 / sizes.top_k, device=self.device)
        return layer

    def _iterate(self) -> None:
        x = self.x
        for layer in self.layers:
            x = layer(x)
            if self.balancer is not None:
                self.balancer.move()
        if self.balancer is not None:
            self.balancer.step()

    def time(self, ids: Tensor) -> float:
        """Microseconds of one iteration with ids [layers, tokens, top_k], on the slowest rank."""
        for layer, of_layer in zip(self.layers, ids, strict=True):
            layer.ids.copy_(of_layer)
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        if self.balancer is not None:
            self.balancer.poll()
        return slowest(begin.elapsed_time(end) * 1e3)

    def close(self) -> None:
        """Gives the memory back."""
        for layer in self.layers:
            layer.check()
        dist.barrier()
        if self.balancer is not None:
            self.balancer.close()
        for layer in self.layers:
            layer.close()


def steps(comm: putget.Communicator, context: launch.RankContext, sizes: Sizes) -> dict[str, Any]:
    """Times of the iterations of each way, and max/mean of the placements for the second task."""
    ids = tables(sizes, context.rank)
    first, second = (load_of(ids[task], sizes.experts) for task in range(2))
    slots = np.tile(np.arange(sizes.slots) % sizes.experts, (sizes.layers, 1))
    contiguous = Placement.of(slots, sizes.experts)
    planned, own = (rebalance(load, sizes.slots, 1, 1, sizes.ep_size) for load in (first, second))
    begins = {"contiguous": contiguous, "static": planned, "online": planned, "own": own, "even": contiguous}
    tasks = {"own": (ids[1], ids[1]), "even": (ids[2], ids[2])}
    found: dict[str, Any] = {}
    for name in WAYS:
        way = Way(name, comm, context, sizes, begins[name])
        of_way = tasks.get(name, (ids[0], ids[1]))
        times = [way.time(of_task[i].to(context.device)) for of_task in of_way for i in range(sizes.iterations)]
        placement = begins[name] if way.balancer is None else way.balancer.placement
        found[name] = {
            "us": [round(one, 1) for one in times],
            "max_mean_second": round(float(placement.imbalance(second, sizes.ep_size).mean()), 3),
            "moves": 0 if way.balancer is None else way.balancer.num_moves,
        }
        way.close()
        del way
        torch.cuda.empty_cache()
    return found


def work(context: launch.RankContext, sizes: Sizes, emit: launch.Emit) -> int:
    """One rank's part."""
    torch.cuda.set_device(context.device)
    comm = putget.Communicator()
    emit({"kind": "movers", "found": movers(comm, context)})
    emit({"kind": "steps", "found": steps(comm, context, sizes)})
    comm.close()
    return 0


def parts(times: list[float], iterations: int) -> dict[str, float]:
    """Medians of the first task, of ten iterations behind the change, and of the end; while experts move, the tail."""
    at = iterations + min(BEHIND, iterations * 3 // 4)
    last, moving = times[at:], sorted(times[iterations:at])
    return {
        "first task": statistics.median(times[5:iterations]),
        "after the change": statistics.median(times[iterations : iterations + 10]),
        "at the end": statistics.median(last),
        "p95": moving[len(moving) * 95 // 100],
        "longest": moving[-1],
    }


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_file", type=Path)
    whole = {"ep_size": 2, "layers": 4, "experts": 64, "slots": 80, "top_k": 6, "hidden": 4096, "intermediate": 1024}
    whole |= {"tokens": 2048, "iterations": 80}
    for name, default in whole.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of Zipf's law")
    args = vars(parser.parse_args())
    output = args.pop("output_file")
    sizes = Sizes(**args)
    found: dict[str, Any] = {"environment": environment.describe(), "sizes": asdict(sizes)}

    def keep(event: launch.Event) -> None:
        found[event["kind"]] = event["found"]

    code = launch.run(work, sizes, sizes.ep_size, "cuda", keep)
    print("| SMs | put GB/s | plain stores | fraction |\n|---|---|---|---|")
    for row in found["movers"]:
        print(f"| {row['num_sms']} | {row['put_gb_s']:.0f} | {row['stores_gb_s']:.0f} | {row['fraction']:.2f} |")
    print("\n| way, us | first task | after the change | at the end | p95 | longest | max/mean at the end | moves |")
    print("|---|---|---|---|---|---|---|---|")
    for name, way in found["steps"].items():
        figures = " | ".join(f"{one:.0f}" for one in parts(way["us"], sizes.iterations).values())
        print(f"| {name} | {figures} | {way['max_mean_second']} | {way['moves']} |")
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
