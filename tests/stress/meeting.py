"""How the ranks of a stress run meet on the host, outside the rounds: threads, or processes of a gloo group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist


class Meeting(Protocol):
    """One rank's way to the others."""

    rank: int
    size: int

    def wait(self) -> None:
        """Returns once every rank has called it."""

    def ask_first(self, answer: bool) -> bool:
        """Rank 0's answer, on every rank."""


def in_turn(meeting: Meeting, call: Callable[[], None]) -> None:
    """Every rank calls, one after the other, while the others are idle."""
    for rank in range(meeting.size):
        meeting.wait()
        if rank == meeting.rank:
            call()
    meeting.wait()


class Processes:
    """Ranks of the default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def wait(self) -> None:
        dist.barrier()

    def ask_first(self, answer: bool) -> bool:
        word = torch.tensor([int(answer)])
        dist.broadcast(word, 0)
        return bool(word)


class Room:
    """State that the threads of one process share."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.answer = False


class Threads:
    """Ranks that are threads."""

    def __init__(self, rank: int, room: Room) -> None:
        self.rank, self.size, self._room = rank, room.barrier.parties, room

    def wait(self) -> None:
        self._room.barrier.wait()

    def ask_first(self, answer: bool) -> bool:
        if self.rank == 0:
            self._room.answer = answer
        self.wait()
        agreed = self._room.answer
        self.wait()
        return agreed
