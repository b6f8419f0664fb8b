"""The pictures of `putget balance`: titles, and layers as whole numbers without a line between them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from putget_bench import balance_plot, balance_report_plot
from putget_bench.balance_report import CHOICES, TaskReport
from putget_bench.balance_simulation import WAYS, Phase


def test_a_report() -> None:
    ones = np.ones(3)
    batches = {how: {32: 1.5, 200: 1.1} for how in CHOICES}
    reports = [
        TaskReport(name, 100, np.ones((3, 4), np.int64), 1.0, ones, {"code": ones, "prose": ones}, batches)
        for name in ("code", "prose")
    ]
    figure = balance_report_plot.figure_of(reports)
    drawn = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert all(axes.get_title() for axes in drawn)
    for axes in drawn:
        if axes.get_xlabel() == "layer":
            assert {line.get_linestyle() for line in axes.lines} == {"None"}
            assert len({line.get_marker() for line in axes.lines}) == 3
            assert all(float(tick).is_integer() for tick in axes.get_xticks())
        if axes.get_ylabel() == "layer":
            assert all(float(tick).is_integer() for tick in axes.get_yticks())


def test_a_simulation() -> None:
    phase = Phase("code")
    for way in WAYS:
        phase.ratios[way] = [1.5, 1.25, 1.0]
    phase.moves[:] = [0, 2, 1]
    figure = balance_plot.figure_of([phase])
    assert figure.get_suptitle()
    assert all(float(tick).is_integer() for tick in figure.axes[1].get_xticks())
