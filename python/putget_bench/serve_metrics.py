"""Reads a server's `/metrics`: passes of its ranks, the wait in them, processor time."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

_ASKS = 32  # all ranks listen on one port: of four ranks, one is missed once in ten thousand times
_PATIENCE_S = 10.0
_SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_WAIT = "putget_serve_pass_wait_seconds"
Samples = dict[str, float]


def read(url: str) -> dict[str, Samples]:
    """The samples of each rank that answers, by their names with labels; of servers without ranks under "".

    Empty if the server has no metrics.
    """
    found: dict[str, Samples] = {}
    for _ in range(_ASKS):
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=_PATIENCE_S) as answer:
                text = answer.read().decode(errors="replace")
        except (OSError, urllib.error.URLError):
            return found
        samples, ranks = samples_of(text)
        found[ranks] = samples
        if not ranks:
            break
    return found


def samples_of(text: str) -> tuple[Samples, str]:
    """The samples of a text, and the rank that it is of; "" where it names none."""
    samples, rank = {}, ""
    for name, words, value in _SAMPLE.findall(text):
        labels = dict(_LABEL.findall(words))
        if name.startswith("putget_serve_"):
            rank = labels.get("rank", rank)
        rest = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels) if key != "rank")
        samples[f"{name}{{{rest}}}"] = float(value)
    return samples, rank


def between(before: dict[str, Samples], after: dict[str, Samples], tokens: int) -> dict[str, Any] | None:
    """The passes, waits and processor time between two readings; None where the server tells no processor time.

    Args:
        before: A reading.
        after: A later one.
        tokens: Tokens that came in the meantime.
    """
    ranks = {rank: _minus(samples, before[rank]) for rank, samples in after.items() if rank in before}
    cpu = [samples["process_cpu_seconds_total{}"] for samples in ranks.values() if _has_cpu(samples)]
    if not cpu:
        return None
    return {
        "cpu_s": sum(cpu),
        "cpu_ms_per_token": 1e3 * sum(cpu) / tokens if tokens else None,
        "ranks": [_rank(int(rank), ranks[rank]) for rank in sorted(ranks, key=lambda rank: int(rank or 0)) if rank],
    }


def _has_cpu(samples: Samples) -> bool:
    return "process_cpu_seconds_total{}" in samples


def _rank(rank: int, samples: Samples) -> dict[str, Any]:
    passes = {name: int(samples.get(f'putget_serve_passes_total{{tokens="{name}"}}', 0.0)) for name in ("some", "none")}
    return {
        "rank": rank,
        "passes": passes["some"],
        "idle_passes": passes["none"],
        "cpu_s": samples["process_cpu_seconds_total{}"],
        "wait_ms": _wait(samples),
    }


def _wait(samples: Samples) -> dict[str, float] | None:
    """Time in rounds of a pass with tokens; None where there is no such pass, or the server does not time them."""
    buckets = [
        (float(name.split('le="')[1].split('"')[0]), count)
        for name, count in samples.items()
        if name.startswith(f"{_WAIT}_bucket")
    ]
    count = samples.get(f"{_WAIT}_count{{}}", 0.0)
    if not count:
        return None
    counted = sorted(buckets)
    return {
        "mean": 1e3 * samples[f"{_WAIT}_sum{{}}"] / count,
        "p50": 1e3 * quantile(counted, 0.5),
        "p99": 1e3 * quantile(counted, 0.99),
    }


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """A quantile of a histogram, linear within a bucket, as Prometheus has it.

    Args:
        buckets: Upper bound, and how many values are no larger; ascending, the last bound is infinite.
        share: From 0 to 1.
    """
    wanted, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def _minus(after: Samples, before: Samples) -> Samples:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
