"""Draws a bench report: latency and bandwidth over batch size, all contenders and the floor in the same picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from putget_bench.contender import PHASES

_TITLES = {"dispatch": "dispatch", "combine": "combine", "pair": "dispatch + combine back to back"}
# Okabe and Ito's colours, which differ for every kind of colour vision; markers and dashes differ too.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#009E73", "marker": "^", "linestyle": "-."},
    {"color": "#CC79A7", "marker": "D", "linestyle": "--"},
    {"color": "#E69F00", "marker": "v", "linestyle": "-."},
    {"color": "#56B4E9", "marker": "P", "linestyle": "--"},
)
_FLOOR: dict[str, Any] = {"color": "#444444", "linestyle": ":", "linewidth": 1.8}
_LATENCY_LABEL = "latency (us): slowest rank, median"
_BANDWIDTH_LABEL = "GB/s: bytes that have to leave a rank / time"
_MOST_TICKS = 8
_DPI = 150
Points = list[tuple[float, float]]


def draw(document: dict[str, Any], path: Path) -> None:
    """Writes the picture of a report.

    Args:
        document: a report of schema putget.bench/2 with at least one size.
        path: where to; the suffix gives the format.
    """
    make_figure(document).savefig(path, dpi=_DPI)


def make_figure(document: dict[str, Any]) -> Figure:
    """The picture of a report: latencies above, bandwidths below, a column for each phase."""
    figure = Figure(figsize=(13.5, 8), layout="constrained")
    panels = figure.subplots(2, len(PHASES), sharex=True, sharey="row")
    results = [result for result in document["results"] if result["batch_size"] > 0]
    for column, phase in enumerate(PHASES):
        latency, bandwidth = panels[0][column], panels[1][column]
        latency.set_title(_TITLES[phase])
        _draw_latency(latency, results, phase)
        _draw_bandwidth(bandwidth, results, phase)
        _tokens_axis(bandwidth, [result["batch_size"] for result in results])
        for axes in (latency, bandwidth):
            axes.grid(True, which="major", alpha=0.25)
    for row, label in zip(panels, (_LATENCY_LABEL, _BANDWIDTH_LABEL), strict=True):
        _logarithmic(row[0])
        row[0].set_ylabel(label)
    measured = [value for name in _names(results) for phase in PHASES for _, value in _latencies(results, name, phase)]
    if measured:
        panels[0][0].set_ylim(min(measured) / 2, max(measured) * 1.5)  # a floor far below is cut off
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10, frameon=False)
    figure.suptitle(_title(document), fontsize=11)
    return figure


def _title(document: dict[str, Any]) -> str:
    config, machine = document["config"], document["machine"]
    where = machine["gpus"][0]["name"] if config["device"] == "cuda" else machine["cpu"]
    return (
        f"putget {document['versions']['putget']}, {config['profile']}: EP{config['ep_size']}, hidden "
        f"{config['hidden_size']}, top_k {config['top_k']}, {config['num_experts']} experts, {config['quant']} rows, "
        f"{config['router']} routing\n{config['ep_size']} {config['device']} ranks, {where}, {document['date'][:10]}"
    )


def _draw_latency(axes: Axes, results: list[dict[str, Any]], phase: str) -> None:
    for index, name in enumerate(_names(results)):
        _line(axes, _latencies(results, name, phase), name, index)
    floor = _floors(results, phase)
    if floor:
        axes.plot(*_columns(floor), label="floor: bytes / link's measured rate + empty reading", **_FLOOR)


def _draw_bandwidth(axes: Axes, results: list[dict[str, Any]], phase: str) -> None:
    # The same bytes for everyone: those that have to leave a rank. A peer that moves more of them gets no credit.
    needed = {result["batch_size"]: _needed(result, phase) for result in results}
    for index, name in enumerate(_names(results)):
        _line(axes, _rates(_latencies(results, name, phase), needed), name, index)
    floor = _rates(_floors(results, phase), needed)
    if floor:
        axes.plot(*_columns(floor), **_FLOOR)
    else:
        axes.text(0.5, 0.5, "nothing leaves a rank", ha="center", va="center", transform=axes.transAxes)


def _line(axes: Axes, points: Points, name: str, index: int) -> None:
    if points:
        style = _STYLES[index % len(_STYLES)]
        axes.plot(*_columns(points), label=name, markersize=5, linewidth=2.2 if index == 0 else 1.4, **style)


def _latencies(results: list[dict[str, Any]], name: str, phase: str) -> Points:
    return [
        (result["batch_size"], contender[phase]["latency_us"])
        for result in results
        for contender in result["contenders"]
        if contender["name"] == name and contender[phase] is not None
    ]


def _floors(results: list[dict[str, Any]], phase: str) -> Points:
    """The bound by the bytes that putget moves: no row crosses twice."""
    found = [(result["batch_size"], result["contenders"][0][phase]["floor_us"]) for result in results]
    return [(tokens, floor_us) for tokens, floor_us in found if floor_us]


def _needed(result: dict[str, Any], phase: str) -> float:
    moved = result["bytes"]
    return float(moved["dispatch"] + moved["combine"] if phase == "pair" else moved[phase])


def _rates(times_us: Points, needed: dict[float, float]) -> Points:
    return [(tokens, needed[tokens] / time_us / 1e3) for tokens, time_us in times_us if needed[tokens]]


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _names(results: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(contender["name"] for result in results for contender in result["contenders"]))


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_minor_locator(NullLocator())


def _tokens_axis(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    every = -(-len(sizes) // _MOST_TICKS)
    axes.set_xticks(sizes[::-1][::every][::-1])  # the largest has its label
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens a rank")


def _plain(value: float, _position: int | None) -> str:
    return f"{value:g}"
