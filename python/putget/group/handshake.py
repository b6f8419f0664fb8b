"""How the ranks of a group find and trust each other: listeners, proofs, and one connection for each pair.

Ranks that share a host meet over UNIX sockets in the abstract namespace: no file can stay behind, and descriptors
can travel. Ranks on several hosts meet over TCP. Everybody on a host can read the names in that namespace, and every
host can call a port. So each listener has a secret that torch.distributed alone has carried, and both ends of a
connection prove that they know it: the listener sends a challenge, the caller answers with its HMAC (RFC 2104, SHA-256)
under the secret, and the listener answers the caller's challenge likewise. On UNIX sockets both ends look at the
other's user first.
Connections are taken side by side, so a stranger who says nothing holds nobody up.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import os
import secrets
import selectors
import socket
import struct
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

from putget.errors import PeerTimeout, PutgetError
from putget.group.mesh import Deadline
from putget.group.reach import own_address

_RANK = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_SPARE_GUESTS = 32  # callers that have proved nothing yet, beyond those that are expected
_TRY_AGAIN_S = 0.05  # while a listener's queue is full
_LOOK_AGAIN_S = 1.0  # between looks at the time

Talk = Generator[int, bytes, "int | None"]
"""One end of a hand-shake: yields how many bytes it needs next, is sent them, and returns the rank at the other end, or
None where that is a stranger."""


def host_identity() -> str:
    """Equal on two ranks exactly where they can reach each other's abstract UNIX sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def _prove(secret: str, role: str, listener: int, caller: int, challenge: bytes) -> bytes:
    said = b"|".join([b"putget", role.encode(), _RANK.pack(listener), _RANK.pack(caller), challenge])
    return hmac.digest(secret.encode(), said, "sha256")


def _same_user(sock: socket.socket) -> bool:
    """Whether the other end belongs to this process's user; the kernel says so, on UNIX sockets."""
    if sock.family != socket.AF_UNIX:
        return True
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


class Listener:
    """Where higher ranks connect; exists only during set-up.

    Attributes:
        secret: What a caller must know.
    """

    def __init__(self, one_host: bool) -> None:
        self.secret = secrets.token_hex(32)
        self.sock = socket.socket(socket.AF_UNIX if one_host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self.sock.bind("\0putget-" + secrets.token_hex(16) if one_host else ("", 0))
            self.sock.listen(256)
        except OSError:
            self.sock.close()
            raise
        self.sock.setblocking(False)

    def card(self) -> dict[str, Any]:
        """The facts that a peer needs to connect: exchanged once, over torch.distributed."""
        address = self.sock.getsockname()
        if self.sock.family == socket.AF_UNIX:
            return {"unix": address[1:].decode(), "secret": self.secret}
        return {"name": own_address() or socket.gethostname(), "port": address[1], "secret": self.secret}

    def close(self) -> None:
        """Closes the listening socket."""
        self.sock.close()


class _Connection:
    """A connection during its hand-shake."""

    def __init__(self, sock: socket.socket, talk: Callable[[socket.socket], Talk]) -> None:
        self.sock = sock
        self._start = talk
        self._talk: Talk | None = None
        self._needed = 0
        self._bytes = b""

    def advance(self) -> tuple[bool, int | None]:
        """Takes what has arrived; whether the hand-shake is over, and the rank at the other end.

        Raises:
            OSError: The connection is gone.
        """
        try:
            if self._talk is None:
                self._talk = self._start(self.sock)
                self._needed = next(self._talk)
            while True:
                if len(self._bytes) < self._needed:
                    piece = self.sock.recv(self._needed - len(self._bytes))
                    if not piece:
                        raise ConnectionResetError("the other end has closed the connection")
                    self._bytes += piece
                    continue
                taken, self._bytes = self._bytes, b""
                self._needed = self._talk.send(taken)
        except (BlockingIOError, InterruptedError):
            return False, None
        except StopIteration as stop:
            return True, stop.value


class Meeting:
    """Connects one rank with others, by default with all.

    Lower ranks listen, higher ranks call. One deadline holds for all of it.
    """

    def __init__(
        self,
        rank: int,
        cards: list[dict[str, Any]],
        listener: Listener,
        deadline: Deadline,
        peers: set[int] | None = None,
    ) -> None:
        self._rank = rank
        self._peers = set(range(len(cards))) - {rank} if peers is None else peers
        self._cards = cards
        self._listener = listener
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()
        self._guests: list[_Connection] = []  # oldest first
        self._calls: dict[_Connection, int] = {}
        self._to_call = sorted(peer for peer in self._peers if peer < rank)
        self._met: dict[int, socket.socket] = {}

    def run(self) -> dict[int, socket.socket]:
        """The connections, by rank.

        Raises:
            PeerTimeout: A rank did not connect, or did not answer, in time.
            PutgetError: A rank cannot be reached.
        """
        everyone = self._peers
        try:
            self._selector.register(self._listener.sock, selectors.EVENT_READ)
            while missing := everyone - self._met.keys():
                self._call_lower_ranks()
                if everyone == self._met.keys():  # the listeners were so quick that nothing is left to wait for
                    break
                left = self._deadline.left()
                self._deadline.warn_at_half(self._rank, "Communicator, connecting", lambda: map(str, sorted(missing)))
                if left <= 0:
                    raise PeerTimeout("setup", self._rank, 0, missing, self._deadline.timeout_s)
                for key, _ in self._selector.select(min(left, _TRY_AGAIN_S if self._to_call else _LOOK_AGAIN_S)):
                    if key.data is None:
                        self._take_guest()
                    elif key.data in self._calls:
                        self._advance_call(key.data)
                    elif key.data in self._guests:  # it may have had to make room in this very round
                        self._advance_guest(key.data)
            return self._met
        except BaseException:
            for sock in self._met.values():
                sock.close()
            raise
        finally:
            for connection in [*self._guests, *self._calls]:
                connection.sock.close()
            self._selector.close()

    # --- as the caller ------------------------------------------------------------------------------------------------

    def _call_lower_ranks(self) -> None:
        for peer in list(self._to_call):
            card = self._cards[peer]
            on_host = "unix" in card
            sock = socket.socket(socket.AF_UNIX if on_host else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                error = sock.connect_ex("\0" + card["unix"] if on_host else (card["name"], card["port"]))
            except OSError as failure:  # the name cannot be resolved
                sock.close()
                self._fail(peer, failure)
            if error == errno.EAGAIN:  # the listener's queue is full
                sock.close()
                return
            if error not in (0, errno.EINPROGRESS):
                sock.close()
                self._fail(peer, OSError(error, os.strerror(error)))
            self._to_call.remove(peer)
            call = _Connection(sock, functools.partial(self._call, peer))
            self._calls[call] = peer
            self._selector.register(sock, selectors.EVENT_READ, call)
            if on_host:
                self._advance_call(call)  # looks at the listener's user

    def _call(self, peer: int, sock: socket.socket) -> Talk:
        if not _same_user(sock):
            return None
        secret = self._cards[peer]["secret"]
        challenge = yield _CHALLENGE_BYTES
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        sock.send(_RANK.pack(self._rank) + own + _prove(secret, "caller", peer, self._rank, challenge))
        proof = yield _PROOF_BYTES
        return peer if hmac.compare_digest(proof, _prove(secret, "listener", peer, self._rank, own)) else None

    def _advance_call(self, call: _Connection) -> None:
        peer = self._calls[call]
        try:
            over, answered = call.advance()
        except OSError as error:
            self._fail(peer, error)
        if over:
            if answered is None:
                self._fail(peer, OSError("somebody else listens at its address"))
            del self._calls[call]
            self._keep(call, peer)

    def _fail(self, peer: int, error: OSError) -> NoReturn:
        raise PutgetError(f"rank {self._rank} cannot connect to rank {peer}: {error}") from error

    # --- as the listener ----------------------------------------------------------------------------------------------

    def _take_guest(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionAbortedError):
            sock, _ = self._listener.sock.accept()
            sock.setblocking(False)
            guest = _Connection(sock, self._receive)
            self._guests.append(guest)
            self._selector.register(sock, selectors.EVENT_READ, guest)
            self._advance_guest(guest)  # sends the challenge
            if len(self._guests) > len(self._cards) + _SPARE_GUESTS:
                self._turn_away(self._guests[0])

    def _receive(self, sock: socket.socket) -> Talk:
        if not _same_user(sock):
            return None
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        sock.send(challenge)
        hello = yield _RANK.size + _CHALLENGE_BYTES + _PROOF_BYTES
        (peer,) = _RANK.unpack_from(hello)
        theirs, proof = hello[_RANK.size : -_PROOF_BYTES], hello[-_PROOF_BYTES:]
        secret = self._listener.secret
        if not hmac.compare_digest(proof, _prove(secret, "caller", self._rank, peer, challenge)):
            return None
        sock.send(_prove(secret, "listener", self._rank, peer, theirs))
        return int(peer)

    def _advance_guest(self, guest: _Connection) -> None:
        try:
            over, peer = guest.advance()
        except OSError:
            over, peer = True, None
        if over and peer is not None and self._rank < peer and peer in self._peers - self._met.keys():
            self._guests.remove(guest)
            self._keep(guest, peer)
        elif over:
            self._turn_away(guest)

    def _turn_away(self, guest: _Connection) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.sock)
        guest.sock.close()

    def _keep(self, connection: _Connection, peer: int) -> None:
        self._selector.unregister(connection.sock)
        self._met[peer] = connection.sock
