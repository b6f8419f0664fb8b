"""Builds of putget in turns on one GPU: what a change of kernels costs or saves.

    python3 benchmarks/turns.py before=OTHER_CHECKOUT/python after=python --ranks 1,2,4,8 --tokens 1,8,128,512

Each build is a folder that has the package with its library in place (-DPUTGET_INPLACE=ON), and gets a process of its
own. The processes take turns; while one measures, the others wait. Ranks share the GPU: threads with a stream each, as
``Communicator.local`` gives them. So ratios say what instructions cost, and nothing about links.

A rank's time is that of one CUDA graph of PAIRS pairs of dispatch and combine. A turn's time is the median over
REPLAYS of the slowest rank. The table has medians over the turns in microseconds a pair, and the ratio to the first
build: the median over the turns of the two times that followed each other. Name a build twice to see how far ratios
scatter by themselves. The shape is DeepSeek-V3's, with random routing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
LEADING, PAIRS, REPLAYS = 4, 20, 20
WAYS = ("bf16", "fp8", "got", "copied")  # how rows come back; got: BF16, read where experts wrote them; copied: x
LIMIT_S = 120.0


def _tuning(putget: ModuleType, way: str) -> dict[str, object]:
    """Rows that are got where the way says so, in the words of builds before and after `putget.tuning.Tuning`."""
    if way not in ("got", "copied"):
        return {}
    if hasattr(putget, "tuning"):
        return {"tuning": putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=False))}
    return {"combine_launch": putget.Launch(inline_flags=1)}


class Fleet:
    """Emulated ranks that hold one captured graph each, and replay it together on demand."""

    def __init__(self, ranks: int, tokens: int, way: str, num_sms: int | None) -> None:
        import torch

        import putget

        self._torch, self._putget = torch, putget
        self._tokens, self._way, self._num_sms = tokens, way, num_sms
        self._comms = putget.Communicator.local(ranks)
        self._streams = [torch.cuda.Stream() for _ in range(ranks)]
        self._alone, self._all = threading.Barrier(ranks), threading.Barrier(ranks + 1)
        self._times: list[list[float]] = [[] for _ in range(ranks)]
        self._going = True
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in self._threads:
            thread.start()
        self._meet()

    def measure(self) -> float:
        """One turn: microseconds a pair."""
        for times in self._times:
            times.clear()
        self._meet()
        self._meet()
        return statistics.median(max(replay) for replay in zip(*self._times, strict=True))

    def close(self) -> None:
        """Ends the ranks."""
        self._going = False
        self._meet()
        for thread in self._threads:
            thread.join()
        for comm in self._comms:
            comm.close()

    def _meet(self) -> None:
        try:
            self._all.wait(LIMIT_S)
        except threading.BrokenBarrierError:
            raise self._failed[0] if self._failed else TimeoutError("ranks") from None

    def _serve(self, rank: int) -> None:
        try:
            with self._torch.cuda.stream(self._streams[rank]):
                self._run(rank)
        except BaseException as error:
            self._failed.append(error)
            self._alone.abort()
            self._all.abort()

    def _run(self, rank: int) -> None:
        torch, stream = self._torch, self._streams[rank]
        a2a, sent, out, x = self._prepare(rank)
        begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        for turn in range(len(self._threads)):  # one rank after the other: a capture synchronises the device
            self._alone.wait(LIMIT_S)
            if turn != rank:
                continue
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for pair in range(LEADING + PAIRS):
                    if pair == LEADING:  # the ranks have met by now
                        begin.record(stream)
                    a2a.dispatch(*sent)
                    a2a.combine(x, out=out)
                end.record(stream)
        self._alone.wait(LIMIT_S)
        self._all.wait(LIMIT_S)
        while True:
            self._all.wait()
            if not self._going:
                break
            for _ in range(REPLAYS):
                self._alone.wait(LIMIT_S)
                graph.replay()
                stream.synchronize()
                self._times[rank].append(begin.elapsed_time(end) * 1e3 / PAIRS)
            self._all.wait(LIMIT_S)
        a2a.check()
        self._alone.wait(LIMIT_S)
        a2a.close()

    def _prepare(self, rank: int) -> tuple[Any, tuple[Any, ...], Any, Any]:
        torch, putget, tokens = self._torch, self._putget, self._tokens
        generator = torch.Generator().manual_seed(rank)
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
        sent = (
            ids.int().cuda(),
            torch.rand(tokens, TOP_K, generator=generator).cuda(),
            torch.randn(tokens, HIDDEN, generator=generator).cuda().to(torch.float8_e4m3fn),
            torch.rand(tokens, HIDDEN // 128, generator=generator).cuda(),
        )
        out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        a2a = putget.AllToAll(
            self._comms[rank],
            num_experts=EXPERTS,
            top_k=TOP_K,
            max_tokens_per_rank=tokens,
            payloads=[putget.Payload((HIDDEN,), torch.float8_e4m3fn), putget.Payload((HIDDEN // 128,), torch.float32)],
            output=putget.Payload((HIDDEN,), torch.bfloat16),
            combine_dtype=torch.float8_e4m3fn if self._way == "fp8" else None,
            **_tuning(putget, self._way),
            num_sms=self._num_sms,
            device="cuda",
            timeout_s=10.0,
        )
        a2a.combine_input.normal_()
        torch.cuda.synchronize()
        self._alone.wait(LIMIT_S)
        a2a.dispatch(*sent)
        x = a2a.combine_input.clone() if self._way == "copied" else None
        a2a.combine(x, out=out)
        self._streams[rank].synchronize()
        return a2a, sent, out, x


def serve() -> None:
    """A build's process: a case a line on standard input, null for a turn, and an answer a line."""
    fleet: Fleet | None = None
    for line in sys.stdin:
        case = json.loads(line)
        if case is None:
            assert fleet is not None
            print(json.dumps(fleet.measure()), flush=True)
            continue
        if fleet is not None:
            fleet.close()
        fleet = Fleet(*case)
        print(json.dumps("ready"), flush=True)


class Build:
    """A process with one build."""

    def __init__(self, named: str) -> None:
        self.name, _, path = named.partition("=")
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(path).resolve()),
            "CUDA_MODULE_LOADING": "EAGER",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        }
        command = [sys.executable, __file__, "--serve"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def ask(self, line: object) -> Any:
        """Sends a line; returns the answer."""
        self._input.write(json.dumps(line) + "\n")
        self._input.flush()
        answer = self._output.readline()
        if not answer:
            raise RuntimeError(f"{self.name}: the process has ended (above)")
        return json.loads(answer)

    def end(self) -> None:
        """Lets the process end."""
        self._input.close()
        self._process.wait(LIMIT_S)


def compare(builds: list[Build], cases: list[tuple[int, int, str, int | None]], turns: int) -> list[dict[str, Any]]:
    """A row for each case, printed as it is there: of each build the median, and the ratio to the first one."""
    rows = []
    print(f"{'ranks':>5} {'tokens':>6} {'way':>5} " + " ".join(f"{build.name:>16}" for build in builds), flush=True)
    for case in cases:
        for build in builds:
            build.ask(case)
        seen: list[list[float]] = [[] for _ in builds]
        for turn in range(turns):
            order = range(len(builds)) if turn % 2 == 0 else reversed(range(len(builds)))
            for i in order:
                seen[i].append(build_time := builds[i].ask(None))
                assert build_time > 0
        medians = [statistics.median(times) for times in seen]
        ratios = [statistics.median(b / a for a, b in zip(seen[0], times, strict=True)) for times in seen]
        cells = " ".join(f"{time:>8.2f} ({ratio:.3f})" for time, ratio in zip(medians, ratios, strict=True))
        print("{:>5} {:>6} {:>5} ".format(*case[:3]) + cells, flush=True)
        rows.append(
            {
                "ranks": case[0],
                "tokens": case[1],
                "way": case[2],
                "num_sms": case[3],
                "pair_us": medians,
                "ratio": ratios,
            }
        )
    return rows


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--tokens", default="1,8,128,512")
    parser.add_argument("--ways", default="bf16,fp8", help=f"how rows travel back, of {', '.join(WAYS)}")
    parser.add_argument("--num_sms", type=int, help="most SMs of a call (default: putget's choice)")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    if len(args.builds) < 2 or not all("=" in build for build in args.builds):
        parser.error("builds: two or more, each NAME=FOLDER")
    cases = [
        (int(ranks), int(tokens), way, args.num_sms)
        for ranks in args.ranks.split(",")
        for tokens in args.tokens.split(",")
        for way in args.ways.split(",")
    ]
    builds = [Build(named) for named in args.builds]
    rows = compare(builds, cases, args.turns)
    for build in builds:
        build.end()
    if args.output_file is not None:
        names = [build.name for build in builds]
        args.output_file.write_text(json.dumps({"builds": names, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
