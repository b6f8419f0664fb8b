"""Draws a simulation of `putget balance`: max/mean of the ranks' loads, and moved experts, over iterations."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from putget_bench.balance_simulation import WAYS, Phase

# Okabe and Ito's colours, which differ for every kind of colour vision; dashes differ too.
_STYLES = {"contiguous": ("#E69F00", ":"), "static": ("#D55E00", "--"), "online": ("#0072B2", "-")}


def draw(phases: list[Phase], path: Path) -> None:
    """Writes the picture; the suffix gives the format."""
    figure_of(phases).savefig(path, dpi=150)


def figure_of(phases: list[Phase]) -> Figure:
    """The picture."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for way in WAYS:
        color, dashes = _STYLES[way]
        values = [value for phase in phases for value in phase.ratios[way]]
        above.plot(values, color=color, linestyle=dashes, label=way)
    first = 0
    for phase in phases:
        above.axvline(first, color="#444444", linewidth=0.8)
        place = {"xycoords": ("data", "axes fraction"), "xytext": (4, -12), "textcoords": "offset points"}
        above.annotate(phase.task, (first, 1), **place)
        first += len(phase.moves)
    below.bar(range(first), [moves for phase in phases for moves in phase.moves], color="#0072B2", width=1.0)
    figure.suptitle("Loads of the ranks over iterations, and what it takes to keep them even")
    above.set_ylabel("max/mean of the ranks' loads")
    below.set_ylabel("moved experts")
    below.set_xlabel("iteration")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    above.legend(frameon=False)
    above.grid(True, alpha=0.25)
    return figure
