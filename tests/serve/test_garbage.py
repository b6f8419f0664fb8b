"""When a server's rank collects garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from putget_serve.garbage import Garbage


@pytest.fixture
def garbage() -> Iterator[Garbage]:
    made = Garbage()
    made.start()
    yield made
    made.end()


@pytest.fixture
def seen(garbage: Garbage) -> Iterator[list[int]]:
    """Generations of the collections that have run."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def test_nothing_is_collected_within_a_pass(garbage: Garbage, seen: list[int]) -> None:
    kept = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
    assert len(kept) == 100_000
    assert seen == []


def test_young_objects_are_collected_every_64_passes_and_all_before_sleep(garbage: Garbage, seen: list[int]) -> None:
    for _ in range(130):
        garbage.after_pass()
    assert seen == [0, 0]
    garbage.before_sleep()
    garbage.before_sleep()
    assert seen == [0, 0, 2]
    assert garbage.runs == 3
    assert 0 <= garbage.longest_s <= garbage.seconds


def test_what_is_there_at_the_start_is_not_looked_at_until_the_end(garbage: Garbage) -> None:
    assert gc.get_freeze_count() > 0
    garbage.end()
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()
