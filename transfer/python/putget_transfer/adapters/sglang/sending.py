"""The prefill side: rooms, as SGLang calls requests, and the names under which decode ranks have asked for them.

Each decode rank asks under a name of its own, so a room that is used again never meets what is left of its first use.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import putget_transfer as pt
from putget_transfer import kv

KEPT_S = 300.0
"""How long a room that has failed is remembered: decode ranks that ask later are told at once."""
TIDY_S = 5.0
ALL_LAYERS = (1 << 15) - 1
GIVEN_UP = "the decode server has given it up"
ENDS = {"cancelled": GIVEN_UP, "expired": "no decode rank has asked in time"}
"""Why a room has failed of which pages have come back so."""


@dataclass
class Room:
    """A request's prefill.

    Attributes:
        since: When it was first heard of.
        names: The names under which decode ranks have asked.
        pages: The pages that are computed, from the first that the decode server does not have.
        begun: How many of its pages steps have begun that leave by layer.
        read: Names whose pages may still be read.
        finished: Whether the prefill is over.
        reason: Why it has failed.
        taken: Whether this server has a request for it.
    """

    since: float
    names: list[str] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    begun: int = 0
    read: set[str] = field(default_factory=set)
    finished: bool = False
    reason: str | None = None
    taken: bool = False


class Sending:
    """The rooms of a prefill rank. Its methods may be called from any thread."""

    def __init__(
        self,
        prefiller: kv.Prefiller,
        cache: kv.Cache,
        page_tokens: int,
        conclude: Callable[[int, str | None], None],
        forget: Callable[[int], None],
    ) -> None:
        """Begin without rooms.

        Args:
            prefiller: Where pages leave.
            cache: The cache that it computes.
            page_tokens: Tokens of a page.
            conclude: Told a room whose pages have come back, and why it has failed; None: all has been sent.
            forget: Told a room that SGLang has dropped without a word.
        """
        self.prefiller, self.page_tokens, self.conclude, self.forget = prefiller, page_tokens, conclude, forget
        self.groups, self.step, self.tidied = cache.geometry.num_groups, 0, time.monotonic()
        self.lock = threading.RLock()
        self.rooms: dict[int, Room] = {}
        self.room_of: dict[str, int] = {}
        self.gone: dict[int, tuple[str, float]] = {}
        """Rooms that have failed: why, and when."""

    def _room(self, room: int) -> Room:
        return self.rooms.setdefault(room, Room(time.monotonic()))

    def take(self, room: int) -> str | None:
        """Note that this server has a request for a room; return why it has failed already."""
        with self.lock:
            if room not in self.rooms:
                # Another request had this number before.
                self.gone.pop(room, None)
            at = self._room(room)
            at.taken = True
            return at.reason

    def asked(self, room: int, name: str, num_targets: int) -> bool:
        """Note that a decode rank has asked; return whether all have."""
        with self.lock:
            if room in self.gone:
                with contextlib.suppress(ValueError):
                    self.prefiller.fail(name, self.gone[room][0])
                return False
            at = self._room(room)
            if name not in at.names:
                at.names.append(name)
                self.room_of[name] = room
            return len(at.names) == num_targets

    def begin(self, work: Sequence[tuple[int, Sequence[int]]]) -> bool:
        """Say what the next forward step computes: its pages leave layer by layer.

        Args:
            work: Rooms, and all pages of each up to the end of the step, from the first that the decode server does not
                have. `add` brings them again when they are computed.

        Returns:
            Whether it is so. If not, pages leave with `add`.
        """
        with self.lock:
            rooms = [(at, list(map(int, pages))) for room, pages in work if (at := self.rooms.get(room)) is not None]
            rooms = [(at, pages) for at, pages in rooms if at.reason is None and not at.finished and pages]
            states = [[0]] * (self.groups - 1)
            work_of = {name: pages for at, pages in rooms for name in at.names}
            found = [(name, len(pages) * self.page_tokens, [pages, *states]) for name, pages in work_of.items()]
            if not found:
                return False
            try:
                self.prefiller.begin_step(self.step + 1, found)
            except (ValueError, pt.EngineBusy, pt.EngineError):
                # A step is taken as a whole. `add` tells which room it is.
                return False
            self.step += 1
            for at, pages in rooms:
                at.begun = len(pages)
                at.read.update(at.names)
            return True

    def all_done(self) -> None:
        """Say that all layers of the present step are computed."""
        self.prefiller.layer_done(ALL_LAYERS)

    def add(self, room: int, pages: Sequence[int], states: Sequence[int] | None, context: bytes | None) -> None:
        """Let computed pages leave.

        Args:
            room: The request.
            pages: Pages behind those that were added before.
            states: The page of each state; needed with the last pages.
            context: What goes beside the last pages; None: more pages will come.
        """
        with self.lock:
            at = self.rooms.get(room)
            if at is None or at.reason is not None or at.finished:
                return
            at.pages += map(int, pages)
            if context is None and len(at.pages) <= at.begun:
                return
            lists = [at.pages, *([page] for page in states or [0] * (self.groups - 1))]
            tokens = len(at.pages) * self.page_tokens
            self.step += 1
            try:
                self.prefiller.begin_step(self.step, [(name, tokens, lists) for name in at.names])
                at.read.update(at.names)
                self.all_done()
                if context is not None:
                    at.finished = True
                    for name in at.names:
                        self.prefiller.finish(name, context)
            except (ValueError, pt.EngineBusy, pt.EngineError) as error:
                self.fail(room, str(error))

    def keep(self, room: int, pages: Sequence[int]) -> None:
        """Note pages that are still being computed: they leave with the next ones."""
        with self.lock:
            if room in self.rooms:
                self.rooms[room].pages += map(int, pages)

    def fail(self, room: int, reason: str) -> None:
        """Have a room fail. Decode ranks are told when nothing of it is under way."""
        with self.lock:
            at = self._room(room)
            if at.reason is None:
                at.reason = reason
            self.gone[room] = (at.reason, time.monotonic())
            for name in at.names:
                with contextlib.suppress(ValueError):
                    self.prefiller.fail(name, at.reason)
            self._settle(room, at)

    def clear(self, room: int) -> None:
        """Forget a room that this server has no request for any more."""
        with self.lock:
            at = self.rooms.get(room)
            if at is None:
                return
            if at.read:
                self.fail(room, "its pages are used by another request")
            for name in at.names:
                self.room_of.pop(name, None)
            self.rooms.pop(room, None)

    def poll(self) -> None:
        """Tell which rooms' pages have come back."""
        with self.lock:
            for name, end in self.prefiller.poll():
                room = self.room_of.get(name)
                if room is None:
                    continue
                at = self.rooms[room]
                at.read.discard(name)
                if end in ENDS and at.reason is None:
                    at.reason = ENDS[end]
                self._settle(room, at)
            self._tidy()

    def _settle(self, room: int, at: Room) -> None:
        """Tell the end of a room, if nothing reads its pages any more."""
        if not at.read and (at.finished or at.reason is not None):
            self.conclude(room, at.reason)

    def _tidy(self) -> None:
        now = time.monotonic()
        if now < self.tidied + TIDY_S:
            return
        self.tidied = now
        self.gone = {room: kept for room, kept in self.gone.items() if kept[1] + KEPT_S > now}
        for room, at in list(self.rooms.items()):
            # Prefills that never came here, and those that SGLang dropped without a word.
            if not at.read and at.since + KEPT_S < now and (at.reason is not None or not at.taken):
                self.clear(room)
                self.forget(room)

    def is_idle(self) -> bool:
        """Return whether nothing is read from any page."""
        with self.lock:
            self.poll()
            return not any(at.read for at in self.rooms.values())
