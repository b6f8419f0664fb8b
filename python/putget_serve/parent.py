"""A rank's pipe to the process that started it: words in both directions."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection


class Parent:
    """The process that starts ranks, as a rank sees it. It decides whether a new process takes part.

    Args:
        pipe: To it.

    Attributes:
        on_meeting: Called by another thread when all ranks are to meet a new process: by which file, and the attempt's
            number.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._turn = threading.Lock()
        self._meetings: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._decisions: queue.SimpleQueue[tuple[int | None, bool]] = queue.SimpleQueue()  # by attempt; None: of any
        self.on_meeting: Callable[[str, int], None] = lambda file, number: self._meetings.put((file, number))
        threading.Thread(target=self._listen, name="putget-parent", daemon=True).start()

    def say(self, kind: str, *values: object) -> None:
        """Says "loaded", "ready", "error" (text), "members" (ranks) or "can" (attempt; None, or why not)."""
        with self._turn, contextlib.suppress(OSError):
            self._pipe.send((kind, *values))

    def wait_for_meeting(self) -> tuple[str, int]:
        """This new process has its weights. Returns the file by which all ranks meet, and the attempt's number."""
        self.say("loaded")
        return self._meetings.get()

    def agree(self, number: int, why: str | None) -> bool:
        """Says whether this rank can go on with the processes that it has met in an attempt; returns whether all can.

        Without a parent, nobody can.
        """
        self.say("can", number, why)
        while True:
            attempt, can = self._decisions.get()
            if attempt is None:
                self._decisions.put((None, False))
            if attempt in (number, None):
                return can

    def tell_members(self, members: Sequence[int]) -> None:
        """These ranks go on, without those that are lost."""
        self.say("members", tuple(members))

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                kind, *values = self._pipe.recv()
                if kind == "meet":
                    self.on_meeting(*values)
                else:
                    self._decisions.put((values[0], values[1]))
        self._decisions.put((None, False))
