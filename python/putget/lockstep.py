"""Passes in step: ranks with requests of their own run a model's layers together, also ranks that have no request.

All ranks run pass n, then all run pass n + 1. A rank with work says that it begins a pass, and waits for nobody: the
layers' rounds wait. A rank without work sleeps until another one begins, and takes part without a token. So nobody
computes while all are idle, and the agreement costs a rank with work one small message to each other rank.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Sequence

from putget import _fork
from putget.errors import PeerLeft, PeerTimeout, ProtocolMisuse
from putget.group import reach
from putget.group.communicator import Communicator
from putget.group.handshake import host_identity

# A number and a pass's name, by its place in ``names``; or how often a rank has finished, also by an error; or the
# number of a pause; or that of a pass, before the rank goes on without ranks that are gone.
_WORD = struct.Struct("!QB")
_FINISHED, _PAUSED, _LEFT, _GOES_ON = 255, 254, 253, 252
_MOST_NAMES = 252
_HELLO = struct.Struct("!I16s")  # the rank, and the secret of the one that it connects to
_NOTHING = -1
_LOOPBACK = "127.0.0.1"


def _give_back(file: int) -> None:
    os.close(file)


def _readable(waits: Iterable[socket.socket | Bell], timeout_s: float | None) -> set[int]:
    """The descriptors that can be read, or are at their end; waits for one of them. None: without a deadline.

    ``select.select`` refuses descriptors from 1024 on, which a server with many connections has.
    """
    poll = select.poll()
    for one in waits:
        poll.register(one, select.POLLIN)
    return {file for file, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)}


class Bell:
    """A ``threading.Event`` that ``Lockstep.wait`` can wait for beside its sockets.

    A forked child has its parent's bell: it hears it, and neither rings nor stills it.
    """

    def __init__(self) -> None:
        self._process = _fork.here
        self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, _give_back, self._file).atexit = False  # threads and handlers may ring until the end

    def fileno(self) -> int:
        """The descriptor that is readable while the bell rings."""
        return self._file

    def set(self) -> None:
        """Rings until ``clear``."""
        if self._process.is_here:
            os.eventfd_write(self._file, 1)

    def clear(self) -> None:
        """Is still."""
        if self._process.is_here:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._file)

    def is_set(self) -> bool:
        """Whether it rings."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it rings; whether it does."""
        return bool(_readable([self], timeout))


class Lockstep:
    """The passes of a group's ranks. Calls come from one thread at a time.

    A forked child has the connections of its parent, and is no rank: calls raise ``ForkedChild`` there.

    Args:
        comm: The ranks. Collective.
        names: Names of passes, the same on all ranks: the model, a draft layer.
        timeout_s: Deadline of set-up in seconds.
        what: The call that runs the passes, as ``PeerLeft`` names it.

    Attributes:
        number: Passes that this rank has taken part in.
        idle_passes: Those that it had no token in, as its caller counts them.

    Raises:
        ValueError: Names are none, more than 252, or differ between ranks.
        PeerTimeout: A rank did not come in time.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str] = ("model",),
        timeout_s: float = 60.0,
        what: str = "Lockstep",
    ) -> None:
        if not 1 <= len(set(names)) == len(names) <= _MOST_NAMES:
            raise ValueError(f"names is {tuple(names)}, expected 1 to {_MOST_NAMES} names, each once")
        comm.compare("lockstep", {"names": tuple(names)}, timeout_s)
        self._rank, self._names, self._what = comm.rank, tuple(names), what
        self._process = _fork.here
        self.number = self.idle_passes = 0
        self._own: int = _NOTHING  # the name of the pass that this rank is in
        self._begun: dict[int, int] = {}  # by rank: the name of the pass after ``number`` that it has begun
        self._later: dict[int, list[tuple[int, int]]] = {}  # by rank: what it has said of passes behind that
        self._finished = dict.fromkeys(range(comm.size), 0)
        self._left: dict[int, int] = {}  # by rank: the last of these times, where it was by an error
        self._goes_on: dict[int, int] = {}  # by rank: the pass before which it looks for ranks that are gone
        self._paused = dict.fromkeys(range(comm.size), 0)
        self._rest = dict.fromkeys(range(comm.size), b"")
        self._lost: set[int] = set()
        self._peers = _connect(comm, timeout_s)

    def begin(self, name: str = "model") -> None:
        """This rank begins the next pass, and says so.

        Args:
            name: One of ``names``.

        Raises:
            ValueError: It is none of them; nothing has been said.
            ProtocolMisuse: Another rank has begun it under another name.
            PeerTimeout: A rank is gone.
            PeerLeft: A rank has left by an error.
        """
        if name not in self._names:
            raise ValueError(f"name is {name!r}, expected one of {', '.join(map(repr, self._names))}")
        self._listen()
        self._require_there(begins=True)
        self._own = self._names.index(name)
        self._say(self.number + 1, self._own)
        self._require_there(begins=True)
        self._require_same(self._own)

    def announce(self) -> None:
        """Says that this rank begins the next pass when it has gone on without ranks that are gone.

        Others that have finished would not look for them: they do so now, and go on too.
        """
        self._say(self.number + 1, _GOES_ON)

    def begun(self) -> str | None:
        """The name of the next pass if another rank has begun it: this one takes part.

        Raises:
            PeerTimeout: A rank is gone.
            PeerLeft: A rank has left by an error, and the pass would wait for it.
        """
        self._listen()
        found = next(iter(self._begun.values()), None)
        return None if found is None else self._names[found]

    def end(self, was_idle: bool = False) -> None:
        """This rank has run all layers of the pass.

        Raises:
            ProtocolMisuse: Another rank was in a pass of another name.
        """
        if self._own != _NOTHING:
            self._require_same(self._own)
        self.number += 1
        self.idle_passes += was_idle
        self._own = _NOTHING
        self._begun.clear()
        for rank, words in self._later.items():
            while words and words[0][0] <= self.number + 1:
                number, code = words.pop(0)
                if number == self.number + 1:
                    self._begun[rank] = code

    def wait(self, bell: Bell | None, timeout_s: float) -> None:
        """Sleeps until another rank says something, the bell rings, or the time is over.

        Raises:
            PeerTimeout: A rank is gone.
        """
        if self.begun() is None:
            waits: list[socket.socket | Bell] = [*self._peers.values()]
            _readable(waits if bell is None else [*waits, bell], timeout_s)
            self._listen()

    def finish(self) -> None:
        """This rank has no more work of its own, and says so. It takes part until all have said it.

        That a rank is gone is told by the next ``begun`` or ``wait``: this call counts once, and does not fail halfway.
        """
        self._require_here()
        self._finished[self._rank] += 1
        self._say(self._finished[self._rank], _FINISHED)

    def leave(self, has_finished: bool) -> None:
        """This rank has no more work because of an error, and says so. The others begin no pass without it.

        A forked child that ends inside says nothing: its parent goes on.

        Args:
            has_finished: Whether it has called ``finish`` already, and has left while it took part for others.
        """
        if not self._process.is_here:
            return
        self._finished[self._rank] += not has_finished
        self._say(self._finished[self._rank], _LEFT)

    @property
    def num_finished(self) -> int:
        """How often this rank has finished, also by an error."""
        return self._finished[self._rank]

    @property
    def all_finished(self) -> bool:
        """Whether all ranks have called ``finish`` as often as this one, and it has taken part in all passes before."""
        with contextlib.suppress(PeerTimeout):
            self._listen()
        return not self._begun and min(self._finished.values()) >= self._finished[self._rank]

    def pause(self, number: int) -> None:
        """This rank begins no pass until its caller goes on, and says so. It takes part until all ranks have said it.

        Args:
            number: Of the pause, the same on all ranks, and higher than that of the one before.

        Raises:
            PeerTimeout: A rank is gone. The others have been told.
        """
        self._require_here()
        self._paused[self._rank] = number
        self._say(number, _PAUSED)
        self._require_there()

    @property
    def all_paused(self) -> bool:
        """Whether all ranks have come to this rank's pause: no pass is under way on any of them, and none begins."""
        return min(self._paused.values()) >= self._paused[self._rank]

    def leave_out(self, ranks: Iterable[int]) -> None:
        """Goes on without some ranks, as all others do. Passes that they alone have begun are forgotten."""
        for rank in ranks:
            peer = self._peers.pop(rank, None)
            if peer is not None:
                peer.close()
            for kept in (
                self._begun,
                self._later,
                self._goes_on,
                self._rest,
                self._finished,
                self._left,
                self._paused,
            ):
                kept.pop(rank, None)
            self._lost.discard(rank)

    def join(self, rank: int, name: str) -> None:
        """Takes part in the next pass, in which a rank is that has heard of it from one that is left out."""
        self._begun.setdefault(rank, self._names.index(name))

    def close(self) -> None:
        """Ends the connections: others see that this rank is gone. Idempotent."""
        while self._peers:
            self._peers.popitem()[1].close()

    def _require_here(self) -> None:
        self._process.require_here(self._rank, "Lockstep")

    def _require_same(self, own: int) -> None:
        for rank, code in self._begun.items():
            if code != own:
                raise ProtocolMisuse(
                    f"pass {self.number + 1}: rank {self._rank} runs {self._names[own]!r}, rank {rank} "
                    f"{self._names[code]!r}"
                )

    def _say(self, number: int, code: int) -> None:
        for rank, peer in self._peers.items():
            try:
                peer.sendall(_WORD.pack(number, code))
            except OSError:
                self._lost.add(rank)

    def _listen(self) -> None:
        """Reads what others have said."""
        self._require_here()  # a child would read it in its parent's place
        waits = {rank: peer for rank, peer in self._peers.items() if peer.fileno() >= 0}
        found = _readable(waits.values(), 0.0)
        for rank, peer in waits.items():
            if peer.fileno() not in found:
                continue
            try:
                came = peer.recv(1 << 16)
            except OSError:
                came = b""
            if not came:
                self._lost.add(rank)
                peer.close()
            self._hear(rank, self._rest[rank] + came)
        for rank in self._lost:
            self._peers.pop(rank, None)
        self._require_there()

    def _hear(self, rank: int, came: bytes) -> None:
        whole = len(came) - len(came) % _WORD.size
        self._rest[rank] = came[whole:]
        for number, code in _WORD.iter_unpack(came[:whole]):
            if code in (_FINISHED, _LEFT):
                self._finished[rank] = number
                if code == _LEFT:
                    self._left[rank] = number
            elif code == _PAUSED:
                self._paused[rank] = number
            elif code == _GOES_ON:
                self._goes_on[rank] = number
            elif number == self.number + 1:
                self._begun[rank] = code
            elif number > self.number:
                self._later.setdefault(rank, []).append((number, code))

    def _require_there(self, begins: bool = False) -> None:
        """A rank goes when all have finished: to one that has finished too it is not lost, unless a pass begins."""
        own = self._finished[self._rank]
        # A pass needs all ranks: of this rank, or of one that has begun it and has not finished.
        waiting = [rank for rank, number in self._goes_on.items() if number == self.number + 1]
        least = min([own, *(self._finished[rank] for rank in [*self._begun, *waiting])])
        self._require_none_left(least)
        needs_all = begins or not own or bool(waiting)
        lost = {rank for rank in self._lost if needs_all or self._finished[rank] < own}
        if lost:
            raise PeerTimeout("lockstep", self._rank, self.number, lost, lost=lost)

    def _require_none_left(self, least: int) -> None:
        for rank, number in self._left.items():
            if number > least:
                raise PeerLeft("lockstep", self._rank, rank, self._what, "it raised an error inside")


def _connect(comm: Communicator, timeout_s: float) -> dict[int, socket.socket]:
    """A connection with every other rank, by rank."""
    deadline = time.monotonic() + timeout_s
    met: dict[int, socket.socket] = {}
    try:
        with socket.create_server(("", 0), backlog=comm.size) as server:
            secret, here = secrets.token_bytes(16), host_identity()
            address = reach.own_address() or socket.gethostname()
            cards = comm.exchange("lockstep", [here, address, server.getsockname()[1], secret.hex()], timeout_s)
            for rank in range(comm.rank):
                identity, host, port, word = cards[rank]
                host = _LOOPBACK if identity == here else host
                try:
                    met[rank] = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
                    met[rank].sendall(_HELLO.pack(comm.rank, bytes.fromhex(word)))
                except TimeoutError:
                    raise
                except OSError as error:  # it listened, and does not any more, or its address leads nowhere from here
                    raise PeerTimeout("lockstep", comm.rank, 0, {rank}, lost={rank}) from error
            while len(met) < comm.size - 1:
                server.settimeout(max(0.1, deadline - time.monotonic()))
                _take(server, secret, met, range(comm.rank + 1, comm.size))
    except TimeoutError:
        missing = set(range(comm.size)) - {comm.rank, *met}
        _close(met)
        raise PeerTimeout("lockstep", comm.rank, 0, missing, timeout_s) from None
    except BaseException:
        _close(met)
        raise
    for peer in met.values():
        peer.settimeout(timeout_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return met


def _take(server: socket.socket, secret: bytes, met: dict[int, socket.socket], expected: range) -> None:
    """Takes one connection, unless it is a stranger's."""
    peer, _ = server.accept()
    peer.settimeout(5.0)
    try:
        rank, word = _HELLO.unpack(peer.recv(_HELLO.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        rank, word = -1, b""
    if secrets.compare_digest(word, secret) and rank in expected and rank not in met:
        met[rank] = peer
    else:
        peer.close()


def _close(sockets: dict[int, socket.socket]) -> None:
    for peer in sockets.values():
        peer.close()
