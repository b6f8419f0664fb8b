"""Several runs of `putget bench` and `putget ablate` on one set of ranks, whose start takes longer than most runs.

    python benchmarks/series.py --ep_size 4 --out results benchmarks/series_ep4.txt

Each line of the file is `NAME: bench FLAGS` or `NAME: ablate FLAGS`, without --ep_size and --device; # begins a
comment. NAME.json gets the report of docs/reference/bench_json.md, rewritten after every size, so that a run that is
stopped leaves what it has. The exit code is 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from putget_bench import launch, peers, report
from putget_bench.measure import measure
from putget_bench.parser import build_parser
from putget_bench.progress import RunProgress, make_console
from putget_bench.run_bench import listener
from putget_bench.settings import Settings, resolve


def measure_all(context: launch.RankContext, runs: list[Settings], emit: launch.Emit) -> int:
    """The work of one rank: one run after the other."""
    exit_code = 0
    for index, settings in enumerate(runs):
        emit({"kind": "run", "index": index})
        exit_code = max(exit_code, measure(context, settings, emit))
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
    return exit_code


def read(path: Path, common: list[str]) -> dict[str, list[str]]:
    """The command of each run by its name."""
    commands = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text:
            name, _, command = text.partition(":")
            commands[name.strip()] = [*shlex.split(command), *common]
    return commands


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--ep_size", type=int, required=True)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    args = parser.parse_args()
    commands = read(args.file, ["--ep_size", str(args.ep_size), "--device", args.device])
    args.out.mkdir(parents=True, exist_ok=True)
    runs: list[Settings] = []
    documents: list[report.Document] = []
    for command in commands.values():
        parsed = build_parser().parse_args(command)
        runs.append(resolve(parsed, None))
        statuses = [peers.find(name, args.device) for name in runs[-1].peers]
        documents.append(report.new_document(runs[-1], ["putget", *command], statuses))
    names = list(commands)
    console = make_console(quiet=False)
    began = time.monotonic()
    with RunProgress(console, "series", sum(len(run.batches) for run in runs)) as progress:
        index = 0

        def on_event(event: dict[str, Any]) -> None:
            nonlocal index
            if event["kind"] == "run":
                index = event["index"]
                progress.line(
                    f"== {names[index]}, {time.monotonic() - began:.0f} s: {shlex.join(commands[names[index]])}"
                )
                return
            listener(documents[index], progress)(event)
            if event["kind"] in ("size", "mismatch"):
                report.write(documents[index], args.out / f"{names[index]}.json")

        exit_code = launch.run(measure_all, runs, args.ep_size, args.device, on_event)
    console.print(f"{time.monotonic() - began:.0f} s")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
