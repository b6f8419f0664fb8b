"""`python -m putget_transfer.kv bench`: requests between two processes of this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from putget_transfer._files import check_places
from putget_transfer.kv import _bench
from putget_transfer.kv._simulate import MODELS
from putget_transfer.kv._table import show

NETWORKS = ("tcp", "host")


def add(command: argparse.ArgumentParser) -> None:
    """Give a parser this command's options."""
    command.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NETWORK")
    command.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS), metavar="MODEL")
    for name, default, text in (
        ("tokens", 4096, "tokens of a prompt: 288 MB and 1.34 GB"),
        ("rounds", 7, "rounds whose median counts"),
        ("samples", 200, "samples of the word's latency"),
    ):
        command.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    command.add_argument("--output_file", type=Path, help="write all of it as JSON")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, and show what came of it.

    Raises:
        ValueError: An option is out of range, or a file cannot be written; the option is named.
    """
    for name in ("tokens", "rounds", "samples"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}: {getattr(options, name)} came; at least 1 is needed")
    check_places(options, "output_file")
    shapes = {
        name: _bench.Shape(MODELS[name].model, MODELS[name].page_tokens, options.tokens) for name in options.models
    }
    load = os.getloadavg()[0]
    found = _bench.report(
        options.networks, shapes, options.rounds, options.samples, lambda text: sys.stderr.write(text + "\n")
    )
    found["machine"] = {"processors": os.cpu_count(), "load": load, "system": platform.platform()}
    rows = [
        (
            row["network"],
            row["name"],
            f"{row['num_bytes'] / 1e6:.0f}",
            *(f"{row['seconds'][kind] * 1e3:.1f}" for kind in ("request", "paged", "memcpy")),
            f"{row['of_paged']:.0%}",
            f"{row['of_memcpy']:.0%}",
        )
        for row in found["transfers"]
    ]
    names = ("network", "model", "MB", "request ms", "paged ms", "memcpy ms", "of paged", "of memcpy")
    show("From all pages ready to the decoder's knowledge (medians)", names, rows)
    for table, title, kinds, what in (
        ("first_writes", "From the word to the decoder's knowledge of one page", ("ready", "held"), "lock"),
        ("begin_steps", "begin_step of 32 requests", ("alone", "asked"), "requests"),
    ):
        rows = [
            (row["network"], kind, str(row[kind]["count"]), f"{row[kind]['p50_us']:.0f}", f"{row[kind]['p99_us']:.0f}")
            for row in found[table]
            for kind in kinds
        ]
        show(title, ("network", what, "samples", "p50 us", "p99 us"), rows)
    rows = [
        (row["network"], kind, *(f"{row[kind]['posted'][name]:.0f}" for name in ("count", "p50_us", "p99_us")))
        for row in found["first_writes"]
        for kind in ("ready", "held")
    ]
    show(
        "From the sight of the word to the posted write", ("network", "lock", "samples", "p50 us <=", "p99 us <="), rows
    )
    if options.output_file:
        options.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
