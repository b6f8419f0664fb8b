"""The cost of an adapter on top of ``putget.AllToAll``: pairs of dispatch and combine of both, in turns on one GPU.

    python3 benchmarks/adapters.py --ranks 1,2,4 --tokens 1,8,128,512

Ranks share the GPU: threads with a stream each, as ``Communicator.local`` gives them. A rank's time is that of one CUDA
graph of PAIRS pairs. A turn's time is the median over REPLAYS of the slowest rank; ways take turns, and the table has
medians over the turns in microseconds a pair, and the ratio to ``AllToAll``: the median over the turns of the two times
that followed each other. The shape is DeepSeek-V3's, FP8 rows with scales, with random routing.

Ways: ``alltoall`` itself, rows and scales as payloads and experts' rows written in place; ``flashinfer``, MoeAlltoAll
without rows by source, whose expert ids are the routes; ``ids_travel``, with expert ids as a payload more;
``by_source``, with rows by source too; ``tensorrt_llm``, the four-payload form. With ``--device cpu`` it only shows
that all ways run.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import putget
from putget.adapters import shared
from putget.adapters.flashinfer import MoeAlltoAll
from putget.adapters.tensorrt_llm import FourPayloadAllToAll

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
LEADING, PAIRS, REPLAYS, TURNS = 4, 20, 20, 9
WAYS = ("alltoall", "flashinfer", "ids_travel", "by_source", "tensorrt_llm")
LIMIT_S = 300.0


def _sent(rank: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """ids, weights, rows, scales."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
    rows = torch.randn(tokens, HIDDEN, generator=generator).to(device).to(torch.float8_e4m3fn)
    weights = torch.rand(tokens, TOP_K, generator=generator).to(device)
    return ids.int().to(device), weights, rows, torch.rand(tokens, HIDDEN // 128, generator=generator).to(device)


def _pair(way: str, comm: putget.Communicator, tokens: int, device: torch.device) -> tuple[Callable[[], None], Any]:
    """One dispatch and combine of this way, and what is to be closed."""
    ids, weights, rows, scales = _sent(comm.rank, tokens, device)
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    if way == "alltoall":
        a2a = putget.AllToAll(
            comm,
            num_experts=EXPERTS,
            top_k=TOP_K,
            max_tokens_per_rank=tokens,
            payloads=[putget.Payload((HIDDEN,), rows.dtype), putget.Payload((HIDDEN // 128,), scales.dtype)],
            output=putget.Payload((HIDDEN,), torch.bfloat16),
            device=device,
        )

        def plain() -> None:
            a2a.dispatch(ids, weights, rows, scales)
            a2a.combine(out=out)

        return plain, a2a
    if way == "tensorrt_llm":
        four = FourPayloadAllToAll(comm, EXPERTS, TOP_K, tokens, hidden_size=HIDDEN, device=device)

        def of_four() -> None:
            four.dispatch(rows, scales, ids, weights)
            four.combine(four.get_combine_payload_tensor_in_workspace(tokens, HIDDEN, torch.bfloat16))

        return of_four, None
    moe = MoeAlltoAll(
        SimpleNamespace(moe_ep_size=comm.size, moe_ep_rank=comm.rank),
        tokens,
        TOP_K,
        EXPERTS,
        hidden_size=HIDDEN,
        comm=comm,
        device=device,
        by_source=way == "by_source",
        ids_are_routes=way == "flashinfer",
    )

    def of_flashinfer() -> None:
        moe.dispatch(ids, [rows, scales, ids, weights], tokens, -1, 2)
        place = moe.get_combine_payload_tensor_in_workspace(tokens, HIDDEN, torch.bfloat16)
        moe.combine(place, tokens, payload_in_workspace=True, output=out)

    return of_flashinfer, None


class Fleet:
    """Ranks that run all ways on demand, each way by a graph of its own."""

    def __init__(self, ranks: int, tokens: int, device: torch.device) -> None:
        self._tokens, self._device = tokens, device
        # A group each: adapters of one group share a workspace, where objects of several layouts cost more.
        self._comms = {way: putget.Communicator.local(ranks) for way in WAYS}
        self._alone, self._all = threading.Barrier(ranks), threading.Barrier(ranks + 1)
        self._times: list[list[float]] = [[] for _ in range(ranks)]
        self._way: str | None = None
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in self._threads:
            thread.start()
        self._meet()

    def measure(self, way: str) -> float:
        """One turn: microseconds a pair."""
        for times in self._times:
            times.clear()
        self._way = way
        self._meet()
        self._meet()
        return statistics.median(max(replay) for replay in zip(*self._times, strict=True))

    def close(self) -> None:
        """Ends the ranks."""
        self._way = None
        self._meet()
        for thread in self._threads:
            thread.join()
        shared.close_shared()
        for comms in self._comms.values():
            for comm in comms:
                comm.close()

    def _meet(self) -> None:
        try:
            self._all.wait(LIMIT_S)
        except threading.BrokenBarrierError:
            raise self._failed[0] if self._failed else TimeoutError("ranks") from None

    def _serve(self, rank: int) -> None:
        try:
            if self._device.type == "cuda":
                with torch.cuda.stream(torch.cuda.Stream()):
                    self._run(rank)
            else:
                self._run(rank)
        except BaseException as error:
            self._failed.append(error)
            self._alone.abort()
            self._all.abort()

    def _run(self, rank: int) -> None:
        pairs = {way: _pair(way, self._comms[way][rank], self._tokens, self._device) for way in WAYS}
        timed = {}
        for way in WAYS:
            for _ in range(2):
                pairs[way][0]()
            timed[way] = self._timed(rank, pairs[way][0])
            self._alone.wait(LIMIT_S)
        self._all.wait(LIMIT_S)
        while True:
            self._all.wait()
            if self._way is None:
                break
            for _ in range(REPLAYS):
                self._alone.wait(LIMIT_S)
                self._times[rank].append(timed[self._way]())
            self._all.wait(LIMIT_S)
        self._alone.wait(LIMIT_S)
        for _, closes in pairs.values():
            if closes is not None:
                closes.close()

    def _timed(self, rank: int, pair: Callable[[], None]) -> Callable[[], float]:
        """Runs the pairs once and tells microseconds per pair."""
        if self._device.type == "cpu":

            def on_cpu() -> float:
                begin = time.perf_counter()
                pair()
                return (time.perf_counter() - begin) * 1e6

            return on_cpu
        stream = torch.cuda.current_stream()
        begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))  # type: ignore[call-arg]
        graph = torch.cuda.CUDAGraph()
        for turn in range(len(self._threads)):  # one rank after the other: a capture synchronises the device
            self._alone.wait(LIMIT_S)
            if turn != rank:
                continue
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for number in range(LEADING + PAIRS):
                    if number == LEADING:  # the ranks have met by now
                        begin.record(stream)
                    pair()
                end.record(stream)
        self._alone.wait(LIMIT_S)

        def on_gpu() -> float:
            graph.replay()
            stream.synchronize()
            return begin.elapsed_time(end) * 1e3 / PAIRS

        return on_gpu


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--tokens", default="1,8,128,512")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, putget {putget.__version__}, torch {torch.__version__}; us a pair, and its ratio to alltoall")
    print("| ranks | tokens | " + " | ".join(WAYS) + " |")
    print("|---|---|" + "---|" * len(WAYS))
    for ranks in map(int, options.ranks.split(",")):
        for tokens in map(int, options.tokens.split(",")):
            fleet = Fleet(ranks, tokens, device)
            turns = [{way: fleet.measure(way) for way in WAYS} for _ in range(options.turns)]
            fleet.close()
            cells = []
            for way in WAYS:
                ratio = statistics.median(turn[way] / turn["alltoall"] for turn in turns)
                cells.append(f"{statistics.median(turn[way] for turn in turns):.1f} ({ratio:.3f})")
            print(f"| {ranks} | {tokens} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
