"""Sockets between the ranks of one group: set-up, descriptors, and agreement among survivors.

Every pair of ranks has one connection: UNIX sockets in the abstract namespace where all ranks share a host (no file can
stay behind; descriptors can travel), TCP otherwise. Nothing here is on the path of a round.
"""

from __future__ import annotations

import hmac
import json
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from putget.errors import PeerTimeout, PutgetError

_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_DESCRIPTORS = 8
_SPARE_DESCRIPTORS = 64  # for shares on their way, and for the caller
_LOOK_AGAIN_S = 0.25  # between looks at what only time decides


@dataclass
class Message:
    """One message of a peer: JSON fields and the descriptors that came with it (the receiver closes them)."""

    fields: dict[str, Any]
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class _Peer:
    """One connection: bytes and descriptors on their way to becoming messages."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.alive = True  # nothing more can come once this is False
        self._can_send = True
        self.inbox: deque[Message] = deque()  # steps of exchanges, in order
        self.agreement: deque[dict[str, Any]] = deque()  # joins, confirmations and conflicts: outside of the steps
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def send(self, fields: dict[str, Any], descriptors: Iterable[int], timeout_s: float) -> None:
        """A peer that is gone is not an error here: waiting for its answer will name it."""
        if not self._can_send:
            return
        passed = list(descriptors)
        body = json.dumps({**fields, "descriptors": len(passed)}).encode()
        self.sock.settimeout(max(timeout_s, 0.001))
        packet = _LENGTH.pack(len(body)) + body
        try:
            sent = socket.send_fds(self.sock, [packet], passed) if passed else 0
            self.sock.sendall(packet[sent:])
        except TimeoutError:
            self.alive = self._can_send = False  # it has not read for so long that its side is full
        except OSError:
            self._can_send = False  # what it sent before may still be read

    def receive(self) -> None:
        """Takes what has arrived, without waiting."""
        self.sock.settimeout(0)
        try:
            if self.sock.family == socket.AF_UNIX:
                data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, _MAX_DESCRIPTORS)
            else:
                data, descriptors = self.sock.recv(1 << 16), []
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.alive = False
            return
        self._descriptors.extend(descriptors)
        if not data:
            self.alive = False
            return
        self._bytes += data
        self._parse()

    def _parse(self) -> None:
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > _MAX_MESSAGE_BYTES:
                self.alive = False
                return
            if len(self._bytes) < _LENGTH.size + length:
                return
            body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
            del self._bytes[: _LENGTH.size + length]
            fields = json.loads(body)
            count = min(int(fields.pop("descriptors", 0)), len(self._descriptors))
            message = Message(fields, [self._descriptors.popleft() for _ in range(count)])
            if "step" in fields:
                self.inbox.append(message)
            else:
                self.agreement.append(fields)
                message.close()

    def close(self) -> None:
        self.alive = False
        self._can_send = False
        while self.inbox:
            self.inbox.popleft().close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self.sock.close()


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


def host_identity() -> str:
    """Equal on two ranks exactly where they can reach each other's abstract UNIX sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class Listener:
    """Where the other ranks connect; exists only during set-up."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind("\0putget-" + secrets.token_hex(16))
        self._unix.listen(256)
        self._tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._tcp.bind(("", 0))
        self._tcp.listen(256)

    def card(self) -> dict[str, Any]:
        """What a peer needs to connect: exchanged once, over torch.distributed."""
        return {
            "host": host_identity(),
            "unix": self._unix.getsockname()[1:].decode(),
            "name": socket.gethostname(),
            "port": self._tcp.getsockname()[1],
            "token": self.token,
        }

    def accept(self, one_host: bool, timeout_s: float) -> socket.socket:
        sock = self._unix if one_host else self._tcp
        sock.settimeout(max(timeout_s, 0.001))
        return sock.accept()[0]

    def close(self) -> None:
        self._unix.close()
        self._tcp.close()


def _receive_exactly(sock: socket.socket, count: int, timeout_s: float) -> bytes:
    sock.settimeout(max(timeout_s, 0.001))
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise OSError("closed")
        data += piece
    return data


class Mesh:
    """All connections of one rank. Calls come from one thread at a time.

    Attributes:
        one_host: Whether all ranks share this host, so that descriptors can travel.
    """

    def __init__(self, rank: int, cards: list[dict[str, Any]]) -> None:
        self.rank = rank
        self.size = len(cards)
        self.one_host = len({card["host"] for card in cards}) == 1
        self._cards = cards
        self._peers: dict[int, _Peer] = {}
        self._sequence = 0
        self._nonce = 0  # of this rank's last join
        self._agreeing_since = 0.0
        self._joins: dict[int, dict[str, Any]] = {}
        self._confirms: dict[int, list[int]] = {}

    def connect(self, timeout_s: float) -> None:
        """Connects to every lower rank; succeeds without their help."""
        for peer in range(self.rank):
            card = self._cards[peer]
            family = socket.AF_UNIX if self.one_host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            try:
                sock.connect("\0" + card["unix"] if self.one_host else (card["name"], card["port"]))
                sock.sendall(card["token"].encode() + _LENGTH.pack(self.rank))
            except OSError as error:
                sock.close()
                raise PutgetError(f"rank {self.rank} cannot connect to rank {peer}: {error}") from error
            self._peers[peer] = _Peer(sock)

    def accept(self, listener: Listener, timeout_s: float) -> None:
        """Accepts every higher rank; a stranger without the token is turned away."""
        deadline = time.monotonic() + timeout_s
        expected = set(range(self.rank + 1, self.size))
        while expected:
            try:
                sock = listener.accept(self.one_host, deadline - time.monotonic())
            except OSError:
                raise PeerTimeout("setup", self.rank, 0, expected, timeout_s) from None
            try:
                hello = _receive_exactly(sock, len(listener.token) + _LENGTH.size, deadline - time.monotonic())
            except OSError:
                sock.close()
                continue
            (peer,) = _LENGTH.unpack(hello[-_LENGTH.size :])
            known = hmac.compare_digest(hello[: -_LENGTH.size], listener.token.encode())
            if not known or peer not in expected:
                sock.close()
                continue
            expected.remove(peer)
            self._peers[peer] = _Peer(sock)

    def exchange(
        self,
        what: str,
        fields: dict[str, Any],
        *,
        members: Iterable[int],
        timeout_s: float,
        phase: str = "setup",
        descriptors: dict[int, list[int]] | None = None,
    ) -> dict[int, Message]:
        """Every member sends fields (and descriptors, by receiver) to every other; returns what came, by rank.

        Raises:
            PeerTimeout: A member's message did not come in time, or its connection is gone.
            ValueError: A member refused (see ``refuse``), or is at another step than this rank.
        """
        self._sequence += 1
        self._take_stale()
        others = sorted(set(members) - {self.rank})
        for peer in others:
            passed = descriptors.get(peer, []) if descriptors else []
            self._peers[peer].send({**fields, "step": self._sequence, "what": what}, passed, timeout_s)

        found: dict[int, Message] = {}

        def look() -> bool:
            for peer in others:
                if peer in found:
                    continue
                self._drop_stale(self._peers[peer])
                inbox = self._peers[peer].inbox
                if inbox and inbox[0].fields["step"] == self._sequence:
                    found[peer] = inbox.popleft()
            return len(found) == len(others)

        self._wait(look, lambda: set(others) - found.keys(), timeout_s, phase)
        try:
            for peer, message in found.items():
                if "refused" in message.fields:
                    raise ValueError(f"rank {peer}: {message.fields['refused']}")
                if message.fields["what"] != what:
                    raise ValueError(f"rank {self.rank} is at {what!r}, rank {peer} at {message.fields['what']!r}")
        except ValueError:
            for message in found.values():
                message.close()
            raise
        return found

    def refuse(self, reason: str) -> None:
        """Takes the place of an exchange for a rank that found its own arguments wrong: the others hear why."""
        self._sequence += 1
        self._take_stale()
        for peer in self._peers.values():
            peer.send({"step": self._sequence, "what": "refusal", "refused": reason}, [], 1.0)

    def agree(self, members: list[int], epoch: int, timeout_s: float) -> int:
        """Agreement among survivors on who they are; returns the highest epoch among them.

        Two phases: everyone tells everyone whom it wants (join), then that it has heard exactly these joins (confirm).
        A rank that gives up takes its join back; one that is found too late makes the confirmations differ, so it
        cannot count.

        Raises:
            ValueError: A member wants other members.
            PeerTimeout: A member does not answer.
        """
        self._nonce += 1
        for peer in self._peers.values():
            peer.send({"join": self._nonce, "members": members, "epoch": epoch, "at": self._sequence}, [], timeout_s)
            if peer.alive:
                peer.receive()  # a join that was taken back in the meantime must not count
        others = [rank for rank in members if rank != self.rank]
        told: list[int] = []
        self._agreeing_since = time.monotonic()

        def look() -> bool:
            for peer in others:
                self._hear_agreement(peer)
            self._raise_conflict(members, others, timeout_s)
            if any(self._joins.get(peer, {}).get("members") != members for peer in others):
                return False
            heard = [self._nonce if rank == self.rank else int(self._joins[rank]["join"]) for rank in members]
            if heard != told:
                told[:] = heard
                for peer in others:
                    self._peers[peer].send({"confirm": heard}, [], timeout_s)
            return all(self._confirms.get(peer) == heard for peer in others)

        def missing() -> set[int]:
            return {peer for peer in others if peer not in self._joins or self._confirms.get(peer) != told}

        try:
            self._wait(look, missing, timeout_s, "set_active_ranks", epoch)
        except (ValueError, PeerTimeout):
            for peer in self._peers.values():
                peer.send({"left": self._nonce}, [], timeout_s)
            raise
        joins = [self._joins.pop(peer) for peer in others]
        self._sequence = max([self._sequence, *(int(join["at"]) for join in joins)]) + 1
        return max([epoch, *(int(join["epoch"]) for join in joins)])

    def _hear_agreement(self, peer: int) -> None:
        """Takes what a peer has said about the active ranks: its last join stands until it takes that back."""
        queue = self._peers[peer].agreement
        while queue:
            fields = queue.popleft()
            if "join" in fields:
                self._joins[peer] = {**fields, "heard": time.monotonic()}
            elif "left" in fields and self._joins.get(peer, {}).get("join") == fields["left"]:
                del self._joins[peer]
            elif "confirm" in fields:
                self._confirms[peer] = fields["confirm"]
            elif "conflict" in fields and fields["yours"] == self._nonce:
                raise ValueError(f"mask: {fields['conflict']}")

    def _raise_conflict(self, members: list[int], others: list[int], timeout_s: float) -> None:
        """A member that goes on wanting other members is a conflict; one that has only not yet given up is not."""
        patience_s = min(1.0, timeout_s / 4)
        for peer in others:
            join = self._joins.get(peer)
            if join is None or join["members"] == members or self.rank not in join["members"]:
                continue
            if time.monotonic() - max(join["heard"], self._agreeing_since) < patience_s:
                continue
            conflict = f"rank {peer} wants the active ranks {join['members']}, rank {self.rank} wants {members}"
            for other in others:
                known = self._joins.get(other, {}).get("join")
                self._peers[other].send({"conflict": conflict, "yours": known}, [], timeout_s)
            raise ValueError(f"mask: {conflict}")

    def close(self) -> None:
        """Closes every connection; peers notice."""
        for peer in self._peers.values():
            peer.close()

    def _drop_stale(self, peer: _Peer) -> None:
        """Forgets messages of steps that failed."""
        while peer.inbox and peer.inbox[0].fields["step"] < self._sequence:
            peer.inbox.popleft().close()

    def _take_stale(self) -> None:
        """Reads what has come since the last step, so that refusals that nobody waits for never fill a socket."""
        for peer in self._peers.values():
            if peer.alive:
                peer.receive()
            self._drop_stale(peer)

    def _wait(
        self,
        look: Callable[[], bool],
        missing: Callable[[], set[int]],
        timeout_s: float,
        phase: str,
        epoch: int = 0,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for peer in self._peers.values():
                if peer.alive:
                    selector.register(peer.sock, selectors.EVENT_READ, peer)
            while not look():
                gone = {rank for rank in missing() if not self._peers[rank].alive}
                if gone:
                    raise PeerTimeout(phase, self.rank, epoch, gone)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerTimeout(phase, self.rank, epoch, missing(), timeout_s)
                for key, _ in selector.select(min(left, _LOOK_AGAIN_S)):
                    key.data.receive()
                    if not key.data.alive:
                        selector.unregister(key.fileobj)
