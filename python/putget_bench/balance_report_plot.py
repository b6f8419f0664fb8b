"""Draws a report of `putget balance`: for each task its experts' loads, its layers, and its small batches."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib.figure import Figure

from putget_bench.balance_report import CHOICES, TaskReport

# Okabe and Ito's colours, which differ for every kind of colour vision; dashes differ too.
_STYLES = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"))
_PLAIN = ("#E69F00", ":")


def draw(reports: list[TaskReport], path: Path) -> None:
    """Writes the picture, a row for each task; the suffix gives the format."""
    figure = Figure(figsize=(15, 4 * len(reports)), layout="constrained")
    rows = figure.subplots(len(reports), 3, squeeze=False)
    for (map_, layers, batches), found in zip(rows, reports, strict=True):
        share = found.load / np.maximum(found.load.mean(axis=1, keepdims=True), 1e-9)
        image = map_.imshow(share, aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=map_, label="tokens / mean of the layer")
        map_.set(title=f"{found.task}: {found.tokens} tokens", xlabel="expert", ylabel="layer")
        layers.plot(found.contiguous, color=_PLAIN[0], linestyle=_PLAIN[1], label="contiguous")
        for index, (task, ratio) in enumerate(found.planned.items()):
            color, dashes = _STYLES[index % len(_STYLES)]
            layers.plot(ratio, color=color, linestyle=dashes, label=f"plan of {task}")
        layers.set(xlabel="layer", ylabel="max/mean of the ranks' loads")
        for how, (color, dashes) in zip(CHOICES, _STYLES, strict=False):
            sizes = found.batches[how]
            batches.plot(list(sizes), list(sizes.values()), color=color, linestyle=dashes, marker="o", label=how)
        batches.set(xlabel="tokens of a batch", ylabel="max/mean, plan of the task", xscale="log")
        for axes in (layers, batches):
            axes.legend(frameon=False)
            axes.grid(True, alpha=0.25)
    figure.savefig(path, dpi=120)
