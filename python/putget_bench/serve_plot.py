"""Draws a report of `putget serve-bench`: times of tokens, tokens a second, and waits of ranks, over the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from putget_bench.serve_report import load_name

# Okabe and Ito's colours, which differ for every kind of colour vision; markers and dashes differ too.
_MARKS = {"p50": ("#0072B2", "o", "-"), "p99": ("#D55E00", "s", "--"), "max": ("#444444", "^", ":")}
_TIMES = {"first_token_ms": "time to first token", "between_tokens_ms": "time between tokens"}


def draw(document: dict[str, Any], path: Path) -> None:
    """Writes the picture of a report of schema putget.serve/1; the suffix gives the format."""
    make_figure(document).savefig(path, dpi=150)


def make_figure(document: dict[str, Any]) -> Figure:
    """The picture."""
    results = document["results"]
    loads = [load_name(result["load"]) for result in results]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    panels = figure.subplots(2, 2)
    for axes, (name, title) in zip(panels[0], _TIMES.items(), strict=True):
        for mark in _MARKS:
            _line(axes, [result[name] and result[name][mark] for result in results], mark)
        axes.set(title=title, ylabel="ms")
    below = panels[1]
    below[0].bar(range(len(results)), [result["tokens_per_s"] or 0.0 for result in results], 0.6, color="#0072B2")
    below[0].set(title="tokens a second", ylabel="tokens/s")
    for mark in ("p50", "p99"):
        _line(below[1], [_longest_wait(result, mark) for result in results], mark)
    below[1].set(title="wait of a pass for the slowest rank", ylabel="ms, of the rank that waits longest")
    for axes in panels.flat:
        axes.set_xticks(range(len(loads)), loads)
        axes.set_xlim(-0.5, len(loads) - 0.5)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests")
        axes.grid(True, alpha=0.25)
        if axes.lines:
            axes.legend(frameon=False)
        elif axes is not below[0]:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center")
    figure.suptitle(f"{document['config']['model']}: what clients of a server see")
    return figure


def _line(axes: Axes, values: list[float | None], mark: str) -> None:
    color, marker, dashes = _MARKS[mark]
    there = [(place, value) for place, value in enumerate(values) if value is not None]
    if there:
        axes.plot(*zip(*there, strict=True), color=color, marker=marker, linestyle=dashes, label=mark)


def _longest_wait(result: dict[str, Any], mark: str) -> float | None:
    ranks = (result["server"] or {"ranks": []})["ranks"]
    return max((rank["wait_ms"][mark] for rank in ranks if rank["wait_ms"]), default=None)
