"""Series, medians and percentiles on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from putget_bench import measure, timing
from putget_bench.parser import build_parser
from putget_bench.settings import Settings, resolve


def bench_settings(*flags: str) -> Settings:
    return resolve(build_parser().parse_args(["bench", "--device", "cpu", *flags]), None)


@contextmanager
def one_rank() -> Iterator[None]:
    """torch.distributed with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


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


def test_ten_thousand_rounds_are_short_series_repeated() -> None:
    """The bench's run with 10,000 iterations and as many before them."""
    rounds: list[int] = []
    settings = bench_settings("--iters", "10000", "--warmup", "10000")
    entry = SimpleNamespace(
        name="quick",
        phases=("dispatch", "combine", "pair"),
        contender=SimpleNamespace(
            dispatch=lambda: rounds.append("dispatch"),
            write_rows=lambda: None,
            combine=lambda: rounds.append("combine"),
        ),
    )
    made: list[int] = []

    class Recorded(timing.CpuTimer):
        def steps(self, steps: Sequence[timing.Step], iters: int) -> timing.Series:
            made.append(iters)
            return super().steps(steps, iters)

    with one_rank():
        timer = Recorded(align=lambda: None)
        readings = measure.time_contenders(timer, [entry], settings, 1)["quick"]  # type: ignore[list-item]
    assert made == [50]
    assert {phase: len(values) for phase, values in readings.items()} == {
        "dispatch": 10000,
        "combine": 10000,
        "pair": 200,
    }
    assert rounds.count("dispatch") == 20000 + 400
    found = timing.percentiles(readings["dispatch"])
    assert found["min"] <= found["p01"] <= found["p50"] <= found["p99"] <= found["max"]


def test_percentiles_of_known_numbers() -> None:
    found = timing.percentiles(torch.arange(101, dtype=torch.float64))
    assert found["min"] == 0
    assert found["p01"] == 1
    assert found["p50"] == timing.median(torch.arange(101, dtype=torch.float64)) == 50
    assert found["p99"] == 99
    assert found["max"] == 100
    assert found["mean"] == 50
