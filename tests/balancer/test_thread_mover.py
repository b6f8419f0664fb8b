"""A thread that puts experts in place of kernels: no wrong token, no kernel that waits for it, and deaths in a copy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

import putget
from putget import _abi
from putget.balancer import ExpertBlobs, Landing, Move
from putget.balancer.recovery import said_by_all
from tests.balancer import migration, online
from tests.balancer.test_online import agree
from tests.harness import Rank, RankProcesses, fresh_ranks, run_ranks

SIZE = 4
DEADLINE_S = 60.0


@pytest.mark.parametrize("movers", [("thread",), ("kernel", "thread")], ids=["all", "some"])
@pytest.mark.parametrize("mode", ["process", "thread"])
def test_no_token_is_wrong(mode: str, movers: tuple[str, ...], device: str) -> None:
    outcomes = run_ranks(SIZE, migration.serve_until_moved, 4, 5, movers, mode=mode, device=device)
    assert outcomes == [(4, True)] * SIZE


def test_a_balancer_has_one(device: str) -> None:
    found = agree(run_ranks(SIZE, online.serve_until_moved, 10, 2, {"mover": "thread"}, mode="process", device=device))
    assert found["windows"] > 1


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    with fresh_ranks(SIZE, "cpu") as processes:
        yield processes


@pytest.mark.parametrize("phase", ["dispatched", "moved", "taken"])
def test_a_rank_that_dies_leaves_the_others_on_one_placement(ranks: RankProcesses, phase: str) -> None:
    victim, iteration = 2, 9
    ranks.call(migration.begin, iteration, 5.0, ("thread",))
    survivors = [rank for rank in range(SIZE) if rank != victim]
    ranks.submit(victim, migration.serve_until_lost, (iteration, phase), 40)
    for said in ranks.call(migration.serve_until_lost, None, 40, ranks=survivors, timeout=120).values():
        assert said == f"missed ({victim},)"
    outcomes = list(ranks.call(migration.go_on, victim, 15, ranks=survivors, timeout=120).values())
    assert all(outcome["right"] and outcome["still"] for outcome in outcomes), outcomes
    assert len({outcome["agreed"] for outcome in outcomes}) == 1
    assert all(outcome["slots"] == outcomes[0]["slots"] for outcome in outcomes)


def test_a_forked_child_gives_the_landing_up() -> None:
    """The thread sleeps as the process is copied, and is none of the child's: nothing there waits for it."""
    (comm,) = putget.Communicator.local(1)
    slots = torch.zeros(2, 16, dtype=torch.int32)
    with comm, Landing(comm, [ExpertBlobs({"w": slots})], mover="thread", device="cpu") as landing:
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            _abi.library().putget_landing_destroy(landing._native)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


WORDS = 16 << 20  # of a large expert: a copy takes tens of milliseconds
LARGE_CELLS = 3
TRIES = 8


class Large:
    """One rank with large experts of `expert`, a number, in all of its slots."""

    def __init__(self, rank: Rank, expert: int, words: int, cells: int) -> None:
        self.rank = rank
        self.slots = torch.full((cells + 1, words), expert, dtype=torch.int32, device=rank.device)
        blobs = ExpertBlobs({"w": self.slots})
        options = {"mover": "thread", "cells": cells, "device": rank.device}
        self.landing = Landing(rank.comm, [blobs], **options)
        self.puts = 0

    def post(self, moves: list[Move]) -> None:
        assert self.landing.post(moves)
        self.puts += sum(move.src == self.rank.rank for move in moves)

    def wait_for(self, batch: int, members: list[int]) -> None:
        """Moves until a batch has landed on all of them, and takes it."""
        end = time.monotonic() + DEADLINE_S
        while int(self.landing.landed) < batch or self.landing.progress().put < self.puts:
            assert time.monotonic() < end
            self.landing.move(1 << 30)
        said_by_all(self.rank.comm, "landed", batch, members, DEADLINE_S)
        self.landing.take(torch.tensor([batch], dtype=torch.int32, device=self.rank.device))


def move_beside_a_copy(rank: Rank) -> tuple[int, bool]:
    """A body: rank 0 goes on calling `move` while its thread copies. How often, and whether rank 1 has the expert."""
    large = Large(rank, 7 + rank.rank, WORDS, 1)
    large.post([Move(0, 0, 0, 1, 1)])
    count = 0
    end = time.monotonic() + DEADLINE_S
    while rank.rank == 0 and large.landing.progress().put == 0:
        assert time.monotonic() < end
        large.landing.move()
        count += 1
    large.wait_for(1, [0, 1])
    right = bool((large.slots[1] == 7).all())
    large.landing.close()
    return count, right


def test_no_kernel_waits_for_the_thread() -> None:
    """One `move` tells the thread of a free cell, and one finds what it has copied; those between come back at once."""
    counts: list[int] = []
    # A rank without a core makes no calls: its thread may have copied all by then.
    while len(counts) < TRIES and max(counts, default=0) <= 10:
        (count, _), (_, right) = run_ranks(2, move_beside_a_copy, mode="process")
        assert right
        counts.append(count)
    assert max(counts) > 10, counts


def begin_large(rank: Rank) -> int:
    """A body: a batch brings rank 0's experts to rank 1. Says this rank's process."""
    large = rank.state["large"] = Large(rank, 7 + rank.rank, WORDS, LARGE_CELLS)
    large.post([Move(0, 0, slot, 1, slot + 1) for slot in range(LARGE_CELLS)])
    return os.getpid()


def put_for_good(rank: Rank) -> None:
    """A body: moves until the process dies."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        rank.state["large"].landing.move()
        time.sleep(0.001)


def kill_in_a_copy(rank: Rank, pid: int) -> bool:
    """A body: stops the process when the first bytes of a cell are there, and kills it if the last ones are not."""
    landing: Landing = rank.state["large"].landing
    memory = landing._workspace.memory.tensor()
    cells = memory[-LARGE_CELLS * WORDS * 4 :].view(torch.int32).view(LARGE_CELLS, WORDS)
    end = time.monotonic() + DEADLINE_S
    for cell in cells:
        while int(cell[0]) == 0:
            assert time.monotonic() < end
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.01)  # a process stops when its threads next come to the kernel
        if int(cell[-1]) == 0:
            os.kill(pid, signal.SIGKILL)
            return True
        os.kill(pid, signal.SIGCONT)
    return False


def go_on_large(rank: Rank) -> tuple[int, bool, bool]:
    """A body: goes on without rank 0. The batch agreed on, and whether slots are right then, and a batch later."""
    large: Large = rank.state["large"]
    agreed = large.landing.set_active_ranks([False, True, True])
    large.puts = 0
    still = bool((large.slots == 7 + rank.rank).all())
    large.post([Move(0, 1, 0, 2, 1)])
    large.wait_for(1, [1, 2])
    right = bool((large.slots[1] == 8).all())
    large.landing.close()
    return agreed, still, right


def test_a_rank_that_dies_in_a_copy_leaves_its_bytes_nowhere() -> None:
    # A rank without a core sees the first bytes of a cell when the last ones are there.
    assert any(dies_in_a_copy() for _ in range(TRIES)), "no copy was met"


def dies_in_a_copy() -> bool:
    """Whether a rank could be killed in a copy; if so, the others are right."""
    with fresh_ranks(3, "cpu") as ranks:
        pid = ranks.call(begin_large, timeout=60)[0]
        ranks.submit(0, put_for_good)
        if not ranks.call(kill_in_a_copy, pid, ranks=[1], timeout=70)[1]:
            return False
        outcomes = ranks.call(go_on_large, ranks=[1, 2], timeout=90)
    assert outcomes == {1: (0, True, True), 2: (0, True, True)}
    return True


def test_a_mover_that_is_not_known_is_refused() -> None:
    (comm,) = putget.Communicator.local(1)
    with pytest.raises(ValueError, match="mover is 'dma', allowed are kernel, thread"):
        Landing(comm, [ExpertBlobs({"w": torch.zeros(2, 4)})], mover="dma", device="cpu")
    comm.close()
