"""The work of one rank of `putget bench`: check a size, then time every contender on it, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from putget import Communicator
from putget_bench import kernels, peers, traffic, variants
from putget_bench.contender import PHASES, Contender, NoWaits, Putget, Round
from putget_bench.launch import Emit, RankContext
from putget_bench.lineup import Entry, Lineup
from putget_bench.profiles import dispatch_row_bytes
from putget_bench.roofline import Ceiling, Link, make_timer
from putget_bench.rounds import Rounds
from putget_bench.settings import Settings
from putget_bench.timing import Step, Timer, median, percentiles, series_length, slowest

_CEILING_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # per peer: long enough that the start of a kernel does not show
_PAIRS = {"cuda": 50, "cpu": 5}  # back to back in one reading


def measure(context: RankContext, settings: Settings, emit: Emit) -> int:
    """Runs the whole bench on one rank.

    Emits "network" where one joins domains, "ceiling", "peers", "workspace", then "size" per size, or "mismatch".
    "peers" comes again if one drops out.

    Returns:
        0, or 1 if a result was wrong. The same on every rank.
    """
    communicator = Communicator(network=settings.make_network())
    if communicator.network is not None:
        emit({"kind": "network", "network": settings.network or "auto"})
    # The link is the memory that ranks share, also where they were told to be in domains.
    sharing = communicator if settings.network is None else Communicator()
    device = context.device.type
    emit({"kind": "stage", "text": "measuring the link"})
    link = Link(sharing, context, _CEILING_BYTES[device], settings.cuda_graph)
    ceiling = link.ceiling(_CEILING_BYTES[device], min(settings.iters, 20))
    timer = make_timer(context.device, link.barrier, settings.cuda_graph, settings.flush)
    clock = Clock(ceiling, _empty_reading(timer, settings.iters))
    emit({"kind": "ceiling", "ceiling": asdict(ceiling), "empty_us": clock.empty_us})

    emit({"kind": "stage", "text": "making inputs and workspaces"})
    domain_of = None if communicator.network is None else communicator.domain_of
    rounds = Rounds(context.rank, context.device, domain_of)
    experts = rounds.experts(settings)
    ours = (NoWaits if settings.no_sync else Putget)(communicator, settings, experts, context.device)
    emit({"kind": "workspace", "map": ours.memory_map()})
    ablated = variants.make(settings.ablate, communicator, settings, rounds, context.device)
    others = peers.make(settings.peers, settings, experts, context.device)
    lineup = Lineup(Entry(ours, settings), ablated, *others, emit)

    exit_code = 0
    for num_tokens in settings.batches:
        emit({"kind": "stage", "text": f"{num_tokens} tokens a rank: checking"})
        present, wrong = lineup.load(rounds, num_tokens)
        if _any_wrong(wrong, num_tokens, emit):
            exit_code = 1
            break
        emit({"kind": "stage", "text": f"{num_tokens} tokens a rank: timing"})
        readings = time_contenders(timer, present, settings, _PAIRS[device])
        if _any_wrong({entry.name: entry.contender.verify() for entry in present}, num_tokens, emit):
            exit_code = 1
            break
        counted = {
            kind: count_bytes(kind, rounds.make(kind, num_tokens), domain_of)
            for kind in {entry.settings for entry in present}
        }
        results = []
        for entry in present:
            moved = counted[entry.settings]
            found = summarise(entry, readings[entry.name], readings[ours.name], moved, clock, settings.iter_stats)
            if settings.kernel_breakdown and device == "cuda":
                found["kernels"] = kernels.breakdown(entry.contender, settings.cuda_graph)
            results.append(found)
        emit({
            "kind": "size",
            "size": {
                "batch_size": num_tokens,
                "checked": not settings.no_sync,
                "bytes": asdict(counted[settings]),
                "contenders": results,
            },
        })  # fmt: skip
    lineup.close()
    link.close()
    communicator.close()
    sharing.close()
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


@dataclass(frozen=True)
class Clock:
    """The values that latencies are held against.

    Attributes:
        ceiling: what the link does.
        empty_us: what the clock reads around nothing, where it stands around each phase; 0 if it was not read.
    """

    ceiling: Ceiling
    empty_us: float

    def link_us(self, phase: str, dispatch_bytes: float, combine_bytes: float, combine_stores: bool) -> float | None:
        """The time that the bytes of a phase take at the ceiling; None where there is no peer."""
        write, read = self.ceiling.write_gbps, self.ceiling.read_gbps
        if write is None or read is None:
            return None
        written = dispatch_bytes if phase != "combine" else 0
        back = combine_bytes if phase != "dispatch" else 0
        return (written / write + back / (write if combine_stores else read)) / 1e3

    def around(self, phase: str) -> float:
        """The part of a phase's latency that the clock itself takes. Pairs follow each other, so they share one."""
        return 0.0 if phase == "pair" else self.empty_us


def _empty_reading(timer: Timer, iters: int) -> float:
    """The clock's time around nothing: it is part of every latency of a single phase."""
    series = timer.steps([Step(lambda: None, "empty")], min(iters, 50))
    return median(slowest([series() for _ in range(2)][1:])["empty"])


def time_contenders(
    timer: Timer, entries: Sequence[Entry], settings: Settings, pairs: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Times all contenders in turns, so that whatever else happens on the machine meets all of them alike.

    Returns:
        By contender and phase: microseconds of the slowest rank, one per iteration ("pair": one per series).
    """
    length, num_series = series_length(settings.iters)
    num_warmup = -(-settings.warmup // length) if settings.warmup else 0
    phases, back_to_back = {}, {}
    for entry in entries:
        contender = entry.contender
        dispatch, combine = (phase if phase in entry.phases else None for phase in ("dispatch", "combine"))
        phases[entry.name] = timer.steps(
            [
                Step(contender.dispatch, dispatch, flush=True),
                Step(contender.write_rows),
                Step(contender.combine, combine),
            ],
            length,
        )

        def pair(contender: Contender = contender) -> None:
            contender.dispatch()
            contender.combine()

        if "pair" in entry.phases:
            back_to_back[entry.name] = timer.back_to_back("pair", pair, pairs)
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


def count_bytes(settings: Settings, round_: Round, domain_of: tuple[int, ...] | None = None) -> traffic.Traffic:
    """The bytes of one round of this size."""
    shape = traffic.Shape(
        ep_size=settings.ep_size,
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        max_tokens_per_rank=settings.max_tokens_per_rank,
        dispatch_row_bytes=dispatch_row_bytes(settings.payloads(), settings.top_k),
        combine_row_bytes=settings.output().row_bytes,
    )
    return traffic.count(shape, [sent.topk_ids for sent in round_.inputs], domain_of)


def summarise(
    entry: Entry,
    readings: dict[str, torch.Tensor],
    ours: dict[str, torch.Tensor],
    counted: traffic.Traffic,
    clock: Clock,
    with_percentiles: bool,
) -> dict[str, Any]:
    """Latencies, rates and ratios of one contender at one size, as the report has them."""
    dispatch_wire, combine_wire = entry.contender.wire_bytes(counted)
    wire = {"dispatch": dispatch_wire, "combine": combine_wire, "pair": dispatch_wire + combine_wire}
    algorithm = {
        "dispatch": counted.dispatch_algorithm,
        "combine": counted.combine_algorithm,
        "pair": counted.dispatch_algorithm + counted.combine_algorithm,
    }
    sends_rows = isinstance(entry.contender, Putget) and entry.contender.sends_rows()
    result: dict[str, Any] = {"name": entry.name, "group": entry.group, "changes": entry.changes}
    for phase in PHASES:
        if phase not in entry.phases:
            result[phase] = None
            continue
        latency_us = median(readings[phase])
        link_us = clock.link_us(phase, dispatch_wire, combine_wire, sends_rows)
        result[phase] = {
            "latency_us": latency_us,
            "algorithm_gbps": traffic.gigabytes_per_second(algorithm[phase], latency_us),
            "wire_bytes": wire[phase],
            "wire_gbps": traffic.gigabytes_per_second(wire[phase], latency_us),
            "ceiling_fraction": None if link_us is None else link_us / latency_us,
            "floor_us": None if link_us is None else link_us + clock.around(phase),
            "ratio": median(ours[phase]) / latency_us,
            "num_readings": len(readings[phase]),
            "percentiles_us": percentiles(readings[phase]) if with_percentiles else None,
        }
    result["kernels"] = None
    return result
