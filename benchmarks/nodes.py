"""How long a GPU takes to tell the host that rows are ready, and to take rows that have come.

    python benchmarks/nodes.py --output_file nodes.json

Two emulated ranks on one GPU are two domains, with host staging and the network between threads. Rank 0 sends all of
its tokens to rank 1. The host looks at words of the boards, so that every figure is an upper bound:

doorbell   from before the launch of a CUDA graph of dispatch's start half to the word of rank 0 that its rows are in
           the outbox (X2). The launch itself is given too: the host looks after it has returned.
in_place   from the word of rank 1 that the message has landed (X4) to the word that it has ended the round (X6): rows
           in their slots, and one more kernel behind that, launched before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import putget

EXPERTS, TOP_K = 256, 8
PAYLOADS = [putget.Payload((7168,), torch.float8_e4m3fn), putget.Payload((56,), torch.float32)]
OUTPUT = putget.Payload((7168,), torch.bfloat16)
PATIENCE_NS = 2_000_000_000
# Words of native/protocol/nodes/board.h.
LINE, RANKS = 16, 128
SENT, OUT, LANDED, CLOSED = 0, LINE, LINE + RANKS, LINE + 2 * RANKS


class Word:
    """A word of a rank's board, as the host sees it."""

    def __init__(self, a2a: putget.AllToAll, rank: int, index: int) -> None:
        nodes = a2a._native._nodes
        assert nodes is not None
        self._word = ctypes.c_uint64.from_address(nodes._memory.address(rank) + 8 * index)

    def epoch(self) -> int:
        """The round that it speaks of."""
        return self._word.value >> 32

    def await_epoch(self, epoch: int) -> int:
        """When it is seen to say so, in ns."""
        begun = time.perf_counter_ns()
        while self._word.value >> 32 != epoch:
            if time.perf_counter_ns() - begun > PATIENCE_NS:
                raise TimeoutError(f"a word says {self.epoch()}, expected {epoch}")
        return time.perf_counter_ns()


def captured(stream: torch.cuda.Stream, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What a body launches, as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph


def measure(ranks: list[putget.AllToAll], streams: list[torch.cuda.Stream], tokens: int, rounds: int) -> dict[str, Any]:
    """Figures of `rounds` rounds with so many tokens, in us."""
    ids = torch.randint(EXPERTS // 2, EXPERTS, (tokens, TOP_K), device="cuda")
    rows = [torch.zeros(tokens, *part.shape, dtype=part.dtype, device="cuda") for part in PAYLOADS]
    sent = (ids, torch.ones(tokens, TOP_K, device="cuda"), *rows)
    none = tuple(part[:0] for part in sent)
    doorbell, landed = Word(ranks[0], 0, OUT + 1), Word(ranks[1], 1, LANDED)
    closed = Word(ranks[1], 1, CLOSED + 1)
    free = [Word(a2a, rank, SENT) for rank, a2a in enumerate(ranks)]

    def finish(a2a: putget.AllToAll) -> None:
        a2a.dispatch_finish()
        a2a.release()

    def receive() -> None:
        ranks[1].dispatch_start(*none)
        finish(ranks[1])

    torch.cuda.synchronize()
    start = captured(streams[0], lambda: ranks[0].dispatch_start(*sent))
    end = captured(streams[0], lambda: finish(ranks[0]))
    receiver = captured(streams[1], receive)
    times: dict[str, list[float]] = {"launch": [], "doorbell": [], "in_place": []}
    for _ in range(rounds):
        last = doorbell.epoch()
        for word in free:
            word.await_epoch(last)
        with torch.cuda.stream(streams[1]):
            receiver.replay()
        time.sleep(3e-4)  # until it waits
        with torch.cuda.stream(streams[0]):
            begun = time.perf_counter_ns()
            start.replay()
            returned = time.perf_counter_ns()
            rung = doorbell.await_epoch(last + 1)
            came = landed.await_epoch(last + 1)
            ended = closed.await_epoch(last + 1)
            end.replay()
        torch.cuda.synchronize()
        for name, ns in (("launch", returned - begun), ("doorbell", rung - begun), ("in_place", ended - came)):
            times[name].append(ns / 1e3)
    figures: dict[str, Any] = {"tokens": tokens}
    for name, values in times.items():
        kept = sorted(values[rounds // 10 :])
        figures[name] = {"median": round(statistics.median(kept), 1), "p99": round(kept[len(kept) * 99 // 100], 1)}
    return figures


def make(comm: putget.Communicator, stream: torch.cuda.Stream) -> putget.AllToAll:
    """A rank's object, with DeepSeek-V3's rows."""
    with torch.cuda.stream(stream):
        return putget.AllToAll(
            comm,
            num_experts=EXPERTS,
            top_k=TOP_K,
            max_tokens_per_rank=128,
            payloads=PAYLOADS,
            output=OUTPUT,
            device="cuda",
            timeout_s=10.0,
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500, help="of each number of tokens")
    parser.add_argument("--output_file", type=Path)
    args = parser.parse_args()
    comms = putget.Communicator.local(2, network=putget.Network("sim", domain_size=1))
    streams = [torch.cuda.Stream() for _ in comms]
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(make, comms, streams))
    figures = [measure(ranks, streams, tokens, args.rounds) for tokens in (1, 8, 32, 128)]
    print(f"{torch.cuda.get_device_name()}, us: median (p99)")
    for line in figures:
        words = ", ".join(
            f"{name} {line[name]['median']} ({line[name]['p99']})" for name in ("launch", "doorbell", "in_place")
        )
        print(f"{line['tokens']:>4} tokens: {words}")
    if args.output_file is not None:
        args.output_file.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "figures": figures}, indent=1))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(putget.AllToAll.close, ranks))
    for comm in comms:
        comm.close()


if __name__ == "__main__":
    main()
