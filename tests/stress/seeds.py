"""Many seeds of the ThreadSanitizer jobs beside busy neighbours: none may report anything.

    python3 -m tests.stress.seeds --seeds 300 --workers 2 --busy 2 [--programs FOLDER]

Runs each job of tests/protocol/test_thread_sanitizer.py and test_ctas.py that has no mutation, with many seeds, in
`workers` processes while `busy` others only count. FOLDER has, or gets, the two programs `blocks` and `ctas`: a machine
whose compiler has no ThreadSanitizer can run what another one has built (--build_only). Prints a line for each job that
failed, and a last line; exits with 1 where one did.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.protocol.stress_job import BLOCK_ROUNDS, CLEAN, CTA_ROUNDS, OPTIONS, compile_job

JOBS = {"blocks": BLOCK_ROUNDS, "ctas": CTA_ROUNDS}
LIMIT_S = 600


def count_for_ever() -> None:
    """A neighbour that is always busy."""
    count = 0
    while True:
        count += 1


def build(folder: Path) -> None:
    """Both programs, where they are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rounds in JOBS.items():
        if not (folder / name).exists():
            extra = (*CLEAN, "-static-libtsan")
            done = compile_job(folder / name, "stress.cpp", "thread", ctas=rounds.ctas, extra=extra)
            if done.returncode != 0:
                raise RuntimeError(done.stderr)


def run(program: Path, options: tuple[object, ...]) -> str | None:
    """One job: what it says if it fails."""
    command = ["setarch", "-R", str(program), *map(str, options)]
    try:
        done = subprocess.run(
            command, env={**os.environ, **OPTIONS}, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{program.name} {options}: did not end within {LIMIT_S} s"
    if done.returncode == 0:
        return None
    return f"{program.name} {options}: status {done.returncode}\n{done.stderr[:4000]}"


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--busy", type=int, default=2, help="processes that do nothing but count")
    parser.add_argument("--programs", type=Path, help="folder of the programs; default: built in a temporary one")
    parser.add_argument("--build_only", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further job after so many")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.programs or Path(temporary)
        build(folder)
        if args.build_only:
            return 0
        neighbours = [multiprocessing.Process(target=count_for_ever, daemon=True) for _ in range(args.busy)]
        for neighbour in neighbours:
            neighbour.start()
        jobs = [
            (folder / name, rounds.options(ranks, blocks, objects, seed))
            for seed in range(args.first, args.first + args.seeds)
            for name, rounds in JOBS.items()
            for ranks, blocks in rounds.sizes
            for objects in rounds.objects
        ]
        ran = 0
        failures: list[str] = []

        def work(job: tuple[Path, tuple[object, ...]]) -> None:
            nonlocal ran
            if time.monotonic() - began > args.seconds:
                return
            failure = run(*job)
            ran += 1
            if failure is not None:
                failures.append(failure)
                print(failure, flush=True)

        with ThreadPoolExecutor(args.workers) as pool:
            list(pool.map(work, jobs))
        for neighbour in neighbours:
            neighbour.kill()
    seconds = time.monotonic() - began
    print(f"{ran} of {len(jobs)} runs, {args.busy} busy neighbours, {seconds:.0f} s: {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
