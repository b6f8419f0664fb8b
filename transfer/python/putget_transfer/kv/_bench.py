"""Measures requests between two processes of this machine, beside the engine's paged writes and memcpy.

The decode rank asks, orders and takes times; the prefill rank obeys, in a process that this one starts. Both processes
read one clock. A request is asked for, accepted and armed before its pages are ready, so a time begins with the store
of the word and ends with the decode rank's knowledge.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from putget_transfer._native import DeviceGroup, Engine, MrDesc, MrHandle, Pages
from putget_transfer.kv._models import Model, geometry
from putget_transfer.kv._native import Cache, Decoder, Prefiller

WAIT_S = 120.0
_IMM = 77
_MOST_SHARED = 256 << 20
_HOLD_S = 0.005
_UNDISTURBED_NS = 20_000
_SHARES = (("p50_us", 0.5), ("p99_us", 0.99))
_DEADLINE_S = 600.0
Report = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A cache and a request that fills it."""

    model: Model
    page_tokens: int
    tokens: int

    @property
    def pages(self) -> int:
        """Pages of one layer."""
        return -(-self.tokens // self.page_tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        planes = 1 if self.model.kv_heads == 1 else 2
        return self.page_tokens * self.model.kv_heads * planes * self.model.head_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return self.model.layers * self.pages * self.page_bytes

    def content(self) -> bytes:
        """Return what a page has behind its number."""
        return random.Random(self.page_bytes).randbytes(self.page_bytes - 8)

    def places(self, pages: Sequence[int]) -> list[int]:
        """Return the place of each page of a request in the memory, layer by layer."""
        return [layer * self.pages + page for layer in range(self.model.layers) for page in pages]


class Rank:
    """One side: an engine, and a cache in memory of its own."""

    def __init__(self, network: str, shape: Shape) -> None:
        """Make both."""
        group = DeviceGroup.host() if network == "host" else DeviceGroup.tcp(["127.0.0.1"])
        self.shape, self.engine = shape, Engine.builder().group(group).build()
        self.handle, self.desc = self.engine.alloc_mr(shape.num_bytes)
        own = geometry(shape.model, shape.tokens, 0, 1, "LBHNC", shape.page_tokens)
        self.cache = Cache(self.engine, own, [self.handle])

    def fill(self, handle: MrHandle) -> None:
        """Give each page its number and the same bytes behind it."""
        rest = self.shape.content()
        for page in range(len(handle) // self.shape.page_bytes):
            handle.write(page * self.shape.page_bytes, page.to_bytes(8, "little") + rest)


def _view(memory: SharedMemory) -> memoryview:
    if memory.buf is None:
        raise RuntimeError("the shared memory is closed")
    return memory.buf


def _paged(rank: Rank, target: tuple[bytes, list[int]], source: list[int]) -> int:
    """Write all pages as one paged write; return when it was submitted."""
    size = rank.shape.page_bytes
    to, desc = Pages(target[1], size), MrDesc.from_bytes(target[0])
    pages = Pages(rank.shape.places(source), size)
    begun = time.monotonic_ns()
    rank.engine.submit_paged_writes(size, _IMM, (rank.handle, pages), (desc, to), deadline_s=_DEADLINE_S)
    return begun


def _store(prefiller: Prefiller, value: int) -> tuple[int, int]:
    """Store the word as a kernel would; return the time before and after."""
    word = ctypes.c_uint64.from_address(prefiller.word)
    before = time.monotonic_ns()
    word.value = value
    return before, time.monotonic_ns()


def _posted(engine: Engine) -> dict[float, int]:
    """Return how many writes were posted within each bound, in microseconds, after their word was seen."""
    found = re.findall(r'word_to_post_seconds_bucket{le="(\S+)"} (\d+)', engine.metrics_text())
    return {1e6 * float(bound): int(count) for bound, count in found}


def _within(before: dict[float, int], after: dict[float, int]) -> Report:
    """Return the bounds of the median and the 99th percentile of what was posted in between."""
    counts = {bound: count - before[bound] for bound, count in after.items()}
    most = max(counts.values())
    bounds = {name: min(bound for bound, count in counts.items() if count >= share * most) for name, share in _SHARES}
    return {"count": most, **bounds}


@contextmanager
def _busy(held: bool) -> Iterator[None]:
    """Have another thread keep Python's lock, 5 ms at a time."""
    if not held:
        yield
        return
    over, before = threading.Event(), sys.getswitchinterval()

    def hold() -> None:
        while not over.is_set():
            sum(range(1000))

    sys.setswitchinterval(_HOLD_S)
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


def prefill_rank(pipe: Connection, network: str, shape: Shape, shared: str | None) -> None:
    """Obey the decode rank."""
    rank = Rank(network, shape)
    rank.fill(rank.handle)
    prefiller = Prefiller(rank.cache, lease_s=_DEADLINE_S)
    if shared:
        memory = SharedMemory(shared)
        whole = min(memory.size, shape.num_bytes)
        _view(memory)[:whole] = rank.handle.read(0, whole)
        memory.close()
    pipe.send(prefiller.source())
    step, layers = 0, shape.model.layers
    while (order := pipe.recv()) is not None:
        kind, *given = order
        if kind == "begin":
            step += 1
            begun = time.monotonic_ns()
            prefiller.begin_step(step, given[0])
            pipe.send(time.monotonic_ns() - begun)
        elif kind == "ready":
            pipe.send(_store(prefiller, step << 16 | layers))
        elif kind == "held":
            with _busy(held=True):
                time.sleep(2 * _HOLD_S)
                times = _store(prefiller, step << 16 | layers)
                # The decode rank knows long before this thread gets the lock again.
                time.sleep(_HOLD_S)
            pipe.send(times)
        elif kind == "finish":
            for name in given[0]:
                prefiller.finish(name)
            left = set(given[0])
            while left:
                left -= {name for name, _ in prefiller.poll()}
            pipe.send(None)
        elif kind == "paged":
            pipe.send(_paged(rank, *given))
        elif kind == "posted":
            pipe.send(_posted(rank.engine))
    rank.engine.close()


class Pair:
    """The decode rank, and what it takes to give orders to the prefill rank."""

    def __init__(self, network: str, shape: Shape, shared: SharedMemory | None = None) -> None:
        """Start the prefill rank."""
        self.shape, self.rank = shape, Rank(network, shape)
        self.decoder = Decoder(self.rank.cache)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        name = shared.name if shared else None
        self.process = context.Process(target=prefill_rank, args=(theirs, network, shape, name), daemon=True)
        self.process.start()
        self.sources = self.decoder.sources([self.answer()])
        self.number = 0

    def answer(self) -> Any:
        """Return what the prefill rank says.

        Raises:
            RuntimeError: It is silent, or has ended.
        """
        if not self.pipe.poll(WAIT_S):
            raise RuntimeError(f"the prefill rank has not answered for {WAIT_S:g} s")
        try:
            return self.pipe.recv()
        except EOFError as error:
            raise RuntimeError("the prefill rank has ended") from error

    def do(self, *order: Any) -> Any:
        """Give an order and return the answer."""
        self.pipe.send(order)
        return self.answer()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exception: object) -> None:
        """End both ranks."""
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(WAIT_S)
        self.process.terminate()
        self.rank.engine.close()

    def request(self, source: list[int], target: list[int], kind: str = "ready") -> tuple[int, int, int]:
        """Carry out a request; return when the word was stored, when that was over, and when all had arrived."""
        self.number += 1
        name, tokens = f"r{self.number}", self.shape.tokens
        receive = self.decoder.request(
            self.sources, name, [target], tokens=tokens, segment_tokens=tokens, deadline_s=_DEADLINE_S
        )
        while receive.state == "asked":
            time.sleep(0.0005)
        self.do("begin", [(name, tokens, [source])])
        self.pipe.send((kind,))
        receive.wait(WAIT_S)
        arrived = time.monotonic_ns()
        begun, stored = self.answer()
        self.do("finish", [name])
        return begun, stored, arrived

    def paged(self, source: list[int], target: list[int]) -> tuple[int, int]:
        """Move the same bytes by one paged write of the engine; return its begin and its end."""
        whole = self.rank.desc.to_bytes(), self.shape.places(target)
        known = self.rank.engine.expect_imm_count(_IMM, 1, take=True, deadline_s=_DEADLINE_S)
        self.pipe.send(("paged", whole, source))
        known.wait(WAIT_S)
        arrived = time.monotonic_ns()
        return self.answer(), arrived

    def check(self, source: list[int], target: list[int]) -> None:
        """Compare all bytes, and forget them.

        Raises:
            RuntimeError: A page differs.
        """
        size, rest = self.shape.page_bytes, self.shape.content()
        for page, place in zip(self.shape.places(source), self.shape.places(target), strict=True):
            if self.rank.handle.read(place * size, size) != page.to_bytes(8, "little") + rest:
                raise RuntimeError(f"page {page} is not what came as {place}")
            self.rank.handle.write(place * size, bytes(size))


def _copied(pair: Pair, memory: SharedMemory, target: list[int]) -> int:
    """Copy as many pages out of memory that the other process has filled; return the time."""
    size, shape = pair.shape.page_bytes, pair.shape
    start, to = ctypes.addressof(ctypes.c_char.from_buffer(_view(memory))), pair.rank.handle.address
    held = memory.size // size
    moves = [(to + place * size, start + at % held * size) for at, place in enumerate(shape.places(target))]
    begun = time.monotonic_ns()
    for dst, src in moves:
        ctypes.memmove(dst, src, size)
    return time.monotonic_ns() - begun


def transfers(network: str, name: str, shape: Shape, rounds: int) -> Report:
    """Time a request, the engine's paged write of the same pages, and memcpy, one after the other in each round."""
    source, target = list(range(shape.pages)), list(range(shape.pages))
    random.Random(1).shuffle(source)
    random.Random(2).shuffle(target)
    shared = SharedMemory(create=True, size=min(shape.num_bytes, _MOST_SHARED))
    times: dict[str, list[float]] = {"request": [], "paged": [], "memcpy": []}
    try:
        with Pair(network, shape, shared) as pair:
            for number in range(rounds + 1):
                begun, _, arrived = pair.request(source, target)
                times["request"].append((arrived - begun) / 1e9)
                if number == 0:
                    pair.check(source, target)
                begun, arrived = pair.paged(source, target)
                times["paged"].append((arrived - begun) / 1e9)
                if number == 0:
                    pair.check(source, target)
                times["memcpy"].append(_copied(pair, shared, target) / 1e9)
    finally:
        shared.close()
        shared.unlink()
    # The first round compares bytes and maps memory.
    medians = {kind: statistics.median(found[1:]) for kind, found in times.items()}
    return {
        "network": network,
        "name": name,
        "num_bytes": shape.num_bytes,
        "pages": shape.pages * shape.model.layers,
        "page_bytes": shape.page_bytes,
        "seconds": medians,
        "all_seconds": {kind: found[1:] for kind, found in times.items()},
        "of_paged": medians["paged"] / medians["request"],
        "of_memcpy": medians["memcpy"] / medians["request"],
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values do not exceed; NaN without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else math.nan


def _spread(times_us: Sequence[float]) -> Report:
    return {"count": len(times_us), "p50_us": percentile(times_us, 0.5), "p99_us": percentile(times_us, 0.99)}


def first_writes(network: str, rounds: int) -> Report:
    """Time one page from the word's store to the decode rank, alone and while a thread keeps Python's lock.

    `posted` is the part from the sight of the word to the posted write, as upper bounds: the engine counts by buckets.
    """
    shape = Shape(Model(layers=1, kv_heads=1, head_bytes=1024), 4, 4)
    report: Report = {"network": network}
    with Pair(network, shape) as pair:
        for kind in ("ready", "held"):
            before = pair.do("posted")
            rows = [pair.request([0], [0], kind) for _ in range(rounds)]
            posted = _within(before, pair.do("posted"))
            # Otherwise the storing thread itself has waited for the lock, between its clock and its store.
            found = [(arrived - begun) / 1e3 for begun, stored, arrived in rows if stored - begun < _UNDISTURBED_NS]
            report[kind] = {**_spread(found), "posted": posted}
    return report


def _step(pair: Pair, requests: int, number: int, shape: Shape) -> tuple[float, float]:
    """Return how long `begin_step` takes before anybody has asked for its requests, and afterwards."""
    work = [
        (f"{number}.{at}", shape.tokens, [list(range(at * shape.pages, (at + 1) * shape.pages))])
        for at in range(requests)
    ]
    alone = pair.do("begin", [(name, tokens // 2, pages) for name, tokens, pages in work])
    receives = [
        pair.decoder.request(pair.sources, name, pages, tokens=tokens, segment_tokens=tokens, deadline_s=_DEADLINE_S)
        for name, tokens, pages in work
    ]
    while any(receive.state == "asked" for receive in receives):
        time.sleep(0.0005)
    asked = pair.do("begin", work)
    pair.do("ready")
    for receive in receives:
        receive.wait(WAIT_S)
    pair.do("finish", [name for name, _, _ in work])
    return alone / 1e3, asked / 1e3


def begin_steps(network: str, rounds: int, requests: int = 32) -> Report:
    """Time `begin_step` for many requests of 64 pages in 61 layers."""
    one = Shape(Model(layers=61, kv_heads=1, head_bytes=16), 64, 4096)
    with Pair(network, Shape(one.model, one.page_tokens, one.tokens * requests)) as pair:
        times = [_step(pair, requests, number, one) for number in range(rounds)]
    found = dict(zip(("alone", "asked"), zip(*times, strict=True), strict=True))
    return {"network": network, "requests": requests, **{kind: _spread(values) for kind, values in found.items()}}


def report(
    networks: Sequence[str], shapes: dict[str, Shape], rounds: int, samples: int, say: Callable[[str], object]
) -> Report:
    """Measure all of it."""
    found: Report = {"schema": "putget_transfer.kv.bench/1", "transfers": [], "first_writes": [], "begin_steps": []}
    for network in networks:
        for name, shape in shapes.items():
            say(f"{network}, {name}: {shape.num_bytes / 1e6:.0f} MB")
            found["transfers"].append(transfers(network, name, shape, rounds))
        say(f"{network}: words and steps")
        found["first_writes"].append(first_writes(network, samples))
        found["begin_steps"].append(begin_steps(network, 1 + samples // 4))
    return found
