"""Builds of putget in turns, over the links of all ranks: what a change of kernels costs or saves.

    python benchmarks/builds.py --out OUT now trial=build/trial/libputget.so -- --ep_size 4 --batches 1,128

A build is a name and its library; without one it is the package's own. Behind `--` stand the arguments of `putget
bench`, whose timing and checks these are. OUT/NAME_TURN.json gets the reports; the table has medians over the turns,
and the ratio to the first build. Give a library two names to see how far times scatter by themselves.

turns.py does the same with ranks that share a GPU: there are more turns in less time, and no links.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tables import PHASES, latency, table

Times = dict[tuple[str, int, str], list[float]]  # by build, tokens and phase


def read(words: list[str]) -> tuple[argparse.Namespace, dict[str, Path | None]]:
    """The command line, and the library of each build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", nargs="+", metavar="NAME[=LIBRARY]")
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--limit_s", type=float, default=120.0, help="of one run")
    mine = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:mine])
    args.flags = words[mine + 1 :]
    if args.turns < 1:
        parser.error(f"--turns is {args.turns}, expected 1 or more")
    libraries: dict[str, Path | None] = {}
    for build in args.builds:
        name, _, path = build.partition("=")
        if name in libraries:
            parser.error(f"two builds are called {name}")
        libraries[name] = Path(path).resolve() if path else None
        if path and not Path(path).is_file():
            parser.error(f"{build}: there is no such library")  # else the package's own would be timed
    return args, libraries


def measure(library: Path | None, flags: list[str], report: Path, limit_s: float) -> dict[str, Any]:
    """The report of one run."""
    environment = {name: value for name, value in os.environ.items() if name != "PUTGET_LIBRARY"}
    if library is not None:
        environment["PUTGET_LIBRARY"] = str(library)
    command = [sys.executable, "-m", "putget", "bench", *flags, "--output_file", str(report)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{report.stem}: no end after {limit_s:g} s") from None
    if done.returncode != 0:
        raise SystemExit(f"{report.stem}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def rows(times: Times, names: list[str]) -> list[list[str]]:
    """Medians over the turns."""
    lines = []
    for size in sorted({size for _, size, _ in times}):
        cells = [str(size)]
        for name in names:
            medians = [statistics.median(times[name, size, phase]) for phase in PHASES]
            first = statistics.median(times[names[0], size, "pair"])
            cells.append(" / ".join(f"{one:.2f}" for one in medians) + f" x{medians[-1] / first:.3f}")
        lines.append(cells)
    return lines


def main() -> int:
    """The command line."""
    args, libraries = read(sys.argv[1:])
    args.out.mkdir(parents=True, exist_ok=True)
    times: Times = {}
    for turn in range(1, args.turns + 1):
        for name, library in libraries.items():
            report = measure(library, args.flags, args.out / f"{name}_{turn}.json", args.limit_s)
            for size in report["results"]:
                for phase in PHASES:
                    found = latency(size["contenders"][0], phase)
                    assert found is not None
                    times.setdefault((name, size["batch_size"], phase), []).append(found)
    print(
        table(["tokens", *(f"{name}: dispatch / combine / pair, us" for name in libraries)], rows(times, [*libraries]))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
