"""A decode step of a transformers model whose expert blocks are putget's layers: what a balancer costs in it.

    torchrun --nproc_per_node 2 benchmarks/transformers_layer.py --output_file layer.json
    python benchmarks/transformers_layer.py                                # one rank: no expert can move

The model is that of transformers_step.py; ``ExpertParallelMoE`` stands for router and experts of each layer, because
``spread`` has slots on CPUs alone. Each way is a CUDA graph, and the ways take turns, so that a drift of the clock
meets all of them:

  without   experts in their order, nothing is counted
  idle      tokens are counted, ids become slots, loads travel with the first layer's rows, and a `Balancer` steps
  moving    the same, and every rank always has an expert on its way to the next rank, `--most_bytes` in each step
  fp8_back  like without, and combine sends FP8 rows (``combine_dtype``)

The expert that moves lies beside the layers, so routing and placement are equal in all ways, and the ways differ by
the move alone. A `Landing` of its own moves it: two kernels, where a balancer's own moves are part of its step. So
moving is an upper bound.

Steps are timed between two meetings of the ranks; of each step the slowest rank counts. `part` is the median of the
differences to the step of "without" in the same turn, as a share of its median. Layers' outputs of idle and moving have
to be those of without, bit for bit, and experts that moved are compared.
On the CPU (--device cpu, with small sizes) nothing is captured: that checks this program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers_step import Step, add_sizes, make_model, meet, numbers

import putget
from putget.balancer import Balancer, ExpertBlobs, Landing, Move, MoveOptions, Placement, PlanOptions
from putget.moe import ExpertParallelMoE, SlotOptions

WAYS = ("without", "idle", "moving", "fp8_back")
_STATS = 256  # numbers that the first layer's rows carry in a round
_NEVER = PlanOptions(interval=1 << 24)
_FP8_TOLERANCE = 2.0**-4  # of an output's norm: three bits of mantissa


class Mover:
    """An expert that each rank has and one that it gets, with the bytes of a layer's expert."""

    def __init__(self, comm: putget.Communicator, layer: ExpertParallelMoE, most_bytes: int) -> None:
        self.comm, self.most_bytes, self.done = comm, most_bytes, 0
        device = layer.device
        self.slots = {
            name: torch.full((2, *weight.shape[1:]), float(comm.rank + 1), dtype=weight.dtype, device=device)
            for name, weight in layer.experts.named_parameters()
        }
        self.landing = Landing(comm, [ExpertBlobs(self.slots)], cells=1, device=device)
        self.batch = torch.zeros(1, dtype=torch.int32, device=device)
        self.moves = [Move(0, rank, 0, (rank + 1) % comm.size, 1) for rank in range(comm.size)]

    def step(self) -> None:
        """The part of a step: puts, looks and takes."""
        self.landing.move(self.most_bytes)
        self.landing.take(self.batch)

    def between(self) -> None:
        """The host's part between two steps: agrees on what has landed everywhere, and posts the next expert."""
        landed = self.landing.landed.cpu()
        dist.all_reduce(landed, dist.ReduceOp.MIN)
        self.done = int(landed)
        self.batch.fill_(self.done)
        self.landing.post(self.moves)

    def check(self) -> None:
        """Raises SystemExit where no expert has come, or another one than the rank before has."""
        if self.done == 0:
            raise SystemExit("no expert has moved: give more --turns or --most_bytes")
        before = (self.comm.rank - 1) % self.comm.size + 1
        for name, slots in self.slots.items():
            if not bool((slots[1] == before).all()):
                raise SystemExit(f"rank {self.comm.rank}: {name} of the expert that came has other bytes")


class Layers:
    """The layers in place of the model's expert blocks, and the way that they are in."""

    def __init__(self, model: Any, comm: putget.Communicator, given: argparse.Namespace, device: torch.device) -> None:
        self.comm, self.stack, self.way = comm, contextlib.ExitStack(), "without"
        count = given.num_experts // comm.size
        first = comm.rank * count
        placement = Placement.of([list(range(given.num_experts))] * given.layers, given.num_experts)
        plain: list[ExpertParallelMoE] = []
        fp8_back: list[ExpertParallelMoE] = []
        for number, block in enumerate(layer.mlp for layer in model.model.layers):
            for layers, dtype in ((plain, None), (fp8_back, torch.float8_e4m3fn)):
                layer = ExpertParallelMoE(
                    comm,
                    hidden_size=given.hidden_size,
                    intermediate_size=given.intermediate_size,
                    num_experts=given.num_experts,
                    top_k=given.top_k,
                    max_tokens_per_rank=max(given.batches),
                    slots=SlotOptions(placement=placement, placement_layer=number),
                    count_experts=True,
                    num_stats=_STATS if number == 0 and dtype is None else 0,
                    combine_dtype=dtype,
                    workspace=layers[1].a2a.workspace if len(layers) > 1 else None,
                    grouped_memory=layers[-1].grouped_memory if layers else None,
                    device=device,
                )
                self.stack.callback(layer.close)
                layers.append(layer)
            own, same = plain[-1], fp8_back[-1]
            same.experts, same.router = own.experts, own.router
            with torch.no_grad():
                own.experts.gate_up.copy_(block.experts.gate_up_proj[first : first + count])
                own.experts.down.copy_(block.experts.down_proj[first : first + count])
                own.router.weight.copy_(block.gate.weight)
            del block.experts, block.gate
            block.forward = self._forward_of(own, same)
        self.plain, self.fp8_back = plain, fp8_back
        self.placed = [(layer.choose, layer.expert_load) for layer in plain]
        self.mover = Mover(comm, plain[0], given.most_bytes) if comm.size > 1 else None
        self.balancer = Balancer(
            comm, plain, placement, plan=_NEVER, moves=MoveOptions(most_bytes=given.most_bytes), device=device
        )
        self.set_way("without")

    def _forward_of(self, own: ExpertParallelMoE, fp8_back: ExpertParallelMoE) -> Callable[[torch.Tensor], Any]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            layer = fp8_back if self.way == "fp8_back" else own
            return layer(x.reshape(-1, x.shape[-1])).view_as(x)

        return forward

    def set_way(self, way: str) -> None:
        """Calls from now on are in this way."""
        self.way = way
        has_balancer = way in ("idle", "moving")
        for layers in (self.plain, self.fp8_back):
            for layer, (choose, load) in zip(layers, self.placed, strict=True):
                layer.choose, layer.expert_load = (choose, load) if has_balancer else (None, None)

    def end_step(self) -> None:
        """The work behind a step's last layer."""
        if self.way in ("idle", "moving"):
            self.balancer.step()
        if self.way == "moving" and self.mover is not None:
            self.mover.step()

    def between(self) -> None:
        """The host's work between two steps."""
        if self.way in ("idle", "moving"):
            self.balancer.poll()
        if self.way == "moving" and self.mover is not None:
            self.mover.between()

    def close(self) -> None:
        """Frees all."""
        self.balancer.close()
        if self.mover is not None:
            self.mover.landing.close()
        self.stack.close()


class Way(Step):
    """A step in one way."""

    def __init__(self, way: str, layers: Layers, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.way, self.layers = way, layers

    @torch.no_grad()
    def run(self) -> None:
        """Eagerly."""
        self.layers.set_way(self.way)
        super().run()
        self.layers.end_step()


def slowest(step: Way, device: torch.device) -> float:
    """Microseconds of one step on the slowest rank."""
    step.layers.set_way(step.way)
    step.layers.between()
    if device.type == "cuda":
        torch.cuda.synchronize()
    meet()
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor([(time.perf_counter() - begin) * 1e6], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


@torch.no_grad()
def outputs_of(model: Any, layers: Layers, way: str, batch: int, device: torch.device) -> torch.Tensor:
    """[layers, batch, hidden_size]: what each layer makes of the same random tokens."""
    layers.set_way(way)
    generator = torch.Generator().manual_seed(layers.comm.rank * 1009 + batch)
    x = torch.randn(batch, 1, model.config.hidden_size, generator=generator).bfloat16().to(device)
    return torch.cat([layer.mlp(x).view(1, batch, -1) for layer in model.model.layers])


def check_outputs(model: Any, layers: Layers, ways: tuple[str, ...], batch: int, device: torch.device) -> None:
    """Raises SystemExit where a way's layers give something else."""
    want = outputs_of(model, layers, "without", batch, device)
    for way in ways[1:]:
        got = outputs_of(model, layers, way, batch, device)
        if way == "fp8_back":
            error = float(((got.float() - want.float()).norm(dim=2) / want.float().norm(dim=2)).max())
            if not error <= _FP8_TOLERANCE:
                raise SystemExit(f"{way}, {batch} requests: outputs differ by {error}")
        elif not torch.equal(got, want):
            raise SystemExit(f"{way}, {batch} requests: outputs are not those of without")


def measure(
    model: Any, layers: Layers, given: argparse.Namespace, device: torch.device
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each batch, and its line."""
    ways = tuple(way for way in WAYS if way != "moving" or layers.mover is not None)
    for batch in given.batches:
        check_outputs(model, layers, ways, batch, device)
        seed = layers.comm.rank * 1009 + batch
        steps = [Way(way, layers, model, batch, given.context, device, seed=seed) for way in ways]
        for step in steps:
            step.prepare(captures=True)
        before = 0 if layers.mover is None else layers.mover.done
        turns = [[slowest(step, device) for step in steps] for _ in range(given.turns + 3)][3:]
        line: dict[str, Any] = {}
        base = statistics.median(turn[0] for turn in turns)
        for place, way in enumerate(ways):
            times = sorted(turn[place] for turn in turns)
            line[way] = {"us": round(statistics.median(times), 1), "p95_us": round(times[len(times) * 95 // 100], 1)}
            if place:
                line[way]["part"] = round(statistics.median(turn[place] - turn[0] for turn in turns) / base, 5)
        if layers.mover is not None:
            line["moving"]["experts_moved"] = layers.mover.done - before
        yield batch, line


def main() -> None:
    """Measures, prints a line for each batch, and writes the JSON."""
    parser = argparse.ArgumentParser(description="A balancer's part of a decode step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=numbers, default=[1, 32, 256])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--most_bytes", type=int, default=MoveOptions.most_bytes, help="bytes of an expert in a step")
    parser.add_argument("--output_file", type=Path)
    add_sizes(parser)
    given = parser.parse_args()
    if "RANK" not in os.environ:
        store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    model = make_model(given, device)
    lines: dict[int, Any] = {}
    with putget.Communicator() as comm, contextlib.closing(Layers(model, comm, given, device)) as layers:
        for batch, line in measure(model, layers, given, device):
            lines[batch] = line
            if comm.rank == 0:
                print(batch, json.dumps(line), flush=True)
        if layers.mover is not None:
            layers.mover.check()
        if comm.rank == 0 and given.output_file:
            report = {
                "schema": "putget.transformers_layer/1",
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                "ranks": comm.size,
                "transformers": transformers.__version__,
                "settings": {key: value for key, value in vars(given).items() if key != "output_file"},
                "requests": lines,
            }
            given.output_file.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
