"""`putget roofline` on the side of the user."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from putget import hardware
from putget_bench import environment, launch
from putget_bench.outputs import check_writable
from putget_bench.progress import RunProgress, make_console
from putget_bench.report import new_table
from putget_bench.roofline import RooflineSettings, measure
from putget_bench.settings import resolve_device, resolve_ep_size, why_cpu
from putget_bench.traffic import readable

SCHEMA = "putget.roofline/3"
_SIZES = {"cuda": (64 << 10, 1 << 20, 16 << 20, 64 << 20), "cpu": (64 << 10, 1 << 20, 4 << 20)}
_SMS = (4, 8, 16, 32, 64)
_ROWS = (7456, 14336)  # of dispatch and combine of the profile deepseek_v3
_TOKENS = (128, 512, 2048, 8192)


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures the link and reports it. Raises ValueError if a flag is wrong, before anything starts."""
    check_writable("--output_file", args.output_file)
    device = resolve_device(args.device, args.ep_size)
    ep_size = resolve_ep_size(args.ep_size, device, launch.world_size())
    iters = args.iters if args.iters is not None else (20 if device == "cpu" else 50)
    if iters < 1:
        raise ValueError(f"--iters must be 1 or more, got {iters}")
    sms: tuple[int | None, ...] = (None,)
    if device == "cuda":
        sms = (*(count for count in _SMS if count < hardware.gpus()[0].num_sms), None)
    settings = RooflineSettings(ep_size, device, _SIZES[device], sms, _ROWS, _TOKENS, iters)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        **environment.describe(args.commit),
        "command": list(command),
        "config": {"ep_size": ep_size, "device": device, "iters": iters},
        "barrier_us": None,
        "rates": [],
        "row_rates": [],
    }
    console = make_console(quiet=not launch.is_reporter())
    warning = why_cpu(args.device, device, ep_size)
    if warning is not None:
        console.print(warning, soft_wrap=True)
    with RunProgress(console, "putget roofline", (2 * len(sms) + 1) * len(settings.sizes)) as progress:
        progress.stage(f"starting {ep_size} ranks on {device}")

        def on_event(event: dict[str, Any]) -> None:
            if event["kind"] == "barrier":
                document["barrier_us"] = event["latency_us"]
            elif event["kind"] == "rate":
                rate = event["rate"]
                document["rates"].append(rate)
                size = readable(rate["bytes_per_peer"])
                progress.stage(f"{rate['kind']} of {size} with each peer: {rate['gbps']:.3g} GB/s")
                progress.advance()
            elif event["kind"] == "row_rate":
                document["row_rates"].append(event["rate"])

        exit_code = launch.run(measure, settings, ep_size, device, on_event)
    if not launch.is_reporter():
        return exit_code
    if document["rates"]:
        console.print("\nGB/s of one rank with all its peers, by bytes to each; slowest rank, median", style="bold")
        console.print(_table(document))
    if document["row_rates"]:
        console.print("\nThe same with rows to and from random peers, by tokens a rank", style="bold")
        console.print(_row_table(document["row_rates"]))
    console.print(f"A barrier between all ranks takes {document['barrier_us']:.2f} us: a dispatch without tokens.")
    if ep_size == 1:
        console.print("One rank has no peer to move bytes to: pass --ep_size 2 or more.")
    if args.output_file is not None:
        Path(args.output_file).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.print(f"report: {args.output_file}", soft_wrap=True)
    return exit_code


def _table(document: dict[str, Any]) -> Table:
    sizes = sorted({rate["bytes_per_peer"] for rate in document["rates"]})
    on_cuda = document["config"]["device"] == "cuda"
    table = new_table("transfer", *(("SMs",) if on_cuda else ()), *(readable(size) for size in sizes))
    rows: dict[tuple[str, int | None], dict[int, float]] = {}
    for rate in document["rates"]:
        rows.setdefault((rate["kind"], rate["num_sms"]), {})[rate["bytes_per_peer"]] = rate["gbps"]
    for (kind, num_sms), found in rows.items():
        cells = [kind]
        if on_cuda:
            cells.append("all" if num_sms is None else str(num_sms))
        table.add_row(*cells, *(f"{found[size]:.3g}" for size in sizes))
    return table


def _row_table(rates: list[dict[str, Any]]) -> Table:
    counts = sorted({rate["num_tokens"] for rate in rates})
    table = new_table("rows", "bytes each", *(str(count) for count in counts))
    rows: dict[tuple[str, int], dict[int, float]] = {}
    for rate in rates:
        rows.setdefault((rate["kind"], rate["row_bytes"]), {})[rate["num_tokens"]] = rate["gbps"]
    for (kind, row_bytes), found in rows.items():
        table.add_row(kind, str(row_bytes), *(f"{found[count]:.3g}" for count in counts))
    return table
