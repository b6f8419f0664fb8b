"""Several threads run a call on CPU (num_threads): the same bits, the same deadlines, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import putget
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import Outcome, check_case, play_on

# Enough bytes for several threads, and rounds with too few; rows that are cut unevenly.
CASE = Case(
    3,
    (Round(1, (64, 64, 64)), Round(2, (64, 1, 0), ending="flat"), Round(3, (3, 64, 40), ending="strided")),
    num_experts=7,
    top_k=3,
    max_tokens_per_rank=64,
    payloads=(((3000,), torch.bfloat16), ((7,), torch.int64)),
    output=((4104,), torch.bfloat16),
)


def play_in_threads(rank: Rank, case: Case, threads: tuple[int, ...]) -> list[Outcome]:
    """A body: each rank with as many threads as it likes."""
    with rank.all_to_all(**{"tuning": None} | case.options(), num_threads=threads[rank.rank]) as a2a:
        return play_on(a2a, rank, case)


@pytest.mark.parametrize("wire", [None, torch.float8_e4m3fn], ids=["got", "quantised"])
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_any_number_of_threads_gives_the_oracles_bits(mode: str, wire: torch.dtype | None) -> None:
    rows = ((4096,), torch.bfloat16) if wire is not None else CASE.output
    case = Case(**{**CASE.__dict__, "wire": wire, "output": rows})
    check_case(case, run_ranks(3, play_in_threads, case, (1, 4, 7), mode=mode))


def be_left_alone(rank: Rank) -> tuple[tuple[int, ...], float]:
    """A body: rank 1 comes to no round. Who is missing, and after how many seconds."""
    options: dict[str, Any] = {**CASE.options(), "num_threads": 4, "timeout_s": 2.0, "warmup_timeout_s": 2.0}
    with rank.all_to_all(**options) as a2a:
        began = time.monotonic()
        missing: tuple[int, ...] = ()
        if rank.rank != 1:
            sent = CASE.sent(0, rank.rank)
            with pytest.raises(putget.PeerTimeout) as caught:
                a2a.dispatch(sent.topk_ids, sent.topk_weights, *sent.payloads)
            missing = caught.value.missing
        took = time.monotonic() - began
        rank.comm.exchange("the others have waited", None, 60.0)  # a rank that closes is not waited for
        return missing, took


def test_a_wait_of_several_threads_has_a_deadline() -> None:
    for missing, took in run_ranks(3, be_left_alone, mode="thread")[::2]:
        assert missing == (1,)
        assert 1.9 < took < 20


WITHOUT_ROOM = """
import resource, signal
import torch, putget

def blocked():
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])

(comm,) = putget.Communicator.local(1)
row = putget.Payload((4096,), torch.float32)
with comm, putget.AllToAll(
    comm, num_experts=1, top_k=1, max_tokens_per_rank=512, payloads=[row], output=row, device="cpu", num_threads=4
) as a2a:
    ids, weights, rows = torch.zeros(512, 1, dtype=torch.int64), torch.ones(512, 1), torch.randn(512, 4096)
    before = blocked()
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 20), -1))
    try:
        a2a.dispatch(ids, weights, rows)
    except putget.PutgetError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    print(blocked() == before)
    received = a2a.dispatch(ids, weights, rows)
    a2a.combine_input.copy_(received.payloads[0])
    print(torch.equal(a2a.combine(), rows))
"""


def test_without_room_for_threads_a_call_fails_and_signals_still_come() -> None:
    command = [sys.executable, "-c", WITHOUT_ROOM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    error, *rest = done.stdout.splitlines() or [done.stderr]
    assert error.startswith("cannot start a thread of num_threads that share a call: "), done.stderr
    assert rest == ["True", "True"]


@pytest.mark.parametrize("value", [0, -1, 257, 2.0, "2", True, None])
def test_num_threads_refuses(value: Any) -> None:
    (comm,) = putget.Communicator.local(1)
    with pytest.raises(ValueError, match=r"^num_threads is .*, allowed are ints from 1 to 256"):
        Rank(0, 1, torch.device("cpu"), _comm=comm).all_to_all(num_threads=value)


def ask_for_threads(rank: Rank) -> str:
    try:
        rank.all_to_all(num_threads=2).close()
    except ValueError as error:
        return str(error)
    return "taken"


def test_a_gpu_has_no_threads_to_bound(device: str) -> None:
    (said,) = run_ranks(1, ask_for_threads, mode="thread", device=device)
    refused = 'num_threads is 2, which device="cpu" alone has; a GPU has num_sms'
    assert said == ("taken" if device == "cpu" else refused)
