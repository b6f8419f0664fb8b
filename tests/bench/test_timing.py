"""Series, medians and percentiles on the CPU."""

from __future__ import annotations

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


class Clock:
    """A clock that stands still but for what a test adds, as the timer asks for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 7.0
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.seconds))

    def add(self, seconds: float) -> None:
        self.seconds += seconds


def test_steps_are_aligned_timed_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    clock = Clock(monkeypatch)

    def took(name: str, seconds: float) -> None:
        done.append(name)
        clock.add(seconds)

    timer = timing.CpuTimer(align=lambda: took("align", 4.0))
    series = timer.steps(
        [
            timing.Step(lambda: took("slow", 0.5), "slow"),
            timing.Step(lambda: took("untimed", 2.0)),
            timing.Step(lambda: took("quick", 0.25), "quick"),
        ],
        2,
    )
    assert series() == {"slow": [0.5e6] * 2, "quick": [0.25e6] * 2}
    assert done == ["align", "slow", "untimed", "align", "quick"] * 2


def test_back_to_back_divides_by_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timer = timing.CpuTimer(align=lambda: clock.add(4.0))
    assert timer.back_to_back("pair", lambda: clock.add(0.5), 4)() == {"pair": [0.5e6]}
    assert clock.seconds == 7.0 + 4.0 + 4 * 0.5


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
