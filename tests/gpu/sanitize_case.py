"""Small configurations, one for each kind of kernel, to run under compute-sanitizer; checked against the oracle.

    compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1 python3 tests/gpu/sanitize_case.py MODE

MODE is `single` (one rank), `processes` (two ranks as processes that share GPU 0), `domains` (the same, each rank a
domain, over `tcp`: needs putget_transfer) or `threads` (two emulated ranks).
The sanitizer may run the kernels of one process one after the other; two ranks that wait for each other then need two
processes, whose kernels the GPU runs in turns.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("", "python")]

import torch
import torch.distributed as dist

import putget
from tests.harness import Rank
from tests.harness.cases import APART, SENTINEL, Case, Round
from tests.harness.compare import Outcome, check_case, play_on

# Instrumented kernels are slow, and processes that share a GPU wait for their turn: a round may take seconds. Whatever
# does not end is to say where it is before the limits of run_device.sh: a wait by its deadline, all else by its stacks.
DEADLINES: dict[str, Any] = {"timeout_s": 40.0, "warmup_timeout_s": 40.0}
STACKS_AFTER_S = 60.0


def every_ending(ep_size: int) -> Case:
    """Rows of every access width, ragged and empty batches, every kind of ending."""
    return Case(
        ep_size,
        (
            Round(1, (9, 4)[:ep_size], no_expert=0.1, addend=True),
            Round(2, (0, 7)[:ep_size], ending="flat", ids_dtype=torch.int64, invalid=0.2),
            Round(3, (5, 0)[:ep_size], ending="open"),
            Round(4, (9, 9)[:ep_size], ending="release"),
            Round(5, (3, 8)[:ep_size], ending="strided", num_valid=(2, 5)[:ep_size]),
        ),
        num_experts=5,
        top_k=3,
        max_tokens_per_rank=9,
        payloads=(((272,), torch.uint8), ((3,), torch.float32), ((5,), torch.uint8), ((10,), torch.bfloat16)),
        output=((144,), torch.bfloat16),
    )


def several_chunks(ep_size: int) -> Case:
    """Batches that a few CTAs route in turns, and rows of combine that are no sentinel rows."""
    return Case(
        ep_size,
        (
            Round(6, (100, 41)[:ep_size], no_expert=0.1),
            Round(7, (70, 100)[:ep_size], ending="flat", ids_dtype=torch.int64),
        ),
        num_experts=5,
        top_k=3,
        max_tokens_per_rank=100,
        payloads=(((1040,), torch.uint8), ((7,), torch.float32)),
        output=((144,), torch.bfloat16),
        sentinel_rows=APART,
    )


def cases_of(ep_size: int) -> list[tuple[int | None, Case]]:
    """Cases and the SMs that they may take: each kind of kernel that dispatches or combines."""
    ragged, chunks = every_ending(ep_size), several_chunks(ep_size)
    fp8: dict[str, Any] = {"wire": torch.float8_e4m3fn}
    return [
        (None, ragged),
        (1, ragged),
        (2, chunks),
        (4, chunks),
        (None, replace(ragged, sentinel_rows=SENTINEL, **fp8)),
        (4, replace(chunks, sentinel_rows=SENTINEL, **fp8)),
    ]


def cases_of_domains() -> list[tuple[int | None, Case]]:
    """For two domains of a rank each: all that goes around the domain's own kernels."""
    apart = {"domain_of": (0, 1)}
    return [(None, replace(every_ending(2), **apart)), (2, replace(several_chunks(2), **apart))]


def play_all(rank: Rank, cases: list[tuple[int | None, Case]]) -> list[list[Outcome]]:
    """One AllToAll after the other."""
    outcomes = []
    for num_sms, case in cases:
        with rank.all_to_all(**case.options(), **DEADLINES, num_sms=num_sms) as a2a:
            outcomes.append(play_on(a2a, rank, case))
    return outcomes


def run_threads(ep_size: int) -> list[list[list[Outcome]]]:
    place = torch.device("cuda", 0)
    comms = putget.Communicator.local(ep_size)
    outcomes: dict[int, list[list[Outcome]]] = {}

    def run(rank: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(place)):
            outcomes[rank] = play_all(Rank(rank, ep_size, place, _comm=comms[rank]), cases_of(ep_size))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ep_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(ep_size)]


def run_process(rank: int, ep_size: int, folder: str, mode: str) -> None:
    """The main function of a rank's process; leaves its outcomes in a file."""
    faulthandler.dump_traceback_later(STACKS_AFTER_S)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ep_size)
    place = torch.device("cuda", 0)
    if mode == "domains":
        comm = putget.Communicator(network=putget.Network("tcp", domain_size=1))
        outcomes = play_all(Rank(rank, ep_size, place, _comm=comm), cases_of_domains())
    else:
        outcomes = play_all(Rank(rank, ep_size, place), cases_of(ep_size))
    torch.save(outcomes, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def run_processes(ep_size: int, mode: str) -> list[list[list[Outcome]]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="putget_sanitize_") as folder:
        processes = [context.Process(target=run_process, args=(rank, ep_size, folder, mode)) for rank in range(ep_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ep_size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("single", "processes", "domains", "threads"))
    mode = parser.parse_args().mode
    faulthandler.dump_traceback_later(STACKS_AFTER_S)
    ep_size = 1 if mode == "single" else 2
    outcomes = run_processes(ep_size, mode) if mode in ("processes", "domains") else run_threads(ep_size)
    cases = cases_of_domains() if mode == "domains" else cases_of(ep_size)
    for index, (_, case) in enumerate(cases):
        check_case(case, [of_rank[index] for of_rank in outcomes])
    rounds = sum(len(case.rounds) for _, case in cases)
    print(f"{mode}: {rounds} rounds of {len(cases)} shapes on {ep_size} rank(s) equal the oracle")


if __name__ == "__main__":
    main()
