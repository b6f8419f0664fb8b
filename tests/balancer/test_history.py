"""Counts of the last iterations."""

from __future__ import annotations

import numpy as np
import pytest

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
