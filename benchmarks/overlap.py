"""The use of start and finish halves: a matrix product between them hides the transfer.

    python benchmarks/overlap.py --ep_size 4 --tokens 512 --num_sms 8,16,32 --output_file overlap.json

A round in a CUDA graph, with an event on either side: dispatch_start on a stream of its own with few SMs, a matrix
product on the main stream meanwhile, which leaves it those SMs, dispatch_finish; then the same with combine. Beside
it the halves alone and the products alone, and each half by itself, its finish long after its start. Times are of the
slowest rank, medians over iterations, in turns. The round is compared with the reference before and after. Perfect
router, shape of deepseek_v3. On the CPU there is one stream: that checks this program, and times nothing of interest.
The report has the fields of `putget bench` that say where and how, `overlap` (products_leaving: the products on the
SMs that are left; over_longer: together over the longer of halves and products), `gap`, and `mismatches`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from putget import Communicator
from putget.tuning import Launch, Tuning
from putget_bench import environment, launch
from putget_bench.contender import Putget
from putget_bench.parser import build_parser
from putget_bench.roofline import Link, make_timer
from putget_bench.rounds import Rounds
from putget_bench.settings import Settings, resolve
from putget_bench.timing import Step, Timer, median, series_length, slowest

SCHEMA = "putget.overlap/1"
_LONG_GAP_CYCLES = 400_000  # a quarter of a millisecond of an idle kernel between a start and its finish
_ALL_SMS = 1 << 16
_ROWS = {"sentinel": True, "got": False}  # Launch.sentinel_rows
_SIDE = {"cuda": 7168, "cpu": 64}


@dataclass(frozen=True)
class Plan:
    """The measurements of a run.

    Attributes:
        settings: shape and sizes.
        combine: names of _ROWS, one run each. Rows that are got cross in the finish half: only sentinel rows can hide.
        num_sms: SMs of the halves, one run each.
        rows: rows of the first factor of each matrix product, one run each: the product's length.
    """

    settings: Settings
    combine: tuple[str, ...]
    num_sms: tuple[int, ...]
    rows: tuple[int, ...]


class Overlapped:
    """One round by halves, with work of the main stream meanwhile."""

    def __init__(self, putget: Putget, device: torch.device) -> None:
        self._round = putget
        self._all_to_all = putget._all_to_all
        # First served: a product that has begun would keep the round waiting.
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def run(self, work: Callable[[], object]) -> None:
        """Enqueues the round, `work` between the halves of each operation."""
        mine = self._round._round.mine
        self._meanwhile(
            lambda: self._all_to_all.dispatch_start(
                mine.topk_ids, mine.topk_weights, *mine.payloads, max_rows=self._round._round.num_tokens
            ),
            work,
        )
        self._all_to_all.dispatch_finish()
        self._meanwhile(self._all_to_all.combine_start, work)
        self._all_to_all.combine_finish(out=self._round.output)

    def steps(self, idle: Callable[[], object]) -> list[Step]:
        """Each half by itself, the finish long after the start."""
        mine = self._round._round.mine
        a2a = self._all_to_all
        return [
            Step(
                lambda: a2a.dispatch_start(
                    mine.topk_ids, mine.topk_weights, *mine.payloads, max_rows=self._round._round.num_tokens
                ),
                "dispatch_start",
                flush=True,
            ),
            Step(idle),
            Step(a2a.dispatch_finish, "dispatch_finish"),
            Step(self._round.write_rows),
            Step(a2a.combine_start, "combine_start"),
            Step(idle),
            Step(lambda: a2a.combine_finish(out=self._round.output), "combine_finish"),
        ]

    def _meanwhile(self, start: Callable[[], object], work: Callable[[], object]) -> None:
        if self._side is None:
            start()
            work()
            return
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            start()
        work()
        main.wait_stream(self._side)


def measure(context: launch.RankContext, plan: Plan, emit: launch.Emit) -> int:
    """The work of one rank."""
    settings, device = plan.settings, context.device
    if device.type == "cuda":
        torch.backends.cuda.preferred_blas_library("cublaslt")  # the one that can leave SMs alone
    communicator = Communicator()
    link = Link(communicator, context, 16, settings.cuda_graph)
    timer = make_timer(device, link.barrier, settings.cuda_graph, settings.flush)
    rounds = Rounds(context.rank, device)
    experts = rounds.experts(settings)
    side = _SIDE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    factor = torch.randn(side, side, device=device, dtype=dtype)
    wrong = 0
    for rows_of_combine, num_sms in itertools.product(plan.combine, plan.num_sms):
        bounded = replace(settings, num_sms=num_sms or None)
        # Kernels that ran beside a start half are over when its finish half begins.
        putget = Putget(
            communicator,
            bounded,
            experts,
            device,
            tuning=Tuning(combine=Launch(sentinel_rows=_ROWS[rows_of_combine]), finish_num_sms=_ALL_SMS),
        )
        what = {"combine": rows_of_combine, "num_sms": num_sms or None}
        for num_tokens in settings.batches:
            round_ = rounds.make(settings, num_tokens)
            wrong = max(wrong, _complain(putget.load(round_), emit))
            overlapped = Overlapped(putget, device)
            for rows in plan.rows:
                left = torch.randn(rows, side, device=device, dtype=dtype)
                product = torch.empty_like(left)

                def multiply(left: torch.Tensor = left, product: torch.Tensor = product) -> None:
                    torch.matmul(left, factor, out=product)

                def nothing() -> None:
                    pass

                def products(multiply: Callable[[], None] = multiply) -> None:
                    multiply()
                    multiply()

                def whole(putget: Putget = putget) -> None:
                    putget.dispatch()
                    putget.combine()

                def together(o: Overlapped = overlapped, m: Callable[[], None] = multiply, n: int = num_sms) -> None:
                    with sms_left_free(n):
                        o.run(m)

                def leaving(m: Callable[[], None] = multiply, n: int = num_sms) -> None:
                    with sms_left_free(n):
                        m()
                        m()

                ways: dict[str, Callable[[], object]] = {
                    "whole": whole,
                    "halves": lambda o=overlapped: o.run(nothing),
                    "products": products,
                    "products_leaving": leaving,
                    "together": together,
                }
                found = _times(timer, {name: [Step(way, name)] for name, way in ways.items()}, settings.iters)
                wrong = max(wrong, _complain(putget.verify(), emit))
                longer = max(found["halves"], found["products"])
                emit({"kind": "overlap", "found": {
                    "num_tokens": num_tokens, **what, "product_rows": rows,
                    "latency_us": found, "over_longer": found["together"] / longer,
                }})  # fmt: skip

            def idle() -> None:
                if device.type == "cuda":
                    torch.cuda._sleep(_LONG_GAP_CYCLES)

            found = _times(timer, {"halves": overlapped.steps(idle)}, settings.iters)
            wrong = max(wrong, _complain(putget.verify(), emit))
            emit({"kind": "gap", "found": {"num_tokens": num_tokens, **what, "latency_us": found}})
        putget.close()
    link.close()
    communicator.close()
    return wrong


@contextlib.contextmanager
def sms_left_free(count: int) -> Iterator[None]:
    """Has matrix products leave so many SMs alone.

    Those of cuBLAS give every SM its share before they begin: a share whose SM is taken would be done when all others
    have been, and nothing would be hidden.
    """
    if count == 0 or not torch.cuda.is_available():
        yield
        return
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


def _complain(text: str | None, emit: launch.Emit) -> int:
    if text is not None:
        emit({"kind": "mismatch", "text": text})
    return int(text is not None)


def _times(timer: Timer, ways: dict[str, list[Step]], iters: int) -> dict[str, float]:
    """Medians of the slowest rank by the names of the steps; the ways take turns."""
    for steps in ways.values():
        for step in steps:
            step.run()
    length, num_series = series_length(iters)
    series = {name: timer.steps(steps, length) for name, steps in ways.items()}
    readings: dict[str, list[Any]] = {name: [] for name in ways}
    for index in range(1 + num_series):
        for name, one in series.items():
            taken = one()
            if index:
                readings[name].append(taken)
    found: dict[str, float] = {}
    for taken_all in readings.values():
        found.update({name: round(median(values), 3) for name, values in slowest(taken_all).items()})
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ep_size", type=int, required=True)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", default="512", help="tokens a rank, comma-separated and ascending")
    parser.add_argument("--num_sms", default="8,16,32", help="SMs of the halves, comma-separated; 0: putget's choice")
    parser.add_argument("--combine", default="sentinel", help="rows, comma-separated: sentinel, got (%(default)s)")
    parser.add_argument("--product_rows", default="512,2048", help="rows of the matrix products, comma-separated")
    parser.add_argument("--hidden_size", type=int, default=7168)
    parser.add_argument("--iters", type=int, default=50)
    parser.add_argument("--output_file", type=Path)
    args = parser.parse_args()
    flags = f"bench --batches {args.tokens} --perfect_router --iters {args.iters} --hidden_size {args.hidden_size}"
    flags += f" --ep_size {args.ep_size} --device {args.device}"
    settings = resolve(build_parser().parse_args(flags.split()), None)
    numbers = {name: tuple(int(one) for one in getattr(args, name).split(",")) for name in ("num_sms", "product_rows")}
    plan = Plan(settings, tuple(args.combine.split(",")), numbers["num_sms"], numbers["product_rows"])
    document: dict[str, Any] = {
        "schema": SCHEMA,
        **environment.describe(None),
        "command": ["python", *sys.argv],
        "config": asdict(settings),
        "overlap": [],
        "gap": [],
        "mismatches": [],
    }

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "mismatch":
            document["mismatches"].append(event["text"])
            print(f"MISMATCH {event['text']}", flush=True)
            return
        found = event["found"]
        document[event["kind"]].append(found)
        times = ", ".join(f"{name} {us:.1f}" for name, us in found["latency_us"].items())
        over = f": {found['over_longer']:.3f} of the longer" if event["kind"] == "overlap" else ""
        what = f"product of {found['product_rows']} rows" if event["kind"] == "overlap" else "a long gap"
        case = f"{found['num_tokens']} tokens, {found['combine']} rows, {found['num_sms']} SMs, {what}"
        print(f"{case}: {times} us{over}", flush=True)
        if args.output_file is not None:
            args.output_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    return launch.run(measure, plan, args.ep_size, args.device, on_event)


if __name__ == "__main__":
    sys.exit(main())
