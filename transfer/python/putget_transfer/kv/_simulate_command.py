"""`python -m putget_transfer.kv simulate`: the check of the NICs' parameters, then times to the first token."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from putget_transfer._files import check_places
from putget_transfer.kv._simulate import MODELS, NICS, PUBLISHED, Nic, Row, Setting, simulate
from putget_transfer.kv._table import show

CHECKED_KIB = (8, 16)
TOKENS = [1024 << power for power in range(8)]


def add(command: argparse.ArgumentParser) -> None:
    """Give a parser this command's options."""
    command.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS), metavar="MODEL")
    command.add_argument("--nics", nargs="+", choices=sorted(NICS), default=sorted(NICS), metavar="NIC")
    command.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="lengths of prompts")
    for name, default, text in (
        ("chunk_tokens", 8192, "tokens of one forward step"),
        ("gpus", 8, "GPUs of the prefill"),
        ("prefill_tp", 1, "prefill ranks that send, each with a NIC"),
        ("decode_tp", 1, "decode ranks, each with a NIC"),
    ):
        command.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    for name, value, text in (
        ("tflops", 400.0, "10^12 operations per second that a GPU of the prefill comes to"),
        ("latency_us", 20.0, "from the last write to the decoder's knowledge"),
    ):
        command.add_argument(f"--{name}", type=float, default=value, help=f"{text} (default {value:g})")
    command.add_argument("--output_file", type=Path, help="write all of it as JSON")
    command.add_argument("--plot", type=Path, help="draw it; the suffix gives the format (needs matplotlib)")
    command.set_defaults(run=run)


def check() -> list[dict[str, object]]:
    """Return what the parameters from 1 and 64 KiB say of the published sizes between them."""
    return [
        {
            "nic": name,
            "page_kib": kib,
            "predicted_gbit_per_s": nic.gigabits_per_s(kib << 10),
            "published_gbit_per_s": PUBLISHED[name][kib][0],
            "error": nic.gigabits_per_s(kib << 10) / PUBLISHED[name][kib][0] - 1,
        }
        for name, nic in sorted(NICS.items())
        for kib in CHECKED_KIB
    ]


def run(options: argparse.Namespace) -> None:
    """Simulate, and show what came of it.

    Raises:
        ValueError: An option is out of range, or a file cannot be written; the option is named.
    """
    for name in ("chunk_tokens", "gpus", "prefill_tp", "decode_tp", "tflops"):
        if getattr(options, name) <= 0:
            raise ValueError(f"{name}: {getattr(options, name)} came; more than 0 is needed")
    if options.latency_us < 0:
        raise ValueError(f"latency_us: {options.latency_us:g} came; at least 0 is needed")
    if min(options.tokens) < 1:
        raise ValueError(f"tokens: {min(options.tokens)} came; each prompt has at least 1")
    check_places(options, "output_file", "plot")
    setting = Setting(
        operations_per_s=options.tflops * 1e12 * options.gpus,
        chunk_tokens=options.chunk_tokens,
        latency_s=options.latency_us * 1e-6,
        prefill_tp=options.prefill_tp,
        decode_tp=options.decode_tp,
    )
    nics = [NICS[name] for name in options.nics]
    rows = [
        simulate(model, nic, tokens, setting)
        for model in options.models
        for nic in nics
        for tokens in sorted(options.tokens)
    ]
    _print(nics, rows)
    if options.output_file:
        assumed = {name: getattr(options, name) for name in ("chunk_tokens", "gpus", "tflops", "latency_us")}
        document = {
            "schema": "putget_transfer.kv.simulate/1",
            "nics": [vars(nic) for nic in nics],
            "check": check(),
            "assumed": {**assumed, "prefill_tp": options.prefill_tp, "decode_tp": options.decode_tp},
            "results": [row.dictionary() for row in rows],
        }
        options.output_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw(rows, options.plot)


def _print(nics: Sequence[Nic], rows: Sequence[Row]) -> None:
    lines = [
        (
            str(line["nic"]),
            str(line["page_kib"]),
            f"{line['predicted_gbit_per_s']:.0f}",
            f"{line['published_gbit_per_s']:.0f}",
            f"{line['error']:+.1%}",
        )
        for line in check()
        if line["nic"] in {nic.name for nic in nics}
    ]
    show("Paged writes: two parameters per NIC", ("NIC", "KiB", "predicted Gbit/s", "published", "error"), lines)
    shown = [
        (
            row.model,
            row.nic,
            str(row.tokens),
            str(row.num_writes),
            f"{row.num_bytes / 1e6:.0f}",
            f"{row.prefill_s * 1e3:.1f}",
            f"{row.transfer_s * 1e3:.2f}",
            f"{row.after_s * 1e3:.1f}",
            f"{row.layerwise_s * 1e3:.1f}",
            f"{1 - row.layerwise_s / row.after_s:.1%}",
        )
        for row in rows
    ]
    names = ("model", "NIC", "tokens", "writes", "MB", "prefill ms", "transfer ms", "after ms", "by layer ms", "saved")
    show("Time until the decoder has the first token and all pages", names, shown)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw both times over the length of the prompt, one panel per model.

    Raises:
        ValueError: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"plot: {path} came; it needs matplotlib, and {error}") from error
    models = list(dict.fromkeys(row.model for row in rows))
    figure = Figure(figsize=(5.5 * len(models), 4.5), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        for at, nic in enumerate(dict.fromkeys(row.nic for row in rows)):
            own = [row for row in rows if (row.model, row.nic) == (model, nic)]
            tokens, color = [row.tokens for row in own], f"C{at}"
            panel.plot(tokens, [row.after_s for row in own], "--", color=color, label=f"{nic}, after the prefill")
            panel.plot(tokens, [row.layerwise_s for row in own], "-", color=color, label=f"{nic}, by layer")
        panel.plot(tokens, [row.prefill_s for row in own], ":", color="#444444", label="prefill alone")
        panel.set(title=model, xlabel="tokens", ylabel="time to first token at the decoder (s)")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(visible=True, alpha=0.25)
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=150)
