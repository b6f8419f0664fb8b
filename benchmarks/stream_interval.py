"""The cost of the pieces of streams: tokens a second and processor time, by stream interval and without streams.

    python benchmarks/stream_interval.py MODEL --ep_size 4

Each line is a `putget serve` of its own on CPU ranks, loaded by `putget serve-bench` twice; the second load counts.
In the first line Python collects garbage by itself, as without putget.
Needs the extras serve, bench and serve-bench. Run it on an idle machine: clients and ranks share the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from putget_bench.report import new_table

_PATIENCE_S = 600.0
# Python's own garbage collection, in the middle of passes: each process of the server finds this file as it starts.
_NOT_FROZEN = """
from putget_serve.garbage import Garbage
Garbage.start = Garbage._collect = lambda *_: None
"""


@contextlib.contextmanager
def served(path: str, ep_size: int, interval: int, folder: Path, is_frozen: bool) -> Iterator[str]:
    """The address of a server, while it runs."""
    log, environment = folder / "log", dict(os.environ)
    if not is_frozen:
        (folder / "sitecustomize.py").write_text(_NOT_FROZEN)
        environment["PYTHONPATH"] = f"{folder}:{environment.get('PYTHONPATH', '')}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = f"--ep_size {ep_size} --device cpu --port {port} --stream_interval {interval}"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "putget", "serve", path, *words.split()],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while f"{ep_size} ranks answer" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"putget serve does not answer:\n{log.read_text()}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


def measure(args: argparse.Namespace, interval: int | None, is_frozen: bool, folder: Path) -> dict[str, Any]:
    """The second of two equal loads; interval None: answers come whole."""
    out = folder / "out.json"
    with served(args.path, args.ep_size, interval or 1, folder, is_frozen) as url:
        words = (
            f"--url {url} --concurrency {args.concurrency},{args.concurrency} --requests {args.requests} "
            f"--prompt_tokens {args.prompt_tokens} --output_tokens {args.output_tokens} --output_file {out}"
        )
        command = [args.client, "-m", "putget", "serve-bench", *words.split()]
        done = subprocess.run(
            [*command, *(["--no_stream"] if interval is None else [])], capture_output=True, text=True, check=False
        )
    if not out.is_file():
        raise SystemExit(f"{done.stdout}\n{done.stderr}")
    found: dict[str, Any] = json.loads(out.read_text())["results"][-1]
    return {"stream_interval": interval, "garbage_frozen": is_frozen, **found}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", metavar="MODEL", help="folder of the model and its tokenizer")
    parser.add_argument("--ep_size", type=int, default=4, help="ranks (%(default)s)")
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 2, 4, 8], help="%(default)s")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once (%(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="of each load (%(default)s)")
    parser.add_argument("--prompt_tokens", type=int, default=16, help="of a prompt (%(default)s)")
    parser.add_argument("--output_tokens", type=int, default=64, help="of an answer (%(default)s)")
    parser.add_argument("--turns", type=int, default=1, help="how often all of it is measured (%(default)s)")
    parser.add_argument("--client", default=sys.executable, help="Python of putget serve-bench (this one)")
    parser.add_argument("--output_file", help="write the results as JSON")
    args = parser.parse_args()
    results = []
    settings = [(args.intervals[0], False), *((one, True) for one in [*args.intervals, None])]
    for turn, (interval, is_frozen) in itertools.product(range(args.turns), settings):
        with tempfile.TemporaryDirectory(prefix="putget_interval_") as folder:
            results.append({"turn": turn, **measure(args, interval, is_frozen, Path(folder))})
        print(f"stream interval {interval}: done", flush=True)
    table = new_table(
        "interval", "garbage frozen", "tokens/s", "ms of processor a token", "chunks p50, ms", "max, ms", "errors"
    )
    for one in results:
        gaps, server = one["between_chunks_ms"], one["server"] or {}
        table.add_row(
            "no stream" if one["stream_interval"] is None else str(one["stream_interval"]),
            "yes" if one["garbage_frozen"] else "no",
            f"{one['tokens_per_s']:.1f}",
            f"{server['cpu_ms_per_token']:.2f}" if server.get("cpu_ms_per_token") else "-",
            *(("-", "-") if gaps is None else (f"{gaps['p50']:.1f}", f"{gaps['max']:.1f}")),
            str(sum(one["errors"].values())),
        )
    Console(width=120).print(table)
    if args.output_file:
        report = {"schema": "putget.stream_interval/1", "ep_size": args.ep_size, "results": results}
        Path(args.output_file).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
