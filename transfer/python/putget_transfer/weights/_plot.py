"""The report of an update as a picture: stages over time, and bytes by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STAGES = ("gather", "prepare", "write", "wait", "barrier")
# Okabe and Ito's colours, which differ for every kind of colour vision.
COLOURS = dict(zip(STAGES, ("#E69F00", "#0072B2", "#009E73", "#BBBBBB", "#D55E00"), strict=True))


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Read the trainers' reports from an update's JSON (`Update.to_json`), or from that of one report.

    Raises:
        ValueError: The file has neither, or cannot be read.
    """
    try:
        found = json.loads(path.read_text())
        reports = found["trainers"] if "trainers" in found else {str(found["rank"]): found}
        return {int(rank): dict(report) for rank, report in reports.items() if report["spans"] is not None}
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: it is not the report of an update: {error!r}") from error


def draw(reports: dict[int, dict[str, Any]], path: Path) -> None:
    """Draw reports; the suffix of the path gives the format.

    Raises:
        ValueError: No reports, or there is no matplotlib.
    """
    if not reports:
        raise ValueError("reports: no trainer rank has one")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"picture: {path} came; it needs matplotlib, and {error}") from error
    ranks = sorted(reports)
    figure = Figure(figsize=(12, 2.4 + 0.6 * len(ranks)), layout="constrained")
    over_time, by_rank = figure.subplots(1, 2, width_ratios=[2, 1])
    version = reports[ranks[0]]["version"]
    for row, rank in enumerate(ranks):
        for stage, begin, end in reports[rank]["spans"]:
            place = row + 0.8 * STAGES.index(stage) / len(STAGES) - 0.4
            over_time.broken_barh([(begin, end - begin)], (place, 0.14), facecolors=COLOURS[stage])
    for stage, colour in COLOURS.items():
        over_time.barh(0, 0, color=colour, label=stage)
    over_time.set(title=f"version {version}: stages over time", xlabel="seconds from the begin of publish")
    over_time.set_yticks(range(len(ranks)), [f"trainer {rank}" for rank in ranks])
    over_time.invert_yaxis()
    over_time.legend(fontsize=8, ncols=len(STAGES), loc="lower center", bbox_to_anchor=(0.5, 1.08))
    sent = {f"trainer {rank}, sent": reports[rank]["num_bytes"] for rank in ranks}
    received: dict[int, int] = {}
    for report in reports.values():
        for target, num_bytes in report["received"].items():
            received[int(target)] = received.get(int(target), 0) + num_bytes
    bars = {**sent, **{f"rollout {rank}, received": received[rank] for rank in sorted(received)}}
    colours = ["#0072B2"] * len(sent) + ["#009E73"] * len(received)
    by_rank.barh(list(bars), [num_bytes / 1e6 for num_bytes in bars.values()], color=colours)
    by_rank.invert_yaxis()
    by_rank.set(title="bytes by rank", xlabel="MB")
    figure.savefig(path, dpi=150)
