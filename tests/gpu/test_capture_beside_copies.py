"""CUDA graphs that are captured while a balancer's thread copies experts: neither spoils the other.

One thread launches for both ranks, as kernels of a landing wait for nobody. So a capture of any mode is alone with the
copying thread: calls of other threads that a capture forbids would fail by themselves.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import putget
from putget.balancer import ExpertBlobs, Landing, Move
from putget.balancer.migrate import MOVERS

WORDS = 64 << 20  # of an expert
MOVED = 3  # experts of a batch
BATCHES = 8
DEADLINE_S = 30.0


class Pair:
    """Two ranks on one GPU: rank 0's slots hold 7, and rank 1 gets copies of them."""

    def __init__(self, mover: str) -> None:
        self.device = torch.device("cuda", 0)
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)]
        self.slots = [
            torch.full((MOVED + 1, WORDS), 7 + rank, dtype=torch.int32, device=self.device) for rank in (0, 1)
        ]
        torch.cuda.synchronize()
        self.comms = putget.Communicator.local(2)

        def make(rank: int) -> Landing:
            blobs = ExpertBlobs({"w": self.slots[rank]})
            with torch.cuda.stream(self.streams[rank]):
                return Landing(self.comms[rank], [blobs], mover=mover, cells=MOVED, device=self.device)

        with ThreadPoolExecutor(2) as pool:
            self.landings = list(pool.map(make, range(2)))

    def move(self) -> None:
        for landing, stream in zip(self.landings, self.streams, strict=True):
            with torch.cuda.stream(stream):
                landing.move(1 << 30)
        torch.cuda.synchronize()

    def begin(self) -> None:
        """Posts a batch, and tells the thread of free cells."""
        for landing in self.landings:
            assert landing.post([Move(0, 0, slot, 1, slot + 1) for slot in range(MOVED)])
        self.move()

    def end(self, batch: int) -> None:
        """Takes the batch when all of it has come."""
        end = time.monotonic() + DEADLINE_S
        while int(self.landings[1].landed) < batch or self.landings[0].progress().put < MOVED * batch:
            assert time.monotonic() < end, self.landings[0].progress()
            self.move()
        number = torch.tensor([batch], dtype=torch.int32, device=self.device)
        torch.cuda.synchronize()
        for landing, stream in zip(self.landings, self.streams, strict=True):
            with torch.cuda.stream(stream):
                landing.take(number)
        torch.cuda.synchronize()

    def close(self) -> None:
        for landing in self.landings:
            landing.close()
        for comm in self.comms:
            comm.close()


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_graph_is_captured_while_experts_are_copied(mode: str, mover: str) -> None:
    pair = Pair(mover)
    value = torch.zeros(4, device=pair.device)
    stream = torch.cuda.Stream(pair.device)
    value.add_(1)
    torch.cuda.synchronize()
    for batch in range(1, BATCHES + 1):
        pair.begin()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode=mode)
            value.add_(1)
            time.sleep(0.004)  # the thread goes on meanwhile
            value.add_(1)
            graph.capture_end()
        pair.end(batch)
        graph.replay()
        torch.cuda.synchronize()
        assert value.tolist() == [1.0 + 2 * batch] * 4
    assert bool((pair.slots[1][1:] == 7).all())
    pair.close()
