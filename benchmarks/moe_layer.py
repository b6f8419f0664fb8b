"""One mixture-of-experts layer, with its rows moved by putget, NCCL and FlashInfer: the same experts in all.

    python benchmarks/moe_layer.py -b 8 -e 2048 -f 4 --peers nccl,flashinfer --kernel_breakdown
    python benchmarks/moe_layer.py --from_ids --no_shared --num_experts 32 --groups 1 1 --output_file layer.json

Every way to move rows is checked before it is timed: some tokens against a dense layer in float32, all tokens against
the layer of putget. A time is that of the slowest rank, in a CUDA graph, aligned by a barrier between the ranks; of all
iterations the median. "experts" is what the experts of this rank take for the rows that came, with nothing around them.
With --from_ids the layer begins with the ids that its router chose before, or with those of a Zipf distribution.
--kernel_breakdown keeps the kernels of one layer, too, with start and end: benchmarks/moe_layer_plot.py draws them.
On the CPU (--device cpu, with small sizes) it runs over gloo: that checks this program, and times nothing of interest.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_layer_contenders import ChosenLayer, Contender, make_contenders
from moe_layer_weights import ModelShape, choose_by_zipf, dense_output, make_state, route
from torch import Tensor

from putget import Communicator
from putget.moe import GroupLimitedRouting
from putget_bench import environment, kernels, launch
from putget_bench.roofline import Link, make_timer
from putget_bench.settings import batch_sizes
from putget_bench.timing import Step, median, percentiles, series_length, slowest

_CHECKED_TOKENS = 3  # of each rank, against the dense layer: each needs the weights of all of its experts
# FP8: E4M3 has 3 bits of mantissa, and the reference does not round what lies between the two products. BF16: 8 bits.
_TOLERANCES = {"fp8": 2.0**-4, "bf16": 2.0**-6}
# Against putget's own layer the experts' results are the same; sums of them are rounded to BF16 in another order.
_TOLERANCE_AMONG_EACH_OTHER = 2.0**-6
_KERNELS_NAMED = 14
# The work of kernels, by parts of their names, for the table. With BF16 weights products of shared experts count as the
# router's.
_KINDS = {
    "router": ("choose_kernel", "nvjet"),
    "quantisation": ("quantise_kernel",),
    "experts' products": ("grouped_kernel", "product_kernel", "networks_kernel", "Gemm"),
    "activation": ("activation_kernel",),
    "rows by expert": ("count_kernel", "place_kernel", "group_kernel"),
    "sums of experts": ("finalize_kernel",),
    "rows out": ("dispatch_kernel", "AllGather", "A2ADispatch", "A2ASanitize", "A2APrepareDispatch"),
    "rows back": ("combine_kernel", "combine_bulk_kernel", "ReduceScatter", "A2ACombine", "A2APrepareCombine"),
}


_OTHERS = "all others"


@dataclass(frozen=True)
class Settings:
    """The settings of one run; every rank gets a copy."""

    shape: ModelShape
    ep_size: int
    device: str
    batches: tuple[int, ...]
    iters: int
    warmup: int
    peers: tuple[str, ...]
    kernel_breakdown: bool
    seed: int
    from_ids: bool = False
    zipf: bool = False
    few_ranks: int = 0
    few_tokens: int = 0
    tell: bool = False


def work(context: launch.RankContext, settings: Settings, emit: launch.Emit) -> int:
    """One rank. Emits "skipped" for peers that are not there, then "size" for every size, or "mismatch"."""
    shape, device = settings.shape, context.device
    is_cuda = device.type == "cuda"
    communicator = Communicator()
    link = Link(communicator, context, 1 << 20, is_cuda)
    timer = make_timer(device, link.barrier, is_cuda)
    layer = ChosenLayer(
        communicator,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        max_tokens_per_rank=max(settings.batches),
        routing=GroupLimitedRouting(shape.num_groups, shape.topk_groups),
        router_bias=True,
        router_dtype=torch.bfloat16,
        shared_intermediate_size=shape.intermediate if shape.shared else 0,
        weight_dtype=torch.float8_e4m3fn if shape.weights == "fp8" else torch.bfloat16,
        device=device,
        timeout_s=120.0,
    )
    layer.load_dense(make_state(shape, settings.seed, device))
    contenders = make_contenders(layer, settings.peers, emit)
    exit_code = 0
    for batch in settings.batches:
        generator = torch.Generator(device).manual_seed(settings.seed * 1009 + 17 * context.rank + batch)
        here = settings.few_tokens if context.rank < settings.few_ranks else batch
        layer.busiest_tokens = batch if settings.tell else None
        x = torch.randn(here, shape.hidden, generator=generator, device=device).bfloat16()
        chosen = choose_by_zipf(shape, x, generator) if settings.zipf else route(shape, settings.seed, x)
        layer.chosen = chosen if settings.from_ids or settings.zipf else None
        emit({"kind": "stage", "text": f"{batch} tokens a rank: checking"})
        wrong = check(settings, contenders, layer, x, chosen)
        everyone: list[list[str]] = [[]] * context.size
        dist.all_gather_object(everyone, wrong)
        for rank, texts in enumerate(everyone):
            for text in texts:
                emit({"kind": "mismatch", "text": f"{batch} tokens a rank, rank {rank}: {text}"})
        if any(everyone):
            exit_code = 1
            break
        emit({"kind": "stage", "text": f"{batch} tokens a rank: timing"})
        results = time_all(settings, timer, contenders, layer, x)
        if settings.kernel_breakdown and is_cuda:
            for contender, result in zip(contenders, results["contenders"], strict=True):
                result["kernels"], result["timeline"] = breakdown(contender, x)
        emit({"kind": "size", "size": {"batch_size": batch, "checked": True, **results}})
    for contender in contenders:
        contender.close()
    layer.close()
    link.close()
    communicator.close()
    return exit_code


def check(
    settings: Settings,
    contenders: list[Contender],
    layer: ChosenLayer,
    x: Tensor,
    chosen: tuple[Tensor, Tensor],
) -> list[str]:
    """The mistakes in the results on this rank."""
    ours = layer(x)
    every = max(1, -(-len(x) // _CHECKED_TOKENS))
    of_picked = (chosen[0][::every], chosen[1][::every])
    picked, dense = ours[::every], dense_output(settings.shape, settings.seed, x[::every].contiguous(), of_picked)
    wrong = []
    for name, got, want, allowed in (
        ("putget against the dense layer", picked, dense, _TOLERANCES[settings.shape.weights]),
        *((c.name, c.run(x), ours, _TOLERANCE_AMONG_EACH_OTHER) for c in contenders),
    ):
        error = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1)
        if len(error) and not float(error.max()) <= allowed:
            wrong.append(f"{name}: relative error {float(error.max()):.3g} is above {allowed:.3g}")
    return wrong


def time_all(
    settings: Settings, timer: Any, contenders: list[Contender], layer: ChosenLayer, x: Tensor
) -> dict[str, Any]:
    """Latencies of all contenders, in turns, and of the experts alone."""
    length, num_series = series_length(settings.iters)
    ids, weights, payloads = layer.route(x)
    grouped = layer.a2a.dispatch(ids, weights, *payloads).expert_major(memory=layer.grouped_memory)
    rows_here = grouped.num_rows.clone()
    experts = timer.steps([Step(lambda: layer.run_experts(grouped, len(x)), "layer")], length)
    readings: dict[str, list[dict[str, list[float]]]] = {"experts": [experts() for _ in range(1 + num_series)][1:]}
    layer.a2a.release()
    series = {
        contender.name: timer.steps([Step(lambda c=contender: c.run(x), "layer")], length) for contender in contenders
    }
    for index in range(-(-settings.warmup // length) + num_series):
        for name, run in series.items():
            taken = run()
            if index >= -(-settings.warmup // length):
                readings.setdefault(name, []).append(taken)
    times = {name: slowest(taken)["layer"] for name, taken in readings.items()}
    most = torch.stack([rows_here.sum(), (rows_here > 0).sum()]).cpu()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    base = median(times[contenders[0].name])
    return {
        "experts_us": median(times["experts"]),
        "most_rows_of_a_rank": int(most[0]),
        "most_experts_with_rows_of_a_rank": int(most[1]),
        "contenders": [
            {
                "name": contender.name,
                "latency_us": median(times[contender.name]),
                "ratio": base / median(times[contender.name]),
                "percentiles_us": percentiles(times[contender.name]),
                "num_readings": len(times[contender.name]),
                "kernels": None,
                "timeline": None,
            }
            for contender in contenders
        ],
    }


class _AsPhases:
    """A layer as the phases that ``kernels.breakdown`` runs."""

    def __init__(self, contender: Contender, x: Tensor) -> None:
        self.dispatch = lambda: contender.run(x)
        self.write_rows = self.combine = lambda: None


def breakdown(contender: Contender, x: Tensor) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Microseconds a layer of the kernels on this rank, the most time first, and of all others together; one layer."""
    phases: Any = _AsPhases(contender, x)
    ran = kernels.intervals(phases, cuda_graph=True)
    timeline = [
        {"name": name[:80], "kind": kind_of(name), "start_us": start, "end_us": end}
        for name, start, end in kernels.of_one_round(ran)
    ]
    found = kernels.by_kernel(ran)
    rows = [
        (kernel["name"][:80], kernel["calls"], kernel["calls"] * kernel["mean_us"]) for kernel in found[:_KERNELS_NAMED]
    ]
    rest = found[_KERNELS_NAMED:]
    if rest:
        calls = sum(kernel["calls"] for kernel in rest)
        rows.append(("all others", calls, sum(kernel["calls"] * kernel["mean_us"] for kernel in rest)))
    summary = [
        {"name": name, "us_per_layer": time / kernels.ROUNDS, "calls_per_layer": calls / kernels.ROUNDS}
        for name, calls, time in rows
    ]
    return summary, timeline


def kind_of(name: str) -> str:
    """The work of a kernel."""
    return next((kind for kind, parts in _KINDS.items() if any(part in name for part in parts)), _OTHERS)


def table(sizes: list[dict[str, Any]]) -> str:
    """Markdown: a row for every size."""
    names = [contender["name"] for contender in sizes[0]["contenders"]]
    lines = [
        "| tokens a rank | experts alone | " + " | ".join(f"{name}, us" for name in names) + " | " +
        " | ".join(f"putget / {name}" for name in names[1:]) + " |",
        "|---" * (1 + 2 * len(names)) + "|",
    ]  # fmt: skip
    for size in sizes:
        cells = [f"{size['batch_size']}", f"{size['experts_us']:.1f}"]
        cells += [f"{contender['latency_us']:.1f}" for contender in size["contenders"]]
        cells += [f"{contender['ratio']:.3f}" for contender in size["contenders"][1:]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def breakdown_table(size: dict[str, Any]) -> str:
    """Markdown: microseconds a layer on rank 0, by what kernels do. Kernels of two streams run at the same time."""
    lines = [
        f"| {size['batch_size']} tokens a rank | " + " | ".join([*_KINDS, _OTHERS]) + " |",
        "|---" * (2 + len(_KINDS)) + "|",
    ]
    for contender in size["contenders"]:
        times = dict.fromkeys([*_KINDS, _OTHERS], 0.0)
        for kernel in contender["kernels"]:
            times[kind_of(kernel["name"])] += kernel["us_per_layer"]
        lines.append(f"| {contender['name']} | " + " | ".join(f"{time:.1f}" for time in times.values()) + " |")
    return "\n".join(lines)


def parse(arguments: list[str]) -> tuple[Settings, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ep_size", type=int, help="default: every GPU of this machine, or 4 CPU processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--weights", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--hidden_size", type=int, default=7168)
    parser.add_argument("--intermediate_size", type=int, default=2048)
    parser.add_argument("--num_experts", type=int, default=256)
    parser.add_argument("--top_k", type=int, default=8)
    parser.add_argument("--groups", type=int, nargs=2, default=(8, 4), metavar=("N", "K"))
    parser.add_argument("-b", type=int, default=8)
    parser.add_argument("-e", type=int, default=2048)
    parser.add_argument("-f", type=int, default=4)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--peers", default="nccl")
    parser.add_argument("--kernel_breakdown", action="store_true")
    parser.add_argument("--from_ids", action="store_true", help="the router's choice is made before")
    parser.add_argument("--zipf", action="store_true", help="ids of a Zipf distribution; no router")
    parser.add_argument("--few_ranks", type=int, default=0, help="so many ranks have few tokens; not with peers")
    parser.add_argument("--few_tokens", type=int, default=0, help="of such a rank")
    parser.add_argument("--tell", action="store_true", help="these ranks know how many tokens the others have")
    parser.add_argument("--no_shared", action="store_true", help="no shared expert")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_file", type=Path)
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu, with small sizes, checks this program")
    shape = ModelShape(
        given.hidden_size,
        given.intermediate_size,
        given.num_experts,
        given.top_k,
        given.groups[0],
        given.groups[1],
        given.weights,
        not given.no_shared,
    )
    settings = Settings(
        shape,
        given.ep_size or launch.world_size() or (torch.cuda.device_count() if given.device == "cuda" else 4),
        given.device,
        batch_sizes(given.b, given.e, None, given.f),
        given.iters,
        given.warmup,
        tuple(name for name in given.peers.split(",") if name),
        given.kernel_breakdown,
        given.seed,
        given.from_ids,
        given.zipf,
        given.few_ranks,
        given.few_tokens,
        given.tell,
    )
    return settings, given


def main(arguments: list[str]) -> int:
    """Runs the ranks, prints the table and writes the JSON."""
    settings, given = parse(arguments)
    sizes: list[dict[str, Any]] = []
    skipped: list[str] = []

    def on_event(event: launch.Event) -> None:
        if event["kind"] == "size":
            sizes.append(event["size"])
            if given.output_file is not None:  # after each size: a run that is ended keeps what it has
                report = {
                    "settings": asdict(settings),
                    "command": "python benchmarks/moe_layer.py " + " ".join(arguments),
                    "environment": environment.describe(),
                    "skipped": skipped,
                    "sizes": sizes,
                }
                given.output_file.write_text(json.dumps(report, indent=1) + "\n")
        else:
            if event["kind"] == "skipped":
                skipped.append(event["text"])
            print(event["text"], file=sys.stderr, flush=True)

    exit_code = launch.run(work, settings, settings.ep_size, settings.device, on_event)
    if launch.is_reporter() and sizes:
        print(table(sizes))
        for size in sizes:
            if all(contender["kernels"] for contender in size["contenders"]):
                print("\n" + breakdown_table(size))
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
