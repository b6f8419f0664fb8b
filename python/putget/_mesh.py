"""Sockets between the ranks of one group: steps that all of them take together, and waits for what they say.

Every pair of ranks has one connection. Nothing here is on the path of a round.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from putget import _fork
from putget._peers import Message, Peer
from putget.errors import PeerTimeout, PutgetError

_SPARE_DESCRIPTORS = 64  # for shares on their way, and for the caller
_LOOK_AGAIN_S = 0.25  # between looks at what only time decides
_DRAIN_S = 1.0  # behind a deadline, for what has arrived but was not read
_MAX_REASON = 8192  # characters of a refusal: whatever they are, the message stays shorter than a peer reads


def require_descriptors(count: int) -> None:
    """Makes sure that this process may open so many descriptors more: raises its soft limit up to the hard one.

    Raises:
        PutgetError: The hard limit is too low.
    """
    needed = len(os.listdir("/proc/self/fd")) + count + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise PutgetError(f"{needed} descriptors are needed, the limit is {hard} (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Deadline:
    """When a wait ends.

    Attributes:
        timeout_s: Seconds that it was given.
        at: The end, by the monotonic clock.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at = time.monotonic() + timeout_s

    def left(self) -> float:
        """Seconds until the end; negative behind it."""
        return self.at - time.monotonic()

    def put_off(self) -> bool:
        """Called at the end; True where the wait goes on all the same."""
        return False


def shorten(reason: str) -> str:
    """A reason that fits into one message, with a note where its end is cut off."""
    if len(reason) <= _MAX_REASON:
        return reason
    return f"{reason[:_MAX_REASON]}... (cut off: {len(reason)} characters in all)"


class Mesh:
    """All connections of one rank. Calls come from one thread at a time.

    Attributes:
        rank: This rank.
        peers: The connections, by rank.
        one_host: Whether all ranks share this host, so that descriptors can travel.
        process: The rank's.
        step: Of the last exchange; the same on all ranks that took part in it.
        closed: Whether there are no connections any more, by ``close`` or in a forked child.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], one_host: bool) -> None:
        self.rank = rank
        self.peers = {peer: Peer(sock) for peer, sock in sorted(connections.items())}
        self.one_host = one_host
        self.step = 0
        self.closed = False
        self.process = _fork.here
        _meshes.add(self)

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
            PeerTimeout: A member's message did not come in time, or its connection is gone.
            ValueError: A member refused (see ``refuse``), or is at another step than this rank.
            ForkedChild: This process is a fork of the rank.
        """
        self.process.require_here(self.rank, "Communicator")
        self.step += 1
        self._take_stale()
        others = sorted(set(members) - {self.rank})
        for peer in others:
            passed = descriptors.get(peer, []) if descriptors else []
            self.peers[peer].send({**fields, "step": self.step, "what": what}, passed, timeout_s)

        found: dict[int, Message] = {}

        def look() -> bool:
            for peer in others:
                if peer in found:
                    continue
                self._drop_stale(self.peers[peer])
                inbox = self.peers[peer].inbox
                if inbox and inbox[0].fields["step"] == self.step:
                    found[peer] = inbox.popleft()
            if len(found) == len(others):
                return True
            heed()
            return False

        try:
            self.wait(look, lambda: set(others) - found.keys(), deadline or Deadline(timeout_s), phase)
            for peer, message in found.items():
                if "refused" in message.fields:
                    raise ValueError(f"rank {peer}: {message.fields['refused']}")
                if message.fields["what"] != what:
                    raise ValueError(f"rank {self.rank} is at {what!r}, rank {peer} at {message.fields['what']!r}")
        except BaseException:
            for message in found.values():
                message.close()
            raise
        return found

    def refuse(self, reason: str) -> None:
        """Takes the place of an exchange for a rank that found its own arguments wrong: the others hear why."""
        self.step += 1
        self._take_stale()
        for peer in self.peers.values():
            peer.send({"step": self.step, "what": "refusal", "refused": shorten(reason)}, [], 1.0)

    def close(self) -> None:
        """Closes every connection; peers notice."""
        self.closed = True
        for peer in self.peers.values():
            peer.close()

    def _drop_stale(self, peer: Peer) -> None:
        """Forgets messages of steps that failed."""
        while peer.inbox and peer.inbox[0].fields["step"] < self.step:
            peer.inbox.popleft().close()

    def _take_stale(self) -> None:
        """Reads what has come since the last step, so that refusals that nobody waits for never fill a socket."""
        for peer in self.peers.values():
            peer.receive_all()
            self._drop_stale(peer)

    def wait(
        self,
        look: Callable[[], bool],
        missing: Callable[[], set[int]],
        deadline: Deadline,
        phase: str,
        epoch: int = 0,
    ) -> None:
        """Waits until a look succeeds. A look follows whatever arrives, also what was there when the deadline passed.

        Raises:
            PeerTimeout: The deadline has passed, or a missing rank's connection is gone.
        """
        with selectors.DefaultSelector() as selector:
            for peer in self.peers.values():
                if peer.alive:
                    selector.register(peer.sock, selectors.EVENT_READ, peer)
            while not look():
                gone = {rank for rank in missing() if not self.peers[rank].alive}
                if gone:
                    raise PeerTimeout(phase, self.rank, epoch, gone, lost=gone)
                left = deadline.left()
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


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child is no rank: with its copies of the sockets open, peers would not see this rank's death."""
    for mesh in list(_meshes):
        mesh.close()


os.register_at_fork(after_in_child=_close_in_child)
