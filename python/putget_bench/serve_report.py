"""The report of `putget serve-bench`: the JSON document (docs/reference/serve_json.md) and the tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from typing import Any

import numpy as np
from rich.console import Console

from putget_bench import environment
from putget_bench.report import Document, new_table

SCHEMA = "putget.serve/1"


def schema() -> Document:
    """The JSON schema of the report."""
    text = (files("putget_bench") / "schema" / "serve-1.schema.json").read_text(encoding="utf-8")
    loaded: Document = json.loads(text)
    return loaded


def new_document(config: dict[str, Any], command: Sequence[str], commit: str | None) -> Document:
    """The report before any request was sent; see `environment.describe` for the commit."""
    return {
        "schema": SCHEMA,
        **environment.describe(commit),
        "command": list(command),
        "config": config,
        "load_generator": {"name": "aiperf", "version": None},
        "results": [],
    }


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the clients of one load saw.

    Args:
        records: aiperf's, of all requests.
    """
    well = [record["metrics"] for record in records if not record.get("error")]
    ends = [record["metadata"]["request_end_ns"] for record in records]
    seconds = (max(ends) - min(record["metadata"]["request_start_ns"] for record in records)) / 1e9
    tokens = sum(int(_value(one, "output_sequence_length") or 0) for one in well)
    return {
        "requests": len(records),
        "errors": dict(Counter(_kind(record["error"]) for record in records if record.get("error"))),
        "seconds": seconds,
        "prompt_tokens": sum(int(_value(one, "input_sequence_length") or 0) for one in well),
        "output_tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds > 0 else None,
        "requests_per_s": len(well) / seconds if seconds > 0 else None,
        "first_token_ms": _spread([_value(one, "time_to_first_token") for one in well]),
        "between_tokens_ms": _spread([_value(one, "inter_token_latency") for one in well]),
        "between_chunks_ms": _spread(chain.from_iterable(_value(one, "inter_chunk_latency") or () for one in well)),
        "request_ms": _spread([_value(one, "request_latency") for one in well]),
    }


def show(document: Document, console: Console) -> None:
    """Prints the report's tables."""
    config = document["config"]
    marks = "p50 / p99 / max"
    table = new_table("load", "requests", "errors", "tokens/s", "first token, ms", "between tokens, ms", "chunks, ms")
    for result in document["results"]:
        table.add_row(
            load_name(result["load"]),
            str(result["requests"]),
            str(sum(result["errors"].values())),
            "-" if result["tokens_per_s"] is None else f"{result['tokens_per_s']:.1f}",
            *(_cells(result[name]) for name in ("first_token_ms", "between_tokens_ms", "between_chunks_ms")),
        )
    console.print(
        f"{config['model']}: prompts of {config['prompt_tokens']} tokens, answers of {config['output_tokens']}; "
        f"{marks}",
        soft_wrap=True,
    )
    console.print(table)
    if any(result["server"] and result["server"]["ranks"] for result in document["results"]):
        console.print("Ranks: a pass with tokens waits in its rounds for the slowest rank", soft_wrap=True)
        console.print(_ranks(document))
    for result in document["results"]:
        for kind, count in sorted(result["errors"].items()):
            console.print(f"{load_name(result['load'])}: {count} x {kind}", soft_wrap=True)


def load_name(load: dict[str, Any]) -> str:
    """One load in words."""
    return f"{load['rate']:g}/s" if load["rate"] is not None else f"{load['concurrency']} at once"


def _ranks(document: Document) -> Any:
    table = new_table("load", "rank", "passes", "idle", "wait mean, ms", "p50", "p99", "processor, s")
    for result in document["results"]:
        for one in (result["server"] or {"ranks": []})["ranks"]:
            wait = one["wait_ms"] or {}
            table.add_row(
                load_name(result["load"]),
                str(one["rank"]),
                str(one["passes"]),
                str(one["idle_passes"]),
                *(f"{wait[mark]:.2f}" if mark in wait else "-" for mark in ("mean", "p50", "p99")),
                f"{one['cpu_s']:.2f}",
            )
    return table


def _cells(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else " / ".join(f"{spread[mark]:.1f}" for mark in ("p50", "p99", "max"))


def _value(metrics: dict[str, Any], name: str) -> Any:
    return metrics[name]["value"] if name in metrics else None


def _kind(error: dict[str, Any]) -> str:
    code = f"HTTP {error['code']} " if error.get("code") else ""
    return f"{code}{error.get('type') or 'error'}"


def _spread(values: Any) -> dict[str, float] | None:
    """Percentiles of the values that are there."""
    there = np.array([value for value in values if value is not None], dtype=np.float64)
    if not there.size:
        return None
    p50, p99 = np.percentile(there, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": float(there.max()), "count": int(there.size)}
