"""Kernels that say how far a step is, with the CUDA driver that the process finds: a real one or an imitated one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import putget_transfer as pt
from putget_transfer import kv

WAIT_S = 60.0
LAYERS, TOKENS = 3, 4


class Driver:
    """The test's own calls of the driver. Every call has to succeed."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, (name, code)

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
        assert stream.value
        return stream.value

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))

    @contextmanager
    def capture(self, stream: int) -> Iterator[Callable[[], None]]:
        """Yield a function that replays, behind the block, what the block has put on the stream."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        # 0: any call of this thread that may not be captured ends the capture.
        self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(0))
        yield lambda: self.call("cuGraphLaunch", ready, ctypes.c_void_p(stream))
        self.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))


class Pair:
    """A prefill rank of some layers and a decode rank."""

    def __init__(self) -> None:
        network = pt.SimNetwork(11)
        self.engines = [pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() for _ in range(2)]
        self.memory = [np.zeros([LAYERS, 64, TOKENS, 256], dtype=np.uint8) for _ in self.engines]
        shape = {"layout": "LBNC", "page_tokens": TOKENS, "num_kv_heads": 1, "packed": False}
        source, target = (
            kv.KvCache(engine, {"model": memory}, **shape)
            for engine, memory in zip(self.engines, self.memory, strict=True)
        )
        self.prefiller, self.decoder = kv.Prefiller(source, lease_s=3600), kv.Decoder(target)
        self.sources = self.decoder.sources([self.prefiller.source()])

    def ask(self, name: str, page: int) -> kv.Receive:
        return self.decoder.request(self.sources, name, [[page]], tokens=TOKENS, deadline_s=600)

    def work(self, name: str, page: int, value: int) -> list[tuple[str, int, list[list[int]]]]:
        self.memory[0][:, page] = value
        return [(name, TOKENS, [[page]])]

    def word(self) -> int:
        return ctypes.c_uint64.from_address(self.prefiller.word).value

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def settled(receive: kv.Receive) -> None:
    """Wait until a prefiller has accepted."""
    end = time.monotonic() + WAIT_S
    while receive.state == "asked":
        assert time.monotonic() < end
        time.sleep(0.001)


def main() -> None:
    """Replay one graph for several steps, and passes that belong to none."""
    driver, pair = Driver(), Pair()
    stream = driver.stream()
    # The first capture loads the kernels.
    with driver.capture(stream) as replay:
        for layer in range(LAYERS):
            pair.prefiller.layer_done(layer, stream)
    for _ in range(3):
        # Warm-up: no step has been stamped.
        replay()
    driver.synchronize(stream)
    assert pair.word() == 0
    for step in (1, 2, 7):
        name, page = f"r{step}", 8 + step
        receive = pair.ask(name, page)
        settled(receive)
        pair.prefiller.begin_step(step, pair.work(name, page, 20 + step), stream)
        driver.synchronize(stream)
        # A stamp alone releases nothing of its step.
        assert pair.word() >> 16 < step
        pair.prefiller.layer_done(0, stream)
        driver.synchronize(stream)
        assert pair.word() == step << 16 | 1
        assert receive.state == "accepted"
        replay()
        receive.wait(WAIT_S)
        assert (pair.memory[1][:, page] == 20 + step).all()
        # A draft pass, a replay and an eager pass begin with the first layer: the word does not go back.
        pair.prefiller.layer_done(0, stream)
        replay()
        pair.prefiller.layer_done(0)
        driver.synchronize(stream)
        assert pair.word() == step << 16 | LAYERS
        pair.prefiller.finish(name)
    # The following layers belong to no step: layers that step 9 has not computed stay unreported.
    pair.prefiller.begin_step(9, pair.work("late", 30, 99), stream)
    pair.prefiller.layer_done(0, stream)
    pair.prefiller.end_step(stream)
    replay()
    driver.synchronize(stream)
    assert pair.word() == 9 << 16 | 1
    # The host may go on where kernels have begun.
    receive = pair.ask("late", 30)
    settled(receive)
    pair.prefiller.layer_done(LAYERS - 1)
    receive.wait(WAIT_S)
    assert pair.word() == 9 << 16 | LAYERS
    mistakes(driver, pair, stream)
    pair.prefiller.begin_step(11, [], stream)
    pair.close()
    # A graph may outlive engine and prefiller: it stores to a page that nobody reads.
    del pair
    replay()
    driver.synchronize(stream)
    print("all held")


def mistakes(driver: Driver, pair: Pair, stream: int) -> None:
    """Refuse what is no step before anything of it has an effect."""
    for step, work in ((9, pair.work("x", 1, 1)), (10, [("x", TOKENS, [[999]])])):
        with pytest.raises(ValueError, match="came"):
            pair.prefiller.begin_step(step, work, stream)
    driver.synchronize(stream)
    assert pair.word() == 9 << 16 | LAYERS


if __name__ == "__main__":
    main()
