"""Layers of one test leave nothing behind for the next one."""

from __future__ import annotations

import pytest

from putget.moe import networks
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense
from tests.moe.layers import make_layer


def units_before_and_with_a_layer(rank: Rank) -> tuple[int, int]:
    """A body."""
    before = networks.FEWEST_UNITS
    with make_layer(rank, Dense()):
        return before, networks.FEWEST_UNITS


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mode", ["process", "thread"])
def test_only_layers_of_tests_take_few_units(mode: str, again: bool) -> None:
    ((before, inside),) = run_ranks(1, units_before_and_with_a_layer, mode=mode)
    assert before > 1, again
    assert inside == 1
