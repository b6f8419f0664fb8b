"""Sockets between the ranks of one group: steps that all of them take together, and waits for what they say.

Every pair of ranks has one connection. Nothing here is on the path of a round.

A collective call, such as a constructor, is one *attempt* of each rank. Attempts have numbers, which are the same on
all ranks: attempt n of one rank meets attempt n of the others, and no other. A rank that leaves an attempt by an error
says so to the others, on its way out: whoever waits in attempt n, or comes to it later, ends it at once. So the next
attempt begins afresh on all ranks.

A rank may leave behind its last words: then attempt n has succeeded on others, which the rank *left late*. Their
objects of it are *void*, because the rank lacks them. A rank whose caller has gone on to attempt n + 1 by then ends
that one, too, and says so. Ranks that have known it before leave that number out, and say that. They take nothing of an
attempt n + 1 that its rank has begun in ignorance. So all are at the same number again.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from putget import _fork
from putget.errors import BackendUnavailable, PeerLeft, PeerTimeout, PutgetError
from putget.group import files
from putget.group.peers import Message, Peer
from putget.group.shield import shielded

_LOOK_AGAIN_S = 0.25  # between looks at what only time decides
_DRAIN_S = 1.0  # behind a deadline, for what has arrived but was not read
_MAX_REASON = 8192  # characters of a reason: whatever they are, the message stays shorter than a peer reads
_FAREWELL_S = 1.0  # for a peer that does not read

logger = logging.getLogger("putget")

_Result = TypeVar("_Result")


class Disagreement(ValueError):
    """Ranks differ, in words that are true on each of them."""


class Deadline:
    """When a wait ends.

    Attributes:
        timeout_s: Seconds that it was given.
        at: The end, by the monotonic clock.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at = time.monotonic() + timeout_s
        self._is_told = False

    def left(self) -> float:
        """Seconds until the end; negative behind it."""
        return self.at - time.monotonic()

    def warn_at_half(self, rank: int, where: str, missing: Callable[[], Iterable[str]]) -> None:
        """After half of the time, and once, logs where a rank is and whom it waits for."""
        left = self.left()
        if self._is_told or left >= self.timeout_s / 2:
            return
        self._is_told = True
        logger.warning(
            "putget: rank %d is at %s and has waited %.1f s for rank(s) %s; it gives up in %.1f s",
            rank,
            where,
            self.timeout_s - left,
            ", ".join(missing()),
            max(left, 0.0),
        )

    def put_off(self) -> bool:
        """Called at the end; True where the wait goes on all the same."""
        return False


def shorten(reason: str) -> str:
    """A reason that fits into one message, with a note where its end is cut off."""
    if len(reason) <= _MAX_REASON:
        return reason
    return f"{reason[:_MAX_REASON]}... (cut off: {len(reason)} characters in all)"


@dataclass
class _Attempt:
    """A collective call that is under way on this rank.

    Attributes:
        number: The same on all ranks.
        what: The call's name.
        members: Ranks that take part, with this one.
        step: Of the last exchange.
        at: Its name.
        timeout_s: Its deadline in seconds.
        heard: The word of the rank that has left it, if one has.
        is_left: Whether this rank has said that it leaves.
        known: Attempts that this rank knew to be void when it began this one.
    """

    number: int
    what: str
    members: list[int]
    step: int = 0
    at: str = "its begin"
    timeout_s: float = _FAREWELL_S
    heard: dict[str, Any] = field(default_factory=dict)
    is_left: bool = False
    known: frozenset[int] = frozenset()


class _IsLeftOut(Exception):
    """Other ranks have ended an attempt of this number that this rank has just begun: the next one takes its place."""


class Mesh:
    """All connections of one rank. Calls come from one thread at a time.

    Attributes:
        rank: This rank.
        peers: The connections, by rank.
        one_host: Whether all ranks share this host, so that descriptors can travel.
        process: The rank's.
        number: Of the last attempt.
        closed: Whether there are no connections any more, by ``close`` or in a forked child.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], one_host: bool) -> None:
        self.rank = rank
        self.peers = {peer: Peer(sock) for peer, sock in sorted(connections.items())}
        self.one_host = one_host
        self.number = 0
        self.closed = False
        self.process = _fork.here
        self._attempt: _Attempt | None = None
        self._made = (0, "")  # the last attempt that succeeded here, and its name
        self._void: set[int] = set()  # attempts whose objects this rank or another lacks: they failed, or one left late
        self._late: dict[str, Any] = {}  # the word of the last rank that left late, as it is passed on
        self._left_late: dict[int, str] = {}  # by rank: why it has not what this rank has of the last attempt
        _meshes.add(self)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def within(
        self,
        what: str,
        body: Callable[[], _Result],
        *,
        members: Iterable[int] | None = None,
        ends_together: bool = False,
        phase: str = "setup",
    ) -> _Result:
        """Runs a body as one attempt; within another attempt it is a part of that.

        Args:
            what: The call's name.
            body: What to do.
            members: Ranks that take part; None: all.
            ends_together: Members leave the body when all have come to its end, or none does.
            phase: Named where a rank does not come to the end.
        """
        if self._attempt is not None and self._attempt.number == self._made[0]:
            self.end()  # a signal's handler raised as it was about to end
        if self._attempt is not None:
            try:
                return body()
            except BaseException as error:
                self.leave(error if self._has_heard() else files.named(error, self.rank))
                raise
        try:
            attempt = self.begin(what, members)
            result = body()
            if ends_together and attempt.step > 0:
                self.exchange("end", {}, members=attempt.members, timeout_s=attempt.timeout_s, phase=phase)
            self._made = attempt.number, what
            self._left_late.clear()
            return result
        except BaseException as error:
            if self._attempt is not None:
                self._void.add(self._attempt.number)
            named = error if self._has_heard() else files.named(error, self.rank)
            self.leave(named)
            if named is error:
                raise
            raise named from error
        finally:
            self.end()

    def _has_heard(self) -> bool:
        return self._attempt is not None and bool(self._attempt.heard)

    def begin(self, what: str, members: Iterable[int] | None = None, after: int = 0) -> _Attempt:
        """Begins an attempt, with a number above ``after``; ``end`` follows, also where this is interrupted."""
        everyone = sorted({self.rank, *self.peers} if members is None else members)
        attempt = self._attempt = _Attempt(max(self.number, after) + 1, what, everyone)
        self.number = attempt.number
        self._take_stale()
        attempt.known = frozenset(self._void)
        self._leave_out(attempt)
        return attempt

    def _leave_out(self, attempt: _Attempt) -> None:
        """Leaves out numbers that others have used up: they began them before they heard of a rank that had left late.

        It says so to the members: none of them takes the next number for another call.
        """
        others = [peer for peer in attempt.members if peer != self.rank]
        while words := self._words(attempt, others):
            if not all(_is_known(attempt, word) for word in words):
                return  # the first step of the attempt ends it
            self._say_left(attempt, words[0])
            self._void.add(attempt.number)
            attempt.known |= {attempt.number}
            self.number = attempt.number = attempt.number + 1
            for peer in others:
                self._drop_stale(peer, attempt.number)

    def is_void(self, number: int) -> bool:
        """Whether an attempt has failed here, or a rank has left it late: not all ranks have what it made."""
        self._take_stale()
        return number in self._void

    def left_late(self, number: int) -> Exception | None:
        """The error for an attempt that has succeeded here, and that a rank has left late.

        The attempt that is under way ends by it, as it would by words that come later.
        """
        late = self._late
        if not late or late["late"] != number:
            return None
        if self._attempt is not None:
            self._attempt.heard = late
        return error_of(late, self.rank, "setup")

    def is_abandoned(self) -> bool:
        """Whether a connection has ended before any attempt succeeded: a rank has left the making of this mesh late."""
        if self._made[0] > 0:
            return False
        self._take_stale()
        return not all(peer.alive for peer in self.peers.values())

    def end(self) -> None:
        """The attempt is over on this rank."""
        if self._attempt is not None:
            self.number = max(self.number, self._attempt.number)
        self._attempt = None

    def leave(self, error: BaseException | str) -> None:
        """Tells the members that this rank leaves the attempt, and why; a string is a mistake of the caller."""
        attempt = self._attempt
        if attempt is None or attempt.is_left:
            return
        attempt.is_left = True
        self._say_left(attempt, attempt.heard or farewell(self.rank, attempt.what, error))

    def _say_left(self, attempt: _Attempt, word: dict[str, Any]) -> None:
        fields = {"attempt": attempt.number, "step": attempt.step, "at": f"leaving {attempt.what}", "left": word}

        def say() -> None:
            for peer in attempt.members:
                if peer != self.rank:
                    self.peers[peer].send(fields, [], _FAREWELL_S)

        shielded(say)

    def refuse(self, error: BaseException | str) -> None:
        """Leaves the attempt, or one of its own: the others hear why. A string is a mistake of this rank's caller."""
        if self._attempt is not None:
            self.leave(error)
            return
        try:
            self.begin("a call")
            self.leave(error)
        finally:
            self.end()

    def exchange(
        self,
        what: str,
        fields: dict[str, Any],
        *,
        members: Iterable[int],
        timeout_s: float,
        phase: str = "setup",
        descriptors: dict[int, list[int]] | None = None,
        deadline: Deadline | None = None,
        heed: Callable[[], None] = lambda: None,
    ) -> dict[int, Message]:
        """Every member sends fields (and descriptors, by receiver) to every other; returns what came, by rank.

        It is a step of the attempt that is under way, or an attempt of its own.

        Args:
            what: The step's name; all members must be at the same.
            fields: JSON.
            members: Ranks; this rank may be one of them.
            timeout_s: Deadline in seconds.
            phase: For PeerTimeout.
            descriptors: By receiver.
            deadline: Stands in for ``timeout_s``.
            heed: Called whenever something may have arrived; it may raise.

        Raises:
            PeerTimeout: A member's message did not come in time, or its connection is gone; here, or on a member that
                has left because of it.
            PeerLeft: A member has left the attempt by an error of its own, or because it missed this rank.
            ValueError: A member has left it because of a caller's mistake, or is at another step than this rank.
            PutgetError: This process has no room for the descriptors that came.
            ForkedChild: This process is a fork of the rank.
        """
        self.process.require_here(self.rank, "Communicator")
        members = sorted({self.rank, *members})

        def step() -> dict[int, Message]:
            attempt = self._attempt
            assert attempt is not None
            if attempt.is_left:
                raise PutgetError(f"rank {self.rank} has left {attempt.what} and cannot go on with {what!r}")
            attempt.step += 1
            attempt.at, attempt.timeout_s, attempt.members = what, timeout_s, members
            ends = deadline or Deadline(timeout_s)
            while True:
                try:
                    return self._exchange(attempt, fields, phase, descriptors or {}, ends, heed)
                except _IsLeftOut:
                    self._leave_out(attempt)

        return self.within(what, step, members=members) if self._attempt is None else step()

    def _exchange(
        self,
        attempt: _Attempt,
        fields: dict[str, Any],
        phase: str,
        descriptors: dict[int, list[int]],
        deadline: Deadline,
        heed: Callable[[], None],
    ) -> dict[int, Message]:
        others = [rank for rank in attempt.members if rank != self.rank]
        own = {"attempt": attempt.number, "step": attempt.step, "what": attempt.at, "at": _place(attempt)}
        if attempt.step == 1 and self._made[0] not in attempt.known:
            own["holds"] = self._made[0]

        def send(receivers: Iterable[int]) -> set[int]:
            """Returns those for whose descriptors there was no room on the way."""
            message, timeout_s = {**fields, **own}, attempt.timeout_s
            return {
                peer for peer in receivers if not self.peers[peer].send(message, descriptors.get(peer, []), timeout_s)
            }

        unsent = send(others)
        found: dict[int, Message] = {}

        def look() -> bool:
            nonlocal unsent
            unsent = send(sorted(unsent))  # ranks have perhaps read, this one too
            self._end_if_left(attempt, others, phase)
            for peer in others:
                message = self._next(peer, attempt, phase, peer in found)
                if message is not None:
                    found[peer] = message
            if len(found) == len(others) and not unsent:
                return True
            heed()
            return False

        try:
            self.wait(look, lambda: set(others) - found.keys() | unsent, deadline, phase, where=_place(attempt))
            for peer, message in found.items():
                self._check(attempt, peer, message)
        except BaseException as error:
            for message in found.values():
                message.close()
            if unsent and type(error) is PeerTimeout and not (error.lost or attempt.heard):
                raise files.stuck(self.rank, {peer: len(descriptors[peer]) for peer in unsent}) from error
            raise
        return found

    def _end_if_left(self, attempt: _Attempt, others: list[int], phase: str) -> None:
        """Ends the attempt where another rank has left it.

        Raises:
            PeerLeft, PeerTimeout, ValueError, PutgetError: It has.
            _IsLeftOut: It had begun the attempt before it heard what this rank knew.
        """
        for peer in others:
            self._drop_stale(peer, attempt.number)
        words = self._words(attempt, others)
        if not words and self._late and self._late["late"] == self._made[0] not in attempt.known:
            words = [self._late]  # its rank comes to this attempt with something else, if at all
        if not words:
            return
        word = next((one for one in words if not _is_known(attempt, one)), words[0])
        if _is_known(attempt, word) and attempt.step == 1:
            raise _IsLeftOut
        if word["kind"] == "late" and word["late"] == self._made[0]:
            self._void.add(word["late"])  # the rank that left has perhaps not reached this one yet
            self._late = word
        attempt.heard = word
        raise error_of(word, self.rank, phase)

    def _words(self, attempt: _Attempt, others: Iterable[int]) -> list[dict[str, Any]]:
        """Words of those that have left an attempt, in the order of ranks."""
        inboxes = [self.peers[peer].inbox for peer in others]
        return [one.fields["left"] for inbox in inboxes for one in inbox if _leaves(one, attempt.number)]

    def _next(self, peer: int, attempt: _Attempt, phase: str, is_found: bool) -> Message | None:
        """A peer's message of this step, if it has come and is not found yet; raises PeerLeft if the peer is beyond."""
        inbox = self.peers[peer].inbox
        if is_found or not inbox:
            return None  # a peer that is found may have come to the end, and gone on
        if inbox[0].fields["attempt"] > attempt.number:
            raise PeerLeft(phase, self.rank, peer, attempt.what, "it has gone on to another call")
        if self._is_ignorant(attempt, inbox[0].fields.get("holds", 0)):
            return None  # its rank ends the attempt, and says so
        return inbox.popleft() if inbox[0].fields["step"] == attempt.step else None

    def _is_ignorant(self, attempt: _Attempt, holds: int) -> bool:
        """Whether a rank has begun this attempt although the last one that succeeded there is void, with all since.

        Whoever has made that void has told it so, or is gone, which is noticed where every rank takes part.
        """
        is_of_all = len(attempt.members) > len(self.peers)
        return holds > 0 and is_of_all and all(one in attempt.known for one in range(holds, attempt.number))

    def _check(self, attempt: _Attempt, peer: int, message: Message) -> None:
        """Raises ValueError where a peer is at another step, PutgetError where descriptors were lost on the way."""
        if message.fields["what"] != attempt.at:
            late = self._left_late.get(peer)
            raise Disagreement(
                f"rank {self.rank} is at {attempt.at!r}, rank {peer} at {message.fields['what']!r}"
                + ("" if late is None else f"; {late}")
            )
        if message.lacking:
            needed = len(message.descriptors) + message.lacking
            raise files.lacking(self.rank, len(message.descriptors), needed)

    def _drop_stale(self, peer: int, number: int) -> None:
        """Forgets a peer's messages of attempts before this number."""
        inbox = self.peers[peer].inbox
        while inbox and inbox[0].fields.get("attempt", 0) < number:
            message = inbox.popleft()
            if "left" in message.fields and message.fields["attempt"] == self._made[0]:
                self._note_late(peer, message.fields["left"])
            message.close()

    def _note_late(self, peer: int, word: dict[str, Any]) -> None:
        """A peer has left late the attempt that succeeded here: its last words had been said."""
        number, what = self._made
        self._void.add(number)
        why = f"{word['why']}, behind its last step; others have made it"
        self._late = {"rank": word["rank"], "what": what, "kind": "late", "why": why, "late": number}
        self._left_late[peer] = (
            f"rank {word['rank']} left {self._made[1]} behind its last step ({word['why']}): rank {peer} lacks what "
            f"rank {self.rank} made in that call; close it and make it again on all ranks"
        )
        logger.warning("putget: %s", self._left_late[peer])

    def _take_stale(self) -> None:
        """Reads what has come since the last step, so that words that nobody waits for never fill a socket."""
        first = self.number + (self._attempt is None)

        def take() -> None:
            for rank, peer in self.peers.items():
                peer.receive_all()
                self._drop_stale(rank, first)

        shielded(take)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(
        self,
        look: Callable[[], bool],
        missing: Callable[[], set[int]],
        deadline: Deadline,
        phase: str,
        epoch: int = 0,
        where: str = "",
    ) -> None:
        """Waits until a look succeeds. A look follows whatever arrives, also what was there when the deadline passed.

        After half of the deadline it logs where this rank is, and whom it waits for.

        Raises:
            PeerTimeout: The deadline has passed, or a missing rank's connection is gone.
        """
        with selectors.PollSelector() as selector:  # it takes no descriptor
            for peer in self.peers.values():
                if peer.alive:
                    selector.register(peer.sock, selectors.EVENT_READ, peer)
            while not look():
                gone = {rank for rank in missing() if not self.peers[rank].alive}
                if gone:
                    raise PeerTimeout(phase, self.rank, epoch, gone, lost=gone)
                left = deadline.left()
                deadline.warn_at_half(self.rank, where or phase, lambda: map(self._last_heard, sorted(missing())))
                arrived = selector.select(max(0.0, min(left, _LOOK_AGAIN_S)))
                for key, _ in arrived:
                    key.data.receive()
                    if not key.data.alive:
                        selector.unregister(key.fileobj)
                is_over = left <= 0 and (not arrived or left < -_DRAIN_S)
                if is_over and arrived and look():
                    return
                if is_over and not deadline.put_off():
                    raise PeerTimeout(phase, self.rank, epoch, missing(), deadline.timeout_s)

    def _last_heard(self, rank: int) -> str:
        return f"{rank} (last heard at: {self.peers[rank].last_heard or 'nothing yet'})"

    def close(self) -> None:
        """Closes every connection; peers notice."""
        self.closed = True
        for peer in self.peers.values():
            peer.close()


def _place(attempt: _Attempt) -> str:
    """Where in an attempt a rank is, for people."""
    return f"{attempt.what} (attempt {attempt.number}), step {attempt.at!r}"


def farewell(rank: int, what: str, error: BaseException | str) -> dict[str, Any]:
    """The word of a rank that leaves: why, so that the others can raise the same."""
    said = shorten(str(error))
    word = {"rank": rank, "what": what, "kind": "other", "why": said}
    if isinstance(error, PeerLeft):
        return {**word, "rank": error.peer, "why": error.reason}
    if isinstance(error, PeerTimeout):
        facts = {"epoch": error.epoch, "missing": error.missing, "lost": error.lost, "timeout_s": error.timeout_s}
        return {**word, "kind": "timeout", **facts}
    if isinstance(error, str):
        return {**word, "kind": "argument"}
    for kind, shared in _KINDS.items():
        if isinstance(error, shared):
            return {**word, "kind": kind}
    if isinstance(error, PutgetError):
        return word
    name = type(error).__name__
    return {**word, "why": f"{name}: {said}" if said else name}


def _leaves(message: Message, number: int) -> bool:
    return message.fields["attempt"] == number and "left" in message.fields


def _is_known(attempt: _Attempt, word: dict[str, Any]) -> bool:
    """Whether an attempt was left for a reason that this rank knew when it began it."""
    return word["kind"] == "late" and word["late"] in attempt.known


# Errors that all ranks raise alike.
_KINDS: dict[str, type[Exception]] = {
    "disagreement": Disagreement,
    "unavailable": BackendUnavailable,
    "argument": ValueError,
    "memory": MemoryError,
}


def error_of(word: dict[str, Any], rank: int, phase: str) -> Exception:
    """The error that this rank raises where another one has left with this word."""
    by, why, kind = word["rank"], word["why"], word["kind"]
    if kind == "timeout" and rank not in word["missing"]:
        return PeerTimeout(phase, rank, word["epoch"], word["missing"], word["timeout_s"], word["lost"], said_by=by)
    if kind == "disagreement":
        return Disagreement(why)
    if kind in _KINDS:
        return _KINDS[kind](f"rank {by}: {why}")
    return PeerLeft(phase, rank, by, word["what"], why)


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child is no rank: with its copies of the sockets open, peers would not see this rank's death."""
    for mesh in list(_meshes):
        mesh.close()


os.register_at_fork(after_in_child=_close_in_child)
