"""Series, medians and percentiles on the CPU."""

from __future__ import annotations

import time

import pytest
import torch

from putget.bench import timing


@pytest.mark.parametrize("iters", [1, 3, 8, 50, 100, 101, 10_000])
def test_series_cover_the_iterations(iters: int) -> None:
    length, num_series = timing.series_length(iters)
    assert length <= 50
    assert iters <= length * num_series < iters + num_series


def test_steps_are_aligned_timed_and_in_order() -> None:
    done: list[str] = []
    timer = timing.CpuTimer(align=lambda: done.append("align"))

    def slow() -> None:
        done.append("slow")
        time.sleep(0.01)

    series = timer.steps(
        [timing.Step(slow, "slow"), timing.Step(lambda: done.append("untimed")), timing.Step(lambda: None, "quick")], 2
    )
    readings = series()
    assert done == ["align", "slow", "untimed", "align"] * 2
    assert list(readings) == ["slow", "quick"]
    assert all(10_000 <= value < 1_000_000 for value in readings["slow"])
    assert all(value < 10_000 for value in readings["quick"])


def test_back_to_back_divides_by_the_repeats() -> None:
    runs: list[int] = []

    def run() -> None:
        runs.append(1)
        time.sleep(0.005)

    reading = timing.CpuTimer(align=lambda: None).back_to_back("pair", run, 4)()
    assert len(runs) == 4
    assert 5_000 <= reading["pair"][0] < 20_000


def test_percentiles_of_known_numbers() -> None:
    found = timing.percentiles(torch.arange(101, dtype=torch.float64))
    assert found["min"] == 0
    assert found["p01"] == 1
    assert found["p50"] == timing.median(torch.arange(101, dtype=torch.float64)) == 50
    assert found["p99"] == 99
    assert found["max"] == 100
    assert found["mean"] == 50
