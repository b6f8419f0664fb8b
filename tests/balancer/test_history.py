"""Counts of the last iterations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from putget.balancer import LoadHistory


def test_all_iterations_count_alike() -> None:
    history = LoadHistory()
    for load in ([[1, 2]], [[3, 4]]):
        history.add(load)
    assert history.load.tolist() == [[4, 6]]


def test_older_ones_count_less() -> None:
    history = LoadHistory(decay=0.5)
    for load in ([[4, 0]], [[0, 2]], [[1, 1]]):
        history.add(load)
    assert history.load.tolist() == [[2, 2]]


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_a_window_forgets(decay: float) -> None:
    history, rng = LoadHistory(window=3, decay=decay), np.random.default_rng(0)
    loads = rng.integers(0, 9, (7, 2, 4))
    for load in loads:
        history.add(load)
    wanted = loads[4] * decay**2 + loads[5] * decay + loads[6]
    assert np.allclose(history.load, wanted)


@pytest.mark.parametrize("window", [3, None])
def test_a_buffer_that_is_filled_anew_does_not_change_the_past(window: int | None) -> None:
    history, buffer = LoadHistory(window=window), torch.zeros(1, 4, dtype=torch.float64)
    for tokens in (1, 2, 3):
        buffer.fill_(tokens)
        history.add(buffer)
    history.load[:] = 99  # the caller's copy
    assert history.load.tolist() == [[6] * 4]


@pytest.mark.parametrize("window", [3, None])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.nan, "load of layer 0, expert 1 is nan, allowed are finite numbers from 0 on"),
        (np.inf, "load of layer 0, expert 1 is inf"),
        (-1.0, "load of layer 0, expert 1 is -1"),
        (1.7e308, "load is too large"),
    ],
)
def test_a_load_that_no_plan_takes_is_refused_at_once(window: int | None, bad: float, message: str) -> None:
    history = LoadHistory(window=window)
    history.add([[1.0, 1e308]])
    with pytest.raises(ValueError, match=message):
        history.add([[1.0, bad]])
    assert history.load.tolist() == [[1, 1e308]]


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        LoadHistory(window=0)
    with pytest.raises(ValueError, match="decay is 0"):
        LoadHistory(decay=0)
    history = LoadHistory()
    with pytest.raises(ValueError, match="history is empty"):
        _ = history.load
    history.add([[1, 2]])
    with pytest.raises(ValueError, match=r"load is int64 \[1, 3\]; it must be numbers \[1, 2\]"):
        history.add([[1, 2, 3]])
