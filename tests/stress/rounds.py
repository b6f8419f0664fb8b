"""Many rounds with random sizes and random routing, every received and every combined row checked on the device.

    python tests/stress/rounds.py --ranks 4 --device cuda --rounds 100000

Sizes differ per rank and round (0 included), two layers of different row size share one workspace, each rank decides
for itself whether it replays a CUDA graph (of its own batch size, padded) or calls eagerly, and one round in eight ends
by release() or is left to the next dispatch. Ranks are processes, one per GPU; where GPUs are too few, threads on one.
The last line is JSON: rounds, wrong (mistakes of all ranks), seconds and more. The exit status is 0 only if wrong is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("", "python")]
    # Both are read when a CUDA context is made; tests/gpu/conftest.py says why.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
import torch.distributed as dist

import putget
from tests.stress.meeting import Processes, Room, Threads
from tests.stress.player import Player


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", action="store_true", help="ranks as threads (always, where GPUs are too few)")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--max_tokens", type=int, default=32, help="capacity per rank")
    parser.add_argument("--top_k", type=int, default=4)
    parser.add_argument("--replay_share", type=float, default=0.8, help="share of rounds that replay a graph (cuda)")
    parser.add_argument("--num_sms", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=None, help="stop early, at a report, after this time")
    parser.add_argument("--report_every", type=int, default=500, help="rounds between looks at the counters")
    parser.add_argument("--timeout_s", type=float, default=20.0)
    parser.add_argument(
        "--plant", choices=("received", "combined"), help="spoil rows in eager rounds: the run must fail"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        options.threads = True
    if options.device == "cpu":
        options.replay_share = 0.0
    return options


def run_in_threads(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every rank's result, or the traceback of the first that failed."""
    room = Room(options.ranks, timeout_s=10 * options.timeout_s)
    comms = putget.Communicator.local(options.ranks)
    results: list[dict[str, Any]] = [{} for _ in comms]
    place = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")

    def run(rank: int) -> None:
        with contextlib.ExitStack() as stack:
            if place.type == "cuda":
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(place)))
            try:
                player = Player(comms[rank], place, Threads(rank, room), options)
                player.prepare()
                results[rank] = player.run()
                room.barrier.wait()
                player.close()
            except BaseException:
                results[rank] = {"failed": traceback.format_exc()}
                room.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(options.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def run_process(rank: int, options: argparse.Namespace, folder: str, sender: Any) -> None:
    """The main function of a rank's process; sends its result."""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        place = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
        if place.type == "cuda":
            torch.cuda.set_device(place)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
        player = Player(putget.Communicator(), place, Processes(), options)
        player.prepare()
        result = player.run()
        dist.barrier()
        player.close()
    except BaseException:
        result = {"failed": traceback.format_exc()}
    sender.send(result)


def run_in_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every rank's result; a rank that dies is a failure."""
    # The fork server imports torch once; a rank is then a fork of it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    results = []
    with tempfile.TemporaryDirectory(prefix="putget_stress_") as folder:
        ends = [context.Pipe(duplex=False) for _ in range(options.ranks)]
        processes = [
            context.Process(target=run_process, args=(rank, options, folder, sender), daemon=True)
            for rank, (_, sender) in enumerate(ends)
        ]
        for process, (_, sender) in zip(processes, ends, strict=True):
            process.start()
            sender.close()
        for rank, (receiver, _) in enumerate(ends):
            try:
                results.append(receiver.recv())
            except EOFError:
                results.append({"failed": f"the process of rank {rank} died"})
        for process in processes:
            process.join(10)
            process.kill()
    return results


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    began = time.monotonic()
    results = run_in_threads(options) if options.threads else run_in_processes(options)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    failures = [f"rank {rank}: {one['failed']}" for rank, one in enumerate(results) if "failed" in one]
    print("".join(failures), file=sys.stderr, end="")
    done = [one for one in results if "failed" not in one]
    checks: dict[str, int] = {}
    for one in done:
        for check, mistakes in one["by_check"].items():
            checks[check] = checks.get(check, 0) + mistakes
    firsts = [one["first_wrong_round"] for one in done if one["first_wrong_round"] >= 0]
    report = {
        "rounds": min((one["rounds"] for one in done), default=0),
        "wrong": sum(checks.values()),
        "failed_ranks": len(failures),
        "seconds": round(time.monotonic() - began, 2),
        "ranks": options.ranks,
        "device": options.device,
        "mode": "threads" if options.threads else "processes",
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        **{name: sum(one[name] for one in done) for name in ("replayed", "eager", "not_combined", "tokens")},
        "wrong_by_check": checks,
        "first_wrong_round": min(firsts, default=None),
    }
    print(json.dumps(report))
    return 0 if report["wrong"] == 0 and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
