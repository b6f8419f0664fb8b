"""Metrics of a rank of ``putget serve``, as Prometheus text."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from putget_serve.garbage import Garbage


def text(manager: Any, garbage: Garbage) -> str:
    """The metrics of a rank: requests, tokens, passes, and the rounds of its expert layers.

    Args:
        manager: Of ``putget.adapters.transformers.batching_manager``.
        garbage: This rank's.
    """
    spread, done = manager.spread, manager.done
    rank = f'rank="{spread.comm.rank}"'
    scheduler = None if manager.batch_processor is None else manager.batch_processor.scheduler
    step = spread.lockstep
    active, waiting = (0, 0) if scheduler is None else (len(scheduler.active_requests), len(scheduler.waiting_requests))
    lines = [
        *_of(
            "requests_total",
            "counter",
            "Requests that have ended.",
            {f'{rank},end="{k}"': n for k, n in done.ends.items()},
        ),
        *_of("generated_tokens_total", "counter", "Tokens of requests that have ended.", {rank: done.tokens}),
        *_of(
            "requests",
            "gauge",
            "Requests under way.",
            {f'{rank},state="active"': active, f'{rank},state="waiting"': waiting},
        ),
        *_of(
            "passes_total",
            "counter",
            "Passes of all ranks, with tokens of this one or without.",
            {f'{rank},tokens="some"': step.number - step.idle_passes, f'{rank},tokens="none"': step.idle_passes},
        ),
    ]
    lines += _waits(spread.waits, rank) if manager.model.device.type == "cpu" else []
    lines += [
        "# HELP process_cpu_seconds_total Processor time of the rank's process.",
        "# TYPE process_cpu_seconds_total counter",
        f"process_cpu_seconds_total{{{rank}}} {time.process_time()}",
        *_of("garbage_runs_total", "counter", "Garbage collections between passes.", {rank: garbage.runs}),
        *_of("garbage_seconds_total", "counter", "Processor time of these.", {rank: garbage.seconds}),
        *_of("garbage_longest_seconds", "gauge", "Processor time of the longest.", {rank: garbage.longest_s}),
    ]
    if spread.balancer is not None:
        lines += [
            *_of("members", "gauge", "Ranks that take part.", {rank: len(spread.members)}),
            *_of("recoveries_total", "counter", "Time-outs behind which ranks went on.", {rank: spread.recoveries}),
            *_of("moves_total", "counter", "Experts that came to another rank.", {rank: spread.balancer.num_moves}),
            *_of("moved_bytes_total", "counter", "Bytes of these.", {rank: spread.balancer.moved_bytes}),
            *_loads(spread.balancer, spread.comm.size, rank),
        ]
    rounds = spread.layers[0].all_to_all
    return "\n".join(lines) + "\n" + ("" if rounds is None else rounds.metrics_text())


def _loads(balancer: Any, ep_size: int, rank: str) -> list[str]:
    """The load of experts as the balancer knows it: two numbers for each layer and one for each rank.

    A number for each expert would be thousands of series, so each layer tells its busiest rank and its busiest expert.
    """
    load = balancer.load
    if load is None:
        return []
    placement = balancer.placement
    shares = placement.rank_loads(load, ep_size).sum(axis=0) / max(load.sum(), 1.0)
    mean = load.mean(axis=1)
    busiest = [top / each if each else 1.0 for top, each in zip(load.max(axis=1), mean, strict=True)]
    return [
        *_of("rank_load", "gauge", "Share of all tokens' experts that a rank has.", _by(rank, "of", shares)),
        *_of(
            "layer_imbalance",
            "gauge",
            "Load of a layer's busiest rank over the mean of its ranks.",
            _by(rank, "layer", placement.imbalance(load, ep_size)),
        ),
        *_of(
            "layer_busiest_expert",
            "gauge",
            "Load of a layer's busiest expert over the mean of its experts.",
            _by(rank, "layer", busiest),
        ),
    ]


def _by(rank: str, label: str, values: Iterable[float]) -> dict[str, float]:
    return {f'{rank},{label}="{number}"': float(value) for number, value in enumerate(values)}


def _waits(waits: Any, rank: str) -> list[str]:
    """A histogram of the time that a pass spends in rounds."""
    name = "putget_serve_pass_wait_seconds"
    marks = [*(f"{bound:g}" for bound in waits.BOUNDS_S), "+Inf"]
    counts = list(itertools.accumulate(waits.counts))
    return [
        f"# HELP {name} Time in rounds of a pass with tokens: the wait for slower ranks, and the copies.",
        f"# TYPE {name} histogram",
        *(f'{name}_bucket{{{rank},le="{mark}"}} {count}' for mark, count in zip(marks, counts, strict=True)),
        f"{name}_sum{{{rank}}} {waits.seconds}",
        f"{name}_count{{{rank}}} {counts[-1]}",
    ]


def _of(name: str, kind: str, what: str, values: Mapping[str, float]) -> list[str]:
    name = f"putget_serve_{name}"
    head = [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{{{labels}}} {value}" for labels, value in values.items()]
