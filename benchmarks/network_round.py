"""A round of two domains of one rank each, beside the bare engine that moves the same messages, by turns in one run.

    python benchmarks/network_round.py --provider tcp,host --tokens 8,128 --output_file network_round.json

Each rank sends all of its tokens to the other one, and gets their sums back. The bare engine writes a message and a
return of the same lengths between two ends, by the table that proxies post to. Ranks are threads of one process. Beside
them stand the same round in one domain, which has no network, and the four halves of the round. Medians, microseconds.
The report says where and how as `putget bench` does, then `results` and `mismatches`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.protocol.transports import End, Over, two_ends

import putget
from putget_bench import environment

SCHEMA = "putget.network_round/1"
PROVIDERS = ("tcp", "host")
HALVES = ("dispatch_start", "dispatch_finish", "combine_start", "combine_finish")
_TURNS = 10
_TOP_K = 2
_HEADER_BYTES = 64  # of a message, before the index
_DISPATCH, _RETURN = 900, 901  # immediates
_VALUE = 3.0  # of the experts' rows


def both(body: Callable[[int], Any]) -> None:
    """Runs the body on both ranks, as threads."""
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class Product:
    """Rounds of putget: two ranks of one process."""

    def __init__(self, network: putget.Network | None, tokens: int, hidden_size: int) -> None:
        self._meeting = threading.Barrier(2)
        self._comms = putget.Communicator.local(2, network=network)
        self._objects: list[Any] = [None, None]
        row = putget.Payload((hidden_size,), torch.bfloat16)
        self._rows = torch.ones(tokens, hidden_size, dtype=torch.bfloat16)
        self._ids = torch.full((2, tokens, _TOP_K), -1, dtype=torch.int32)
        self._ids[0, :, 0], self._ids[1, :, 0] = 1, 0
        self._weights = torch.ones(tokens, _TOP_K)
        self._out = torch.empty(2, tokens, hidden_size, dtype=torch.bfloat16)
        options: dict[str, Any] = {"num_experts": 2, "top_k": _TOP_K, "max_tokens_per_rank": tokens, "device": "cpu"}

        def make(rank: int) -> None:
            self._objects[rank] = putget.AllToAll(self._comms[rank], **options, payloads=[row], output=row)

        both(make)

    def play(self, count: int, times: list[float], halves: dict[str, list[float]] | None = None) -> None:
        """Rounds; the times of rank 0 in seconds, of each half if there is a place for them."""

        def rounds(rank: int) -> None:
            a2a = self._objects[rank]
            for _ in range(count):
                self._meeting.wait()
                marks = [time.perf_counter()]
                if halves is None:
                    a2a.dispatch(self._ids[rank], self._weights, self._rows)
                    a2a.combine(out=self._out[rank])
                else:
                    a2a.dispatch_start(self._ids[rank], self._weights, self._rows)
                    marks.append(time.perf_counter())
                    a2a.dispatch_finish()
                    marks.append(time.perf_counter())
                    a2a.combine_start()
                    marks.append(time.perf_counter())
                    a2a.combine_finish(out=self._out[rank])
                marks.append(time.perf_counter())
                if rank == 0:
                    times.append(marks[-1] - marks[0])
                    for name, begin, end in zip(HALVES, marks, marks[1:], strict=False):
                        if halves is not None:
                            halves[name].append(end - begin)

        both(rounds)

    def is_right(self) -> bool:
        """Whether a round brings every rank what the other one's expert has made of its tokens."""

        def round_(rank: int) -> None:
            a2a = self._objects[rank]
            a2a.dispatch(self._ids[rank], self._weights, self._rows)
            a2a.combine_input.fill_(_VALUE)
            a2a.combine(out=self._out[rank])

        self._out.zero_()
        both(round_)
        return bool((self._out == _VALUE).all())

    def close(self) -> None:
        """Ends it on both ranks together: each owes the other something until then."""
        both(lambda rank: self._objects[rank].close())
        for comm in self._comms:
            comm.close()


class Bare:
    """The engine alone: a message there and one back, both ranks at a time."""

    def __init__(self, provider: str, message_bytes: int, return_bytes: int) -> None:
        self._meeting = threading.Barrier(2)
        self._seen: tuple[dict[int, int], dict[int, int]] = ({}, {})  # counts of the counters, by immediate
        self._ends: Sequence[End] = two_ends(provider)
        self._lengths = ((_DISPATCH, message_bytes), (_RETURN, return_bytes))
        self._kept = [
            [bytearray(max(message_bytes, return_bytes)), bytearray(message_bytes), bytearray(return_bytes)]
            for _ in range(2)
        ]
        regions = [[self._ends[rank].add_region(memory) for memory in self._kept[rank]] for rank in range(2)]
        self._sources = [regions[rank][0] for rank in range(2)]
        self._targets = [
            [self._ends[rank].target_at(self._ends[1 - rank], region) for region in regions[1 - rank][1:]]
            for rank in range(2)
        ]

    def play(self, count: int, times: list[float]) -> None:
        """Exchanges; the times of rank 0, in seconds."""

        def exchanges(rank: int) -> None:
            end, over = self._ends[rank], Over()
            counters = [end.counter(imm) for imm, _ in self._lengths]
            for _ in range(count):
                self._meeting.wait()
                begin = time.perf_counter()
                for (imm, length), counter, target in zip(self._lengths, counters, self._targets[rank], strict=True):
                    seen = self._seen[rank].get(imm, 0)
                    end.write(over, imm, target, length, (self._sources[rank], 0, 0))
                    while counter() == seen:
                        time.sleep(0)
                    self._seen[rank][imm] = seen + 1
                if rank == 0:
                    times.append(time.perf_counter() - begin)

        both(exchanges)


def measure(provider: str, tokens: int, hidden_size: int, rounds: int) -> tuple[dict[str, Any], bool]:
    """One line of the report, and whether the rounds were right."""
    row_bytes = -(-8 * _TOP_K // 16) * 16 + 2 * hidden_size
    message_bytes = -(-(_HEADER_BYTES + _TOP_K * tokens) // 16) * 16 + tokens * row_bytes
    return_bytes = tokens * 2 * hidden_size
    across = Product(putget.Network(provider, domain_size=1), tokens, hidden_size)
    alone = Product(None, tokens, hidden_size)
    bare = Bare(provider, message_bytes, return_bytes)
    right = across.is_right() and alone.is_right()
    times: dict[str, list[float]] = {"round": [], "one_domain": [], "bare": [], "by_halves": []}
    halves: dict[str, list[float]] = {name: [] for name in HALVES}
    for _ in range(_TURNS):
        count = max(1, rounds // _TURNS)
        across.play(count, times["round"])
        bare.play(count, times["bare"])
        alone.play(count, times["one_domain"])
        across.play(count, times["by_halves"], halves)
    right = right and across.is_right() and alone.is_right()
    across.close()
    alone.close()

    def median_us(values: list[float]) -> float:
        return statistics.median(values[len(values) // _TURNS :]) * 1e6

    line = {
        "provider": provider,
        "tokens": tokens,
        "hidden_size": hidden_size,
        "rounds": len(times["round"]),
        "message_bytes": message_bytes,
        "return_bytes": return_bytes,
        "round_us": median_us(times["round"]),
        "bare_us": median_us(times["bare"]),
        "ratio": median_us(times["round"]) / median_us(times["bare"]),
        "one_domain_us": median_us(times["one_domain"]),
        "halves_us": {name: median_us(values) for name, values in halves.items()},
    }
    return line, right


def main(arguments: list[str]) -> int:
    """Measures, prints a table, writes the report; 1 if a round was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="tcp,host", metavar="LIST", help="comma-separated (%(default)s)")
    parser.add_argument("--tokens", default="8,128", metavar="LIST", help="of each rank, comma-separated (%(default)s)")
    parser.add_argument("--hidden_size", type=int, default=1024, metavar="N", help="BF16 values a row (%(default)s)")
    parser.add_argument("--rounds", type=int, default=400, metavar="N", help="of each kind (%(default)s)")
    parser.add_argument("--output_file", type=Path, metavar="FILE", help="write the report as JSON")
    given = parser.parse_args(arguments)
    providers = given.provider.split(",")
    if not set(providers) <= set(PROVIDERS):
        parser.error(f"--provider must be a list of {', '.join(PROVIDERS)}, got {given.provider}")
    report: dict[str, Any] = {
        "schema": SCHEMA,
        **environment.describe(),
        "command": ["python", "benchmarks/network_round.py", *arguments],
        "results": [],
        "mismatches": [],
    }
    for provider in providers:
        for tokens in map(int, given.tokens.split(",")):
            line, right = measure(provider, tokens, given.hidden_size, given.rounds)
            report["results"].append(line)
            halves = ", ".join(f"{name} {value:.0f}" for name, value in line["halves_us"].items())
            print(
                f"{provider}, {tokens} tokens: round {line['round_us']:.0f} us, bare engine {line['bare_us']:.0f} us, "
                f"ratio {line['ratio']:.2f}, one domain {line['one_domain_us']:.0f} us; {halves}",
                flush=True,
            )
            if not right:
                report["mismatches"].append(f"{provider}, {tokens} tokens: a wrong sum")
                print(f"MISMATCH {report['mismatches'][-1]}")
    if given.output_file is not None:
        given.output_file.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
