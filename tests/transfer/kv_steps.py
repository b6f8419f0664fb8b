"""Steps whose layers a graph reports, with the CUDA driver that the process finds: a real one or an imitated one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np

import putget_transfer as pt
from putget_transfer import kv
from putget_transfer.adapters.vllm.steps import Steps
from tests.transfer.kv_words import WAIT_S, Driver, settled

LAYERS, TOKENS, COUNT = 4, 4, 4
PAGE = 1 << 18  # a layer of a request is 1 MiB: portions of short prompts have several layers
WORK = 32 << 20
TRIES = 50
NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]


class Ranks:
    """A prefill rank, whose cache is somebody's memory, and a decode rank."""

    def __init__(self, memory: np.ndarray) -> None:
        network = pt.SimNetwork(5)
        self.engines = [pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() for _ in range(2)]
        self.source, self.target = memory, np.zeros_like(memory)
        shape = {"layout": "LBNC", "page_tokens": TOKENS, "num_kv_heads": 1, "packed": False}
        caches = [
            kv.KvCache(engine, {"model": memory}, **shape)
            for engine, memory in zip(self.engines, (self.source, self.target), strict=True)
        ]
        self.prefiller, self.decoder = kv.Prefiller(caches[0], lease_s=3600), kv.Decoder(caches[1])
        self.sources = self.decoder.sources([self.prefiller.source()])
        self.number = 0

    @property
    def word(self) -> int:
        return ctypes.c_uint64.from_address(self.prefiller.word).value

    def work(self) -> tuple[str, int, list[list[int]]]:
        """Return the next request."""
        self.number += 1
        return f"r{self.number}", COUNT * TOKENS, [list(range(COUNT))]

    def ask(self, name: str) -> kv.Receive:
        """Have the decode rank ask for a request, and wait until it is accepted."""
        pages = list(range(COUNT, 2 * COUNT))
        receive = self.decoder.request(self.sources, name, [pages], tokens=COUNT * TOKENS, deadline_s=600)
        settled(receive)
        return receive

    def watch(self, receive: kv.Receive, step: int, value: int) -> set[int]:
        """Wait until a request has arrived; return how many of its layers were there while others were not computed.

        No layer is there before the word says so, and the word never says a step that has not begun.
        """
        end = time.monotonic() + WAIT_S
        partly = set()
        while receive.state != "arrived":
            assert time.monotonic() < end, (receive.state, hex(self.word))
            self.decoder.poll()
            there = int((self.target[:, COUNT:, -1, -1] == value).all(axis=1).sum())
            said = self.word
            assert said >> 16 <= step
            computed = (said & 0xFFFF) * (said >> 16 == step)
            assert there <= computed, (there, hex(said))
            if computed < LAYERS:
                partly.add(there)
        assert (self.target[:, COUNT:] == value).all()
        assert self.word == step << 16 | LAYERS
        return partly - {0}

    def end(self, name: str) -> None:
        """End a request."""
        self.prefiller.finish(name)
        end = time.monotonic() + WAIT_S
        while name not in {found for found, _ in self.prefiller.poll()}:
            assert time.monotonic() < end
            time.sleep(0.001)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


class Engine:
    """An engine's passes: eager ones, and a graph, over a connector's steps."""

    def __init__(self, ranks: Ranks, steps: Steps, compute: Callable[[int], None], fill: Callable[[int], None]) -> None:
        self.ranks, self.steps, self.compute, self.fill = ranks, steps, compute, fill

    def forward(self) -> None:
        """Compute all layers, as a model does around whose attention vLLM calls the connector."""
        for layer, name in enumerate(NAMES):
            self.compute(layer)
            if self.steps.reports():
                self.steps.layer_done(name)

    def all_held(self, replay: Callable[[], None], synchronize: Callable[[], None]) -> None:
        """Run passes that belong to steps, and passes that do not."""
        ranks, steps = self.ranks, self.steps
        # Warm-up: no step has been stamped.
        replay()
        self.forward()
        synchronize()
        assert ranks.word == 0
        seen: set[int] = set()
        value = 0
        for run in range(TRIES):
            name, *_ = work = ranks.work()
            value += 1
            receive = ranks.ask(name)
            self.fill(value)
            steps.begin([work])
            step = steps.step
            # Passes of both kinds report their own step.
            (self.forward if run == 2 else replay)()
            steps.end()
            found = ranks.watch(receive, step, value)
            seen |= found if run != 2 else set()
            ranks.end(name)
            # A dummy pass, a step without prefills and a second capture change nothing.
            replay()
            self.forward()
            synchronize()
            assert ranks.word == step << 16 | LAYERS
            if run >= 3 and seen:
                break
        assert seen, "no layer arrived before the last was computed"
        self.refused(replay, value + 1)

    def refused(self, replay: Callable[[], None], value: int) -> None:
        """One request of a step is wrong: the other one leaves when the step is over, and not by its layers."""
        name, *_ = work = self.ranks.work()
        receive = self.ranks.ask(name)
        self.fill(value)
        self.steps.begin([work, ("wrong", TOKENS, [[999]])])
        replay()
        self.steps.end()
        self.ranks.watch(receive, self.steps.step - 1, value)
        self.ranks.end(name)


def aligned(size: int) -> np.ndarray:
    """Return zeroed memory that begins at a page."""
    memory = np.zeros(size + 4096, dtype=np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + size]


def main() -> None:
    """Have a graph of the driver's own write pages and report layers."""
    driver = Driver()
    stream = driver.stream()
    memory = aligned(LAYERS * 2 * COUNT * PAGE).reshape(LAYERS, 2 * COUNT, TOKENS, PAGE // TOKENS)
    work = aligned(WORK)
    for array in (memory, work):
        driver.call("cuMemHostRegister_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), 3)
    # Memory of the GPU: a layer's values, and as much as is copied while a layer is computed.
    values, source = ctypes.c_uint64(), ctypes.c_uint64()
    for at, size in ((values, COUNT * PAGE), (source, WORK)):
        driver.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
    ranks = Ranks(memory)
    is_captured = False
    steps = Steps(
        ranks.prefiller,
        {name: layer for layer, name in enumerate(NAMES)},
        stream=lambda: stream,
        captures=lambda: is_captured,
    )

    def compute(layer: int) -> None:
        for to, device in ((work, source), (memory[layer, :COUNT], values)):
            arguments = ctypes.c_uint64(to.ctypes.data), device, ctypes.c_size_t(to.nbytes), ctypes.c_void_p(stream)
            driver.call("cuMemcpyAsync", *arguments)

    def fill(value: int) -> None:
        host = np.full(COUNT * PAGE, value, dtype=np.uint8)
        driver.call("cuMemcpyHtoD_v2", values, ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.nbytes))

    engine = Engine(ranks, steps, compute, fill)
    is_captured = True
    with driver.capture(stream) as replay:
        engine.forward()
    is_captured = False
    engine.all_held(replay, lambda: driver.synchronize(stream))
    ranks.close()
    print("all held")


if __name__ == "__main__":
    main()
