"""How long a GPU takes to tell the host that rows are ready, and to take rows that have come.

    python benchmarks/domains.py --staging device --output_file domains.json

Two ranks are two domains, joined by the network between threads: a GPU each where there are two, else both on one. Rows
wait in host memory or on the GPU. Rank 0 sends all of its tokens to rank 1. The host looks at words of the boards:

copy       from before the launch of a CUDA graph that copies 8 bytes to the host until they are seen there: what a
           launch and a look cost by themselves.
doorbell   from before the launch of a graph of dispatch's start half to the word of rank 0 that its rows are in the
           outbox (X2). On one GPU the receiver is launched behind that: it would look for its message meanwhile.
in_place   from the word of rank 1 that the message has landed (X4) to the word that it has ended the round (X6): rows
           in their slots, and one more kernel behind that, launched before. An upper bound.
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
# Words of native/protocol/domains/board.h.
LINE, RANKS = 16, 128
SENT, OUT, LANDED, CLOSED = 0, LINE, LINE + RANKS, LINE + 2 * RANKS


class Word:
    """A word of a rank's board, as the host sees it."""

    def __init__(self, a2a: putget.AllToAll, rank: int, index: int) -> None:
        across = a2a._native._across
        assert across is not None
        self._word = ctypes.c_uint64.from_address(across._memory.address(rank) + 8 * index)

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
    """A body's launches, as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph


def copy_of_a_word(stream: torch.cuda.Stream, rounds: int) -> list[float]:
    """Times from a launch until 8 bytes are seen, in us."""
    source = torch.zeros(1, dtype=torch.int64, device=stream.device)
    target = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    seen = ctypes.c_int64.from_address(target.data_ptr())

    def body() -> None:
        source.add_(1)
        target.copy_(source, non_blocking=True)

    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        graph = captured(stream, body)
        times = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            last = seen.value
            begun = time.perf_counter_ns()
            graph.replay()
            while seen.value == last and time.perf_counter_ns() - begun < PATIENCE_NS:
                pass
            times.append((time.perf_counter_ns() - begun) / 1e3)
    return times


class Sender:
    """Rank 0 and rank 1, captured for so many tokens."""

    def __init__(self, ranks: list[putget.AllToAll], streams: list[torch.cuda.Stream], tokens: int) -> None:
        self._streams = streams
        devices = [stream.device for stream in streams]
        ids = torch.randint(EXPERTS // 2, EXPERTS, (tokens, TOP_K), device=devices[0])
        rows = [torch.zeros(tokens, *part.shape, dtype=part.dtype, device=devices[0]) for part in PAYLOADS]
        sent = (ids, torch.ones(tokens, TOP_K, device=devices[0]), *rows)
        none = tuple(part[:0].to(devices[1]) for part in sent)
        self._kept = (sent, none)
        self.doorbell, self.landed = Word(ranks[0], 0, OUT + 1), Word(ranks[1], 1, LANDED)
        self.closed = Word(ranks[1], 1, CLOSED + 1)
        self.free = [Word(a2a, rank, SENT) for rank, a2a in enumerate(ranks)]

        def finish(a2a: putget.AllToAll) -> None:
            a2a.dispatch_finish()
            a2a.release()

        def receive() -> None:
            ranks[1].dispatch_start(*none)
            finish(ranks[1])

        self.synchronize()
        self._graphs = {
            "start": (0, self._capture(0, lambda: ranks[0].dispatch_start(*sent))),
            "end": (0, self._capture(0, lambda: finish(ranks[0]))),
            "receive": (1, self._capture(1, receive)),
        }

    def _capture(self, rank: int, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self._streams[rank].device):
            return captured(self._streams[rank], body)

    def launch(self, name: str) -> tuple[int, int]:
        """Replays the graph of this name, on its rank's stream. When that began and had returned, in ns."""
        rank, graph = self._graphs[name]
        with torch.cuda.device(self._streams[rank].device), torch.cuda.stream(self._streams[rank]):
            begun = time.perf_counter_ns()
            graph.replay()
            return begun, time.perf_counter_ns()

    def synchronize(self) -> None:
        """Waits for both ranks' GPUs."""
        for stream in self._streams:
            torch.cuda.synchronize(stream.device)

    def round(self, receiver_waits: bool) -> dict[str, float]:
        """One round, whose receiver waits before rank 0 begins, or begins when rank 0 has told."""
        last = self.doorbell.epoch()
        for word in self.free:
            word.await_epoch(last)
        if receiver_waits:
            self.launch("receive")
        time.sleep(3e-4)
        begun, returned = self.launch("start")
        rung = self.doorbell.await_epoch(last + 1)
        if not receiver_waits:
            self.launch("receive")
        came = self.landed.await_epoch(last + 1)
        ended = self.closed.await_epoch(last + 1)
        self.launch("end")
        self.synchronize()
        return {"launch": (returned - begun) / 1e3, "doorbell": (rung - begun) / 1e3, "in_place": (ended - came) / 1e3}


def summary(times: list[float]) -> dict[str, float]:
    """The median and the 99th percentile, without the first tenth."""
    kept = sorted(times[len(times) // 10 :])
    return {"median": round(statistics.median(kept), 1), "p99": round(kept[len(kept) * 99 // 100], 1)}


def measure(ranks: list[putget.AllToAll], streams: list[torch.cuda.Stream], tokens: int, rounds: int) -> dict[str, Any]:
    """Figures of `rounds` rounds of each kind with so many tokens, in us."""
    sender = Sender(ranks, streams, tokens)
    shares_gpu = streams[0].device == streams[1].device
    told = [sender.round(receiver_waits=not shares_gpu) for _ in range(rounds)]
    taken = [sender.round(receiver_waits=True) for _ in range(rounds)]
    return {
        "tokens": tokens,
        "launch": summary([times["launch"] for times in told]),
        "doorbell": summary([times["doorbell"] for times in told]),
        "in_place": summary([times["in_place"] for times in taken]),
    }


def make(comm: putget.Communicator, stream: torch.cuda.Stream) -> putget.AllToAll:
    """A rank's object, with DeepSeek-V3's rows."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        return putget.AllToAll(
            comm,
            num_experts=EXPERTS,
            top_k=TOP_K,
            max_tokens_per_rank=128,
            payloads=PAYLOADS,
            output=OUTPUT,
            device=stream.device,
            timeout_s=10.0,
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staging", choices=("host", "device"), default="host", help="where rows wait (%(default)s)")
    parser.add_argument("--rounds", type=int, default=500, help="of each number of tokens")
    parser.add_argument("--output_file", type=Path)
    args = parser.parse_args()
    comms = putget.Communicator.local(2, network=putget.Network("sim", domain_size=1, staging=args.staging))
    gpus = torch.cuda.device_count()
    streams = [torch.cuda.Stream(device=rank % gpus) for rank in range(len(comms))]
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(make, comms, streams))
    copy = summary(copy_of_a_word(streams[0], args.rounds))
    figures = [measure(ranks, streams, tokens, args.rounds) for tokens in (1, 8, 32, 128)]
    used = len({stream.device for stream in streams})
    print(f"{used} x {torch.cuda.get_device_name()}, staging {args.staging}, us: median (p99)")
    print(f"a copy of 8 bytes: {copy['median']} ({copy['p99']})")
    for line in figures:
        words = ", ".join(
            f"{name} {line[name]['median']} ({line[name]['p99']})" for name in ("launch", "doorbell", "in_place")
        )
        print(f"{line['tokens']:>4} tokens: {words}")
    if args.output_file is not None:
        place = {"gpu": torch.cuda.get_device_name(), "gpus": used, "staging": args.staging}
        result = {**place, "copy": copy, "figures": figures}
        args.output_file.write_text(json.dumps(result, indent=1))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(putget.AllToAll.close, ranks))
    for comm in comms:
        comm.close()


if __name__ == "__main__":
    main()
