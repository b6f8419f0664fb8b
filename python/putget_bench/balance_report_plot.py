"""Draws a report of `putget balance`: for each task its experts' loads, its layers, and its small batches."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from putget_bench.balance_report import CHOICES, TaskReport

# Okabe and Ito's colours, which differ for every kind of colour vision; dashes differ too.
_STYLES = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"))
_MARKERS = "osD^"
_PLAIN = "#E69F00"


def draw(reports: list[TaskReport], path: Path) -> None:
    """Writes the picture, a row for each task; the suffix gives the format."""
    figure_of(reports).savefig(path, dpi=120)


def figure_of(reports: list[TaskReport]) -> Figure:
    """The picture."""
    figure = Figure(figsize=(15, 4 * len(reports)), layout="constrained")
    rows = figure.subplots(len(reports), 3, squeeze=False)
    for (map_, layers, batches), found in zip(rows, reports, strict=True):
        share = found.load / np.maximum(found.load.mean(axis=1, keepdims=True), 1e-9)
        image = map_.imshow(share, aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=map_, label="tokens / mean of the layer")
        map_.set(title=f"{found.task}: {found.tokens} tokens", xlabel="expert", ylabel="layer")
        # Layers have no order that a line could show: each one is a point.
        layers.plot(found.contiguous, color=_PLAIN, linestyle="", marker="x", label="contiguous")
        for index, (task, ratio) in enumerate(found.planned.items()):
            color, _ = _STYLES[index % len(_STYLES)]
            marker = _MARKERS[index % len(_MARKERS)]
            layers.plot(ratio, color=color, linestyle="", marker=marker, label=f"plan of {task}")
        layers.set(title=f"{found.task}: balance of each layer", xlabel="layer", ylabel="max/mean of the ranks' loads")
        layers.xaxis.set_major_locator(MaxNLocator(integer=True))
        map_.yaxis.set_major_locator(MaxNLocator(integer=True))
        for how, (color, dashes) in zip(CHOICES, _STYLES, strict=False):
            sizes = found.batches[how]
            batches.plot(list(sizes), list(sizes.values()), color=color, linestyle=dashes, marker="o", label=how)
        batches.set(
            title=f"{found.task}: small batches",
            xlabel="tokens of a batch",
            ylabel="max/mean, plan of the task",
            xscale="log",
        )
        for axes in (layers, batches):
            axes.legend(frameon=False)
            axes.grid(True, alpha=0.25)
    return figure
