"""The values that latencies are held against."""

from __future__ import annotations

import pytest

from putget_bench.measure import Clock
from putget_bench.roofline import Ceiling


@pytest.mark.parametrize(
    ("phase", "combine_stores", "expected"),
    [
        ("dispatch", False, 1.0),
        ("combine", False, 5.0),
        ("combine", True, 4.0),
        ("pair", False, 6.0),
        ("pair", True, 5.0),
    ],
)
def test_bytes_are_held_against_the_way_that_they_take(phase: str, combine_stores: bool, expected: float) -> None:
    clock = Clock(Ceiling(write_gbps=250.0, read_gbps=200.0, barrier_us=6.0, bytes_per_peer=1), empty_us=3.0)
    assert clock.link_us(phase, 250e3, 1e6, combine_stores) == pytest.approx(expected)


def test_without_a_peer_there_is_no_ceiling() -> None:
    clock = Clock(Ceiling(write_gbps=None, read_gbps=None, barrier_us=6.0, bytes_per_peer=1), empty_us=3.0)
    assert clock.link_us("pair", 250e3, 1e6, combine_stores=False) is None
