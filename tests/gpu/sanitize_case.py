"""One small configuration, meant to run under compute-sanitizer, checked against the oracle.

    compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1 python3 tests/gpu/sanitize_case.py MODE

MODE is `single` (one rank), `processes` (two ranks as processes that share GPU 0) or `threads` (two emulated ranks).
The sanitizer may run the kernels of one process one after the other; two ranks that wait for each other then need two
processes, whose kernels the GPU runs in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("", "python")]

import torch
import torch.distributed as dist

import putget
from tests.harness import Rank
from tests.harness.cases import Case, Round
from tests.harness.compare import Outcome, check_case, play_on

# Instrumented kernels are slow, and processes that share a GPU wait for their turn.
DEADLINES: dict[str, Any] = {"timeout_s": 100.0, "warmup_timeout_s": 100.0}


def case_of(ep_size: int) -> Case:
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
        output=((136,), torch.bfloat16),
    )


def play(rank: Rank, case: Case) -> list[Outcome]:
    """Two grids: as large as the work asks for, and one CTA."""
    for num_sms in (None, 1):
        with rank.all_to_all(**case.options(), **DEADLINES, num_sms=num_sms) as a2a:
            outcomes = play_on(a2a, rank, case)
    return outcomes


def run_threads(case: Case) -> list[list[Outcome]]:
    place = torch.device("cuda", 0)
    comms = putget.Communicator.local(case.ep_size)
    outcomes: dict[int, list[Outcome]] = {}

    def run(rank: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(place)):
            outcomes[rank] = play(Rank(rank, case.ep_size, place, _comm=comms[rank]), case)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(case.ep_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(case.ep_size)]


def run_process(rank: int, case: Case, folder: str) -> None:
    """The main function of a rank's process; leaves its outcomes in a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.ep_size)
    outcomes = play(Rank(rank, case.ep_size, torch.device("cuda", 0)), case)
    torch.save(outcomes, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def run_processes(case: Case) -> list[list[Outcome]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="putget_sanitize_") as folder:
        processes = [context.Process(target=run_process, args=(rank, case, folder)) for rank in range(case.ep_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(case.ep_size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("single", "processes", "threads"))
    mode = parser.parse_args().mode
    case = case_of(1 if mode == "single" else 2)
    outcomes = run_processes(case) if mode == "processes" else run_threads(case)
    check_case(case, outcomes)
    print(f"{mode}: {len(case.rounds)} rounds on {case.ep_size} rank(s) equal the oracle")


if __name__ == "__main__":
    main()
