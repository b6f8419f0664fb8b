"""Which process an object belongs to. A forked child has copies of its parent's objects, and is none of the ranks."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from putget.errors import ForkedChild


class Process:
    """One process; objects keep the one that made them.

    Attributes:
        pid: its number.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that asks."""
        return self is here

    def require_here(self, rank: int, what: str) -> None:
        """Raises ForkedChild in a child of the process.

        Args:
            rank: The process's rank.
            what: The object that it goes on with.
        """
        if self is not here:
            raise ForkedChild(rank, what, self.pid, here.pid)


class Forgets(Protocol):
    """An object with a handle that a forked child must not use, and whose calls are too short to ask each time."""

    def forget_in_child(self) -> None:
        """Called in a forked child: drops the handle without freeing what it stands for."""


here = Process()  # a comparison with it costs less than asking for the number
watched: weakref.WeakSet[Forgets] = weakref.WeakSet()


def _begin() -> None:
    global here
    here = Process()
    for found in list(watched):
        found.forget_in_child()


os.register_at_fork(after_in_child=_begin)
