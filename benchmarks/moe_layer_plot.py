"""Draws where the time of a layer goes: the kernels of one layer over time, by their work, one panel a size.

    python benchmarks/moe_layer_plot.py layer.json layer.png

The report is one of benchmarks/moe_layer.py with --kernel_breakdown; the layer is putget's own on one rank. A dashed
line is the floor: the weights that the busiest rank reads over the memory's rate, or its products over the tensor
cores' rate, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#999999", "#F0E442")
_SHORTEST_LABEL = 0.035  # of the axis: a narrower kernel has no room for its time


def floor_us(shape: dict[str, Any], size: dict[str, Any], bytes_a_us: float, flops_a_us: float) -> float:
    """Time that the busiest rank's products need at least."""
    values = 3 * shape["hidden"] * shape["intermediate"]
    width = 1 if shape["weights"] == "fp8" else 2
    read = size["most_experts_with_rows_of_a_rank"] * values * width / bytes_a_us
    return float(max(read, 2 * size["most_rows_of_a_rank"] * values / flops_a_us))


def draw_size(axes: Axes, size: dict[str, Any], floor: float) -> None:
    """One panel: a row for each kind of work."""
    ours = size["contenders"][0]
    kinds = list(dict.fromkeys(kernel["kind"] for kernel in ours["timeline"]))
    end = max(kernel["end_us"] for kernel in ours["timeline"])
    for kernel in ours["timeline"]:
        row, start, length = kinds.index(kernel["kind"]), kernel["start_us"], kernel["end_us"] - kernel["start_us"]
        axes.barh(row, length, left=start, height=0.7, color=_COLOURS[row % len(_COLOURS)])
        if length > _SHORTEST_LABEL * end:
            axes.text(start + length / 2, row, f"{length:.0f}", ha="center", va="center", color="white", fontsize=8)
    axes.axvline(floor, color="#444444", linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlim(0, max(end, floor) * 1.02)
    axes.set_xlabel("us")
    axes.set_title(f"{size['batch_size']} tokens per rank: {ours['latency_us']:.0f} us, floor {floor:.0f}", fontsize=10)
    axes.grid(True, axis="x", alpha=0.25)


def make_figure(report: dict[str, Any], bytes_a_us: float, flops_a_us: float) -> Figure:
    """A panel for each size that has a timeline."""
    sizes = [size for size in report["sizes"] if size["contenders"][0].get("timeline")]
    figure = Figure(figsize=(11, 2.6 * len(sizes)), layout="constrained")
    shape = report["settings"]["shape"]
    for axes, size in zip(figure.subplots(len(sizes), 1, squeeze=False)[:, 0], sizes, strict=True):
        draw_size(axes, size, floor_us(shape, size, bytes_a_us, flops_a_us))
    return figure


def main() -> None:
    """Reads a report, writes a picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--memory_tb_s", type=float, default=4.8, help="of the GPU; the default is an H200's")
    parser.add_argument("--tflops", type=float, default=1490.0, help="of a dense FP8 product; the default is an H200's")
    given = parser.parse_args()
    report = json.loads(given.report.read_text())
    make_figure(report, given.memory_tb_s * 1e6, given.tflops * 1e6).savefig(given.picture, dpi=150)


if __name__ == "__main__":
    main()
