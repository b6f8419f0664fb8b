"""The work of one rank of `putget bench`: check a size, then time every contender on it, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from putget import Communicator
from putget.bench import peers, traffic
from putget.bench.contender import Contender, Putget, Round, make_round, with_output
from putget.bench.inputs import Source, StandInExperts
from putget.bench.launch import Emit, RankContext
from putget.bench.lineup import Lineup
from putget.bench.profiles import dispatch_row_bytes
from putget.bench.roofline import Ceiling, Link, make_timer
from putget.bench.settings import Settings
from putget.bench.timing import Step, Timer, median, percentiles, series_length, slowest

_CEILING_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # per peer: long enough that the start of a kernel does not show
_PAIRS = {"cuda": 50, "cpu": 5}  # back to back in one reading
_PROFILED = 20  # rounds under the profiler
PHASES = ("dispatch", "combine", "pair")


def measure(context: RankContext, settings: Settings, emit: Emit) -> int:
    """Runs the whole bench on one rank.

    Emits "ceiling", "peers", "workspace", then "size" per size, or "mismatch". "peers" comes again if one drops out.

    Returns:
        0, or 1 if a result was wrong. The same on every rank.
    """
    communicator = Communicator()
    device = context.device.type
    emit({"kind": "stage", "text": "measuring the link"})
    link = Link(communicator, context, _CEILING_BYTES[device], settings.cuda_graph)
    ceiling = link.ceiling(_CEILING_BYTES[device], min(settings.iters, 20))
    timer = make_timer(context.device, link.barrier, settings.cuda_graph, settings.flush_l2)
    emit({"kind": "ceiling", "ceiling": asdict(ceiling), "empty_us": _empty_reading(timer, settings.iters)})

    emit({"kind": "stage", "text": "making inputs and workspaces"})
    source = Source(settings, context.device)
    experts = StandInExperts(settings, context.device)
    ours = Putget(communicator, settings, experts, context.device)
    lineup = Lineup(ours, *peers.make(settings.peers, settings, experts, context.device), emit)
    emit({"kind": "workspace", "map": ours.memory_map()})

    exit_code = 0
    for num_tokens in settings.batches:
        emit({"kind": "stage", "text": f"{num_tokens} tokens a rank: checking"})
        round_ = with_output(settings, experts, make_round(settings, source, context.rank, num_tokens))
        present, wrong = lineup.load(round_)
        if _any_wrong(wrong, num_tokens, emit):
            exit_code = 1
            break
        emit({"kind": "stage", "text": f"{num_tokens} tokens a rank: timing"})
        readings = time_contenders(timer, present, settings, _PAIRS[device])
        if _any_wrong({contender.name: contender.verify() for contender in present}, num_tokens, emit):
            exit_code = 1
            break
        counted = count_bytes(settings, round_)
        emit({
            "kind": "size",
            "size": {
                "batch_size": num_tokens,
                "checked": True,
                "bytes": asdict(counted),
                "contenders": [
                    summarise(contender, readings[contender.name], readings[ours.name], counted, ceiling, settings)
                    for contender in present
                ],
                "kernels": kernel_breakdown(ours, context) if settings.kernel_breakdown else None,
            },
        })  # fmt: skip
    lineup.close()
    link.close()
    communicator.close()
    return exit_code


def _any_wrong(found: dict[str, str | None], num_tokens: int, emit: Emit) -> bool:
    """Agrees between the ranks whether a result was wrong, and reports every finding of every rank."""
    mine = [f"{name}: {text}" for name, text in found.items() if text]
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, texts in enumerate(everyone):
        for text in texts:
            emit({"kind": "mismatch", "text": f"{num_tokens} tokens a rank: rank {rank}: {text}"})
    return any(everyone)


def _empty_reading(timer: Timer, iters: int) -> float:
    """What the clock reads around nothing: it is part of every latency of a single phase."""
    series = timer.steps([Step(lambda: None, "empty")], min(iters, 50))
    return median(slowest([series() for _ in range(2)][1:])["empty"])


def time_contenders(
    timer: Timer, contenders: Sequence[Contender], settings: Settings, pairs: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Times all contenders in turns, so that whatever else happens on the machine meets all of them alike.

    Returns:
        By contender and phase: microseconds of the slowest rank, one per iteration ("pair": one per series).
    """
    length, num_series = series_length(settings.iters)
    num_warmup = -(-settings.warmup // length) if settings.warmup else 0
    phases, back_to_back = {}, {}
    for contender in contenders:
        phases[contender.name] = timer.steps(
            [
                Step(contender.dispatch, "dispatch", flush_l2=True),
                Step(contender.write_rows),
                Step(contender.combine, "combine"),
            ],
            length,
        )

        def pair(contender: Contender = contender) -> None:
            contender.dispatch()
            contender.combine()

        back_to_back[contender.name] = timer.back_to_back("pair", pair, pairs)
    collected: dict[str, dict[str, torch.Tensor]] = {}
    for series_of in (phases, back_to_back):
        readings: dict[str, list[dict[str, list[float]]]] = {name: [] for name in series_of}
        for index in range(num_warmup + num_series):
            for name, series in series_of.items():
                taken = series()
                if index >= num_warmup:
                    readings[name].append(taken)
        for name, taken_all in readings.items():
            collected.setdefault(name, {}).update(slowest(taken_all))
    return collected


def count_bytes(settings: Settings, round_: Round) -> traffic.Traffic:
    """The bytes of one round of this size."""
    shape = traffic.Shape(
        ep_size=settings.ep_size,
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        max_tokens_per_rank=settings.max_tokens_per_rank,
        dispatch_row_bytes=dispatch_row_bytes(settings.payloads(), settings.top_k),
        combine_row_bytes=settings.output().row_bytes,
    )
    return traffic.count(shape, [sent.topk_ids for sent in round_.inputs])


def summarise(
    contender: Contender,
    readings: dict[str, torch.Tensor],
    ours: dict[str, torch.Tensor],
    counted: traffic.Traffic,
    ceiling: Ceiling,
    settings: Settings,
) -> dict[str, Any]:
    """Latencies, rates and ratios of one contender at one size, as the report has them."""
    dispatch_wire, combine_wire = contender.wire_bytes(counted)
    wire = {"dispatch": dispatch_wire, "combine": combine_wire, "pair": dispatch_wire + combine_wire}
    algorithm = {
        "dispatch": counted.dispatch_algorithm,
        "combine": counted.combine_algorithm,
        "pair": counted.dispatch_algorithm + counted.combine_algorithm,
    }
    result: dict[str, Any] = {"name": contender.name}
    for phase in PHASES:
        latency_us = median(readings[phase])
        floor_us = 0.0
        for part, rate in (("dispatch", ceiling.write_gbps), ("combine", ceiling.read_gbps)):
            if phase in (part, "pair") and rate is not None:
                floor_us += wire[part] / rate / 1e3
        result[phase] = {
            "latency_us": latency_us,
            "algorithm_gbps": traffic.gigabytes_per_second(algorithm[phase], latency_us),
            "wire_gbps": traffic.gigabytes_per_second(wire[phase], latency_us),
            "ceiling_fraction": floor_us / latency_us if ceiling.write_gbps is not None else None,
            "ratio": median(ours[phase]) / latency_us,
            "percentiles_us": percentiles(readings[phase]) if settings.iter_stats else None,
        }
    return result


def kernel_breakdown(ours: Putget, context: RankContext) -> list[dict[str, Any]]:
    """Mean time of every kernel of a round on this rank, by torch's profiler; empty on the CPU."""
    if context.device.type != "cuda":
        return []
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED):
            ours.dispatch()
            ours.write_rows()
            ours.combine()
        torch.cuda.synchronize()
    dist.barrier()
    return [
        {"name": event.key, "calls": event.count, "mean_us": event.device_time_total / event.count}
        for event in sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
        if event.device_time_total > 0
    ]
