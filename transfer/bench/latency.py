r"""The time of one write for every kind of caller, beside libfabric alone and NIXL: p50 and p99, one table.

    cargo build --release -p putget_transfer_bench && cargo build --release -p putget_transfer_capi
    python bench/latency.py --provider host --peers_python python

The target is another process. All contenders measure all sizes by turns, `--repeats` times, and the medians of the
rounds are shown. A contender whose package or library is missing is left out, and standard error says why.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE_S = 60.0
LEAST, MOST = 10, 10_000
RUST = {"Rust, future": "future", "Rust, flag": "flag", "Rust, callback": "callback"}
C = {"C, word": "word", "C, callback": "callback"}
PYTHON = ["Python, wait", "Python, flag", "Python, callback"]
ALONE, NIXL = "libfabric alone", "NIXL"
# (contender, bytes) to the p50 and p99 of each round, in microseconds.
Found = dict[tuple[str, int], list[tuple[float, float]]]


def engine(provider: str) -> Any:
    """Make an engine with one NIC of the provider."""
    import putget_transfer as pt

    group = pt.DeviceGroup.host() if provider == "host" else pt.DeviceGroup.tcp(["127.0.0.1"])
    return pt.Engine.builder().group(group).build()


def target(provider: str, length: int, pipe: Connection) -> None:
    """Be written to until told to end."""
    with engine(provider) as own:
        memory, desc = own.alloc_mr(length)
        pipe.send(desc.to_bytes())
        pipe.recv()
        del memory


def percentiles(write: Callable[[], float], seconds: float) -> tuple[float, float]:
    """Call `write`, which gives seconds, for a while."""
    write()
    times, end = [], time.perf_counter() + seconds
    while len(times) < LEAST or (len(times) < MOST and time.perf_counter() < end):
        times.append(write() * 1e6)
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


def python_ways(own: Any, src: Any, desc: Any, size: int) -> list[Callable[[], float]]:
    """Give a function for each way in which Python is told, which writes once."""
    import putget_transfer as pt

    def waited() -> float:
        begin = time.perf_counter()
        own.submit_single_write(size, None, (src, 0), (desc, 0)).wait(PATIENCE_S)
        return time.perf_counter() - begin

    def flagged() -> float:
        flag, begin = pt.Flag(), time.perf_counter()
        own.submit_single_write(size, None, (src, 0), (desc, 0), done=flag)
        while flag.pending:
            os.sched_yield()
        if flag.failed:
            raise RuntimeError("a write failed")
        return time.perf_counter() - begin

    def called_back() -> float:
        ends: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        begin = time.perf_counter()
        tell = lambda error: ends.put((time.perf_counter(), error))  # noqa: E731
        own.submit_single_write(size, None, (src, 0), (desc, 0), done=tell)
        end, error = ends.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        return end - begin

    return [waited, flagged, called_back]


def run_python(options: argparse.Namespace, desc_bytes: bytes, found: Found) -> None:
    """Measure Python's callers."""
    import putget_transfer as pt

    desc = pt.MrDesc.from_bytes(desc_bytes)
    with engine(options.provider) as own:
        src, _ = own.alloc_mr(max(options.sizes))
        for size in options.sizes:
            for name, write in zip(PYTHON, python_ways(own, src, desc, size), strict=True):
                found.setdefault((name, size), []).append(percentiles(write, options.seconds))


def run_c(options: argparse.Namespace, program: Path, desc_bytes: bytes, found: Found) -> None:
    """Measure C's callers."""
    for size in options.sizes:
        words = [str(program), options.provider, desc_bytes.hex(), str(size), str(options.seconds)]
        library = {"LD_LIBRARY_PATH": str(options.target_dir)}
        printed = subprocess.run(words, check=True, capture_output=True, text=True, env={**os.environ, **library})
        ways = {way: (float(p50), float(p99)) for way, p50, p99 in map(str.split, printed.stdout.splitlines())}
        for name, way in C.items():
            found.setdefault((name, size), []).append(ways[way])


def run_program(options: argparse.Namespace, name: str, found: Found) -> None:
    """Measure Rust's callers, libfabric alone or NIXL, by the programs that also measure rates."""
    sizes = ["--sizes", ",".join(map(str, options.sizes)), "--seconds", str(options.seconds)]
    sizes += ["--smallest", str(min(options.sizes)), "--largest", str(max(options.sizes))]
    program = [str(options.target_dir / "putget-transfer"), "bench", "--provider", options.provider]
    if name in RUST:
        words = [*program, "--told", RUST[name]]
    elif name == ALONE:
        words = [*program, "--bare"]
    else:
        words = [options.peers_python, str(HERE / "peers.py"), f"nixl_{options.provider}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        ran = subprocess.run([*words, *sizes, "--output_file", str(file)], capture_output=True, text=True)
        if ran.returncode != 0:
            print(f"{name}: {ran.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return
        for row in json.loads(file.read_text())["rows"]:
            if row["kind"] == "single":
                found.setdefault((name, row["bytes"]), []).append((row["p50_us"], row["p99_us"]))


def build_c(options: argparse.Namespace, folder: str) -> Path | None:
    """Compile the program of C's callers; None if the library or a compiler is missing."""
    library, program = options.target_dir / "libputget_transfer_capi.so", Path(folder) / "latency"
    include = HERE.parent / "python/putget_transfer/include"
    words = ["cc", "-O2", "-pthread", "-I", str(include), str(HERE / "latency.c"), str(library), "-o", str(program)]
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"C: {getattr(error, 'stderr', '') or error}", file=sys.stderr)
        return None
    return program


def table(found: Found, sizes: list[int]) -> str:
    """Lay the medians of the rounds out."""
    head = "| p50 / p99, us | " + " | ".join(f"{size} B" for size in sizes) + " |"
    lines = [head, "| --- |" + " ---: |" * len(sizes)]
    for name in [*RUST, *C, *PYTHON, ALONE, NIXL]:
        cells = []
        for size in sizes:
            rounds = found.get((name, size))
            middle = [statistics.median(times) for times in zip(*rounds, strict=True)] if rounds else []
            cells.append(" / ".join(f"{value:.1f}" for value in middle) or "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run everything by turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=["host", "tcp"], default="host")
    parser.add_argument("--target_dir", type=Path, default=HERE.parent / "target/release", help="where cargo builds")
    parser.add_argument("--peers_python", help="a Python that has NIXL; without it NIXL is left out")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[8, 4096, 65536])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(options.provider, max(options.sizes), theirs), daemon=True)
    process.start()
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("the target did not start")
    desc, found = pipe.recv(), Found()
    with tempfile.TemporaryDirectory() as folder:
        program = build_c(options, folder)
        contenders: list[Callable[[], None]] = [lambda: run_python(options, desc, found)]
        if program is not None:
            contenders.append(lambda: run_c(options, program, desc, found))
        for name in [*RUST, ALONE, *([NIXL] if options.peers_python else [])]:
            contenders.append(lambda name=name: run_program(options, name, found))  # type: ignore[misc]
        for number in range(options.repeats):
            # The contender that comes first changes from round to round.
            for measure in contenders if number % 2 == 0 else contenders[::-1]:
                measure()
    pipe.send(None)
    process.join(5)
    print(table(found, options.sizes))


if __name__ == "__main__":
    main()
