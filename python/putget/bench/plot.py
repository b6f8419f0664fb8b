"""Draws a bench report: latency over batch size, and bandwidth with the ceiling and the peers in the same picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

_PHASES = {"dispatch": "#1f77b4", "combine": "#d95f02", "pair": "#222222"}
_PEERS = ("#7570b3", "#1b9e77", "#e7298a", "#a6761d")
_DPI = 150


def draw(document: dict[str, Any], path: Path) -> None:
    """Writes the picture of a report.

    Args:
        document: a report of schema putget.bench/1 with at least one size.
        path: where to; the suffix gives the format.
    """
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    results = [result for result in document["results"] if result["batch_size"] > 0]
    _draw_latency(latency, results)
    _draw_bandwidth(bandwidth, results, document["ceiling"])
    for axes in (latency, bandwidth):
        _tokens_axis(axes, [result["batch_size"] for result in results])
    handles, labels = bandwidth.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(_title(document), fontsize=11)
    figure.savefig(path, dpi=_DPI)


def _title(document: dict[str, Any]) -> str:
    config, machine = document["config"], document["machine"]
    where = machine["gpus"][0]["name"] if config["device"] == "cuda" else machine["cpu"]
    return (
        f"putget {document['versions']['putget']}, {config['profile']}: EP{config['ep_size']}, hidden "
        f"{config['hidden_size']}, top_k {config['top_k']}, {config['num_experts']} experts, {config['quant']} rows, "
        f"{config['router']} routing\n{config['ep_size']} {config['device']} ranks, {where}, {document['date'][:10]}"
    )


def _draw_latency(axes: Axes, results: list[dict[str, Any]]) -> None:
    sizes = [result["batch_size"] for result in results]
    for phase, colour in _PHASES.items():
        label = f"putget, {phase}"
        axes.plot(sizes, _of(results, 0, phase, "latency_us"), "o-", color=colour, label=label, markersize=4)
    for index, name, colour in _peers(results):
        axes.plot(
            sizes, _of(results, index, "pair", "latency_us"), "s--", color=colour, label=f"{name}, pair", markersize=4
        )
    axes.set_yscale("log")
    axes.set_ylabel("latency (us), slowest rank, median")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("Latency")


def _draw_bandwidth(axes: Axes, results: list[dict[str, Any]], ceiling: dict[str, Any] | None) -> None:
    sizes = [result["batch_size"] for result in results]
    for phase, colour in _PHASES.items():
        label = f"putget, {phase}"
        axes.plot(sizes, _of(results, 0, phase, "wire_gbps"), "o-", color=colour, label=label, markersize=4)
    for index, name, colour in _peers(results):
        # The same bytes for everyone: those that have to leave a rank. A peer that moves more of them gets no credit.
        needed = [result["bytes"]["dispatch"] + result["bytes"]["combine"] for result in results]
        times = _of(results, index, "pair", "latency_us")
        rates = [num_bytes / time / 1e3 for num_bytes, time in zip(needed, times, strict=True)]
        axes.plot(sizes, rates, "s--", color=colour, label=f"{name}, pair", markersize=4)
    if ceiling is not None:
        for kind, phase in (("write", "dispatch"), ("read", "combine")):
            rate = ceiling[f"{kind}_gbps"]
            if rate is not None:
                label = f"link: {kind}s, {rate:.3g} GB/s"
                axes.axhline(rate, color=_PHASES[phase], linestyle=":", linewidth=1.5, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s leaving a rank (deduplicated bytes / time)")
    axes.set_title("Bandwidth")


def _of(results: list[dict[str, Any]], contender: int, phase: str, figure: str) -> list[float]:
    return [result["contenders"][contender][phase][figure] for result in results]


def _peers(results: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    names = [contender["name"] for contender in results[0]["contenders"]] if results else []
    return [(i, name, _PEERS[(i - 1) % len(_PEERS)]) for i, name in enumerate(names) if i > 0]


def _tokens_axis(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens a rank")
    axes.grid(True, which="major", alpha=0.3)


def _plain(value: float, _position: int | None) -> str:
    return f"{value:g}"
