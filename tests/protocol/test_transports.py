"""The five promises of putget_transport.h, and what it says of statuses, for each network that fills the table."""

from __future__ import annotations

import ctypes
import random
import threading
from ctypes import c_uint8, c_uint32

import pytest

from tests.protocol.transports import INVALID, OK, End, Over, eventually, two_ends

KINDS = ("local", "tcp", "host")


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest) -> tuple[End, End]:
    if request.param != "local":
        pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")
    return two_ends(request.param)


def noise(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


def test_a_table_says_what_it_is(ends: tuple[End, End]) -> None:
    for end in ends:
        table = end.table
        assert (table.size, table.magic, table.version) == (ctypes.sizeof(table), 0x70757474, 1)
        assert table.most_bytes >= 1 << 20
        assert all(getattr(table, name) for name, kind in table._fields_ if name not in ("reserved",))


def test_writes_land_whatever_their_order_and_size(ends: tuple[End, End]) -> None:
    """All bytes are there when the counter shows a write: promises 1 and 2. Each write has an immediate of its own."""
    here, there = ends
    size = 3 << 20
    source, memory = bytearray(noise(size, 1)), bytearray(size)
    region, target = here.add_region(source), here.target_at(there, there.add_region(memory))
    lengths = [0, 1, 63, 4096, 100_000, here.table.most_bytes, 7, 0, 65_537, 1 << 19]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    counters = [there.counter(500 + index) for index in range(len(lengths))]
    for round in range(1, 11):
        over = Over()
        shift = round % 5
        for index, length in enumerate(lengths):
            here.write(over, 500 + index, target, length, (region, starts[index] + shift, starts[index]))
        left = set(range(len(lengths)))

        def look(shift: int = shift, left: set[int] = left, round: int = round) -> bool:
            for index in [index for index in left if counters[index]() == round]:
                start, length = starts[index], lengths[index]
                assert memory[start : start + length] == source[start + shift : start + shift + length], index
                left.discard(index)
            return not left

        eventually(f"round {round}: writes {left} were not counted", look)
        eventually("not all writes are over", lambda over=over: over.over == len(lengths))  # type: ignore[misc]
        assert over.failed == 0
    assert [counter() for counter in counters] == [10] * len(lengths)


def test_the_source_is_read_no_more_once_a_write_is_over(ends: tuple[End, End]) -> None:
    """Promise 3: it is overwritten at once."""
    here, there = ends
    size = 200_000
    source, memory = bytearray(size), bytearray(size)
    region, target = here.add_region(source), here.target_at(there, there.add_region(memory))
    counter = there.counter(7)
    for round in range(1, 61):
        data = noise(size, round)
        source[:] = data
        over = Over()
        here.write(over, 7, target, size, (region, 0, 0))
        eventually("the write is not over", lambda over=over: over.over == 1)  # type: ignore[misc]
        source[:] = bytes(size)
        eventually("the write is not counted", lambda round=round: counter() == round)  # type: ignore[misc]
        assert over.failed == 0
        assert memory == data


def test_a_write_that_failed_is_over_once(ends: tuple[End, End]) -> None:
    """Promise 4: to a region that is gone, with bytes and without. What goes elsewhere goes on."""
    here, there = ends
    source, memory, other = bytearray(noise(4096, 1)), bytearray(4096), bytearray(4096)
    region, gone = here.add_region(source), there.add_region(memory)
    target, good = here.target_at(there, gone), here.target_at(there, there.add_region(other))
    counters = [there.counter(imm) for imm in (1, 2, 3)]
    there.remove_region(gone)
    failed, fine = Over(), Over()
    for round in range(1, 11):
        here.write(failed, 1, target, 4096, (region, 0, 0))
        here.write(failed, 2, target)
        here.write(fine, 3, good, 4096, (region, 0, 0))
        eventually("writes are not over", lambda round=round: (failed.over, fine.over) == (2 * round, round))  # type: ignore[misc]
    assert (failed.failed, fine.failed) == (20, 0)
    eventually("writes are not counted", lambda: counters[2]() == 10)  # a write may be over before it has landed
    assert all(counter() <= 10 for counter in counters)
    assert other == source


def test_nothing_lands_once_a_region_is_removed(ends: tuple[End, End]) -> None:
    """Promise 5: while another thread writes there. Rounds go on until one was in the middle of writes."""
    here, there = ends
    size = 1 << 18
    source = bytearray(noise(size, 3))
    region = here.add_region(source)
    in_the_middle = 0
    for round in range(200):
        if in_the_middle == 3:
            break
        memory = bytearray(size)
        to = there.add_region(memory)
        target, counter = here.target_at(there, to), there.counter(1000 + round)
        over, enough, posted = Over(), threading.Event(), [0]

        def pour(imm: int, target: int, over: Over, enough: threading.Event, posted: list[int]) -> None:
            while not enough.is_set():
                if posted[0] - over.over < 16:
                    here.write(over, imm, target, size, (region, 0, 0))
                    posted[0] += 1

        writer = threading.Thread(target=pour, args=(1000 + round, target, over, enough, posted), daemon=True)
        writer.start()
        eventually("nothing landed", lambda counter=counter: counter() > 1)  # type: ignore[misc]
        there.remove_region(to)
        memory[:] = bytes([round & 0xFF]) * size
        eventually("no write failed", lambda over=over: over.failed > 0)  # type: ignore[misc]
        enough.set()
        writer.join()
        eventually("writes are not over", lambda over=over, posted=posted: over.over == posted[0])  # type: ignore[misc]
        assert memory == bytes([round & 0xFF]) * size
        eventually(
            "writes are not counted",
            lambda over=over, counter=counter: counter() >= over.over - over.failed,  # type: ignore[misc]
        )
        in_the_middle += over.over > over.failed
    assert in_the_middle == 3


def test_mistakes_are_refused_with_words(ends: tuple[End, End]) -> None:
    here, there = ends
    memory = bytearray(64)
    start, number = (c_uint8 * 64).from_buffer(memory), c_uint32()
    table = here.table
    assert table.add_region(table.self, None, 64, -1, ctypes.byref(number)) == INVALID
    assert here.error()
    assert table.add_region(table.self, ctypes.addressof(start), 64, 3, ctypes.byref(number)) != OK
    assert here.error()
    nonsense = (c_uint8 * 5)(1, 2, 3, 4, 5)
    assert table.add_peer(table.self, nonsense, 5, ctypes.byref(number)) == INVALID
    assert here.error()
    peer = here.add_peer(there.bytes_of("address"))
    assert table.add_target(table.self, peer, nonsense, 5, ctypes.byref(number)) == INVALID
    assert here.error()
    region = here.add_region(memory)
    here.remove_region(region)
    assert table.remove_region(table.self, region) == INVALID
    assert "region" in here.error()


def test_a_flood_is_taken_or_refused_and_all_of_it_is_over(ends: tuple[End, End]) -> None:
    """FULL means that nothing has happened: what was taken is counted, and nothing else."""
    here, there = ends
    memory = bytearray(64)
    target, counter = here.target_at(there, there.add_region(memory)), there.counter(12)
    over, taken = Over(), 0
    for _ in range(20_000):
        taken += here.try_write(over, 12, target) == OK
    eventually("writes are not over", lambda: over.over == taken)
    eventually("writes are not counted", lambda: counter() == taken)
    assert (over.failed, taken > 0) == (0, True)
