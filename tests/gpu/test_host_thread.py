"""A graph of thousands of nodes whose first kernel waits for a thread of the host: does the thread's work get through?

Published of balancers that copy from a thread (TensorRT-LLM): launching such a graph again blocks in the driver while
the first one runs, the thread's cudaMemcpyAsync waits behind that launch, and the kernel waits for the thread. putget's
kernels wait for nobody. Here one does, on purpose, so that the test shows whether `Landing.post` needs the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import putget
from putget.balancer import ExpertBlobs, Landing
from putget_bench.environment import driver_version

triton = pytest.importorskip("triton")
tl = triton.language

NODES, LAUNCHES = 4000, 12
LOOKS = 4_000_000  # of the kernel at the word, each a read over the bus: seconds
WORDS = 1024


@triton.jit
def _wait_kernel(word, missed, looks):  # type: ignore[no-untyped-def]
    """Grid 1. Looks at a word of the host until it is not 0, or so many times, which it counts in `missed`."""
    number = 0
    value = tl.load(word, volatile=True)
    while (value == 0) & (number < looks):
        value = tl.load(word, volatile=True)
        number += 1
    tl.atomic_add(missed, (value == 0).to(tl.int32))


class Waiting:
    """A landing area, and a graph that begins with a kernel that waits for the host."""

    def __init__(self, device: torch.device) -> None:
        (self.comm,) = putget.Communicator.local(1)
        self.table = torch.zeros(WORDS, dtype=torch.int32, device=device)
        blobs = ExpertBlobs({"w": torch.zeros(2, 4, device=device)})
        self.landing = Landing(self.comm, [blobs], device=device, tables=[self.table])
        self.word = torch.ones(1, dtype=torch.int32).pin_memory()
        self.missed = torch.zeros(1, dtype=torch.int32, device=device)
        self.batch = torch.zeros(1, dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.fresh = torch.full((WORDS,), 7, dtype=torch.int32).pin_memory()
        self.copied = torch.zeros(WORDS, dtype=torch.int32, device=device)
        self.own_stream = torch.cuda.Stream(device)
        self.graph = torch.cuda.CUDAGraph()
        self._nodes(8)
        with torch.cuda.stream(self.own_stream):
            self.copied.copy_(self.fresh, non_blocking=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self._nodes(NODES)

    def _nodes(self, number: int) -> None:
        _wait_kernel[(1,)](self.word, self.missed, LOOKS)
        self.landing.move()  # sees what has been posted
        self.landing.take(self.batch)
        for _ in range(number):
            self.count.add_(1)

    def copy(self) -> None:
        """The published way: a copy to the device from the thread, in order on a stream of its own."""
        with torch.cuda.stream(self.own_stream):
            self.copied.copy_(self.fresh, non_blocking=True)
            self.own_stream.synchronize()

    def post(self) -> None:
        """putget's way: the next table's words, as orders in memory of the host."""
        assert self.landing.post([], {0: self.fresh.clone()})

    def run(self, update: Callable[[], None]) -> bool:
        """Launches the graph again and again while a thread updates. Returns whether each kernel saw the word."""
        self.word.zero_()
        self.missed.zero_()
        self.batch.fill_(1)
        torch.cuda.synchronize()

        def work() -> None:
            stop.wait(1.0)  # by now the launches are on their way, or stand
            update()
            self.word.fill_(1)

        stop = threading.Event()
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(LAUNCHES):
            self.graph.replay()
            if not thread.is_alive():
                break
        torch.cuda.synchronize()
        thread.join()
        return self.missed.item() == 0

    def close(self) -> None:
        self.landing.close()
        self.comm.close()


@pytest.mark.gpu
@pytest.mark.timed
def test_an_update_from_a_thread_needs_no_driver(record_property: Callable[[str, object], None]) -> None:
    waiting = Waiting(torch.device("cuda", 0))
    try:
        assert waiting.run(waiting.post), "the kernel never saw what the thread has posted"
        assert torch.equal(waiting.table.cpu(), waiting.fresh)
        gets_through = waiting.run(waiting.copy)
        version = f"driver {driver_version()}, CUDA {torch.version.cuda}"
        record_property(f"cudaMemcpyAsync from the thread gets through, {version}", gets_through)
        print(f"cudaMemcpyAsync from the thread {'gets through' if gets_through else 'is stuck'}, {version}")
    finally:
        waiting.close()
