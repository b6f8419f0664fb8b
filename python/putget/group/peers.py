"""One connection to one other rank: bytes and descriptors on their way to becoming messages.

A message is a length, then JSON fields. Descriptors travel beside it where both ranks share a host.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from putget.errors import PutgetError
from putget.group.shield import shielded

_LENGTH = struct.Struct("!I")
_DESCRIPTOR = struct.Struct("i")
MAX_MESSAGE_BYTES = 1 << 20
MAX_DESCRIPTORS = 253  # of one message: what Linux lets travel together (SCM_MAX_FD)


def _receive(sock: socket.socket) -> tuple[bytes, list[int], bool]:
    """Bytes, the descriptors beside them, and whether this process had no room for some of these."""
    if sock.family != socket.AF_UNIX:
        return sock.recv(1 << 16), [], False
    # Not socket.recv_fds, which ignores its flags: programs that this process starts must not inherit a peer's memory.
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * _DESCRIPTOR.size)
    data, ancillary, flags, _ = sock.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _DESCRIPTOR.size
            descriptors += [descriptor for (descriptor,) in _DESCRIPTOR.iter_unpack(content[:whole])]
    return data, descriptors, bool(flags & socket.MSG_CTRUNC)


@dataclass
class Message:
    """One message of a peer: JSON fields and the descriptors that came with it (the receiver closes them).

    Attributes:
        lacking: Descriptors that were sent with it, and that this process had no room for.
    """

    fields: dict[str, Any]
    descriptors: list[int] = field(default_factory=list)
    lacking: int = 0

    def close(self) -> None:
        """Closes the descriptors that nobody has taken."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def __del__(self) -> None:
        self.close()


class Peer:
    """One connection. The handler of a signal never raises in the middle of a message.

    Attributes:
        alive: False once nothing more can come.
        inbox: Messages of collective attempts, in order.
        agreement: What else came, in order: the messages of ``putget.group.agreement``.
        last_heard: Where the peer was when it sent the last message of the inbox; empty before the first.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.alive = True
        self._can_send = True
        self.inbox: deque[Message] = deque()
        self.agreement: deque[dict[str, Any]] = deque()
        self.last_heard = ""
        self._lacks_room = False  # for descriptors of the message that is on its way
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def send(self, fields: dict[str, Any], descriptors: Iterable[int], timeout_s: float) -> bool:
        """A peer that is gone is not an error here: waiting for its answer will name it.

        Returns:
            False where nothing was sent, because too many descriptors of this user are on their way: Linux allows about
            as many as this process may open. There is room again once ranks have read.

        Raises:
            PutgetError: The message is longer than a peer would read, or a descriptor is closed.
        """
        passed = list(descriptors)
        return shielded(lambda: self._send(fields, passed, timeout_s))

    def _send(self, fields: dict[str, Any], passed: list[int], timeout_s: float) -> bool:
        if not self._can_send:
            return True
        body = json.dumps({**fields, "descriptors": len(passed)}).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise PutgetError(f"a message has {len(body)} bytes, allowed are {MAX_MESSAGE_BYTES}")
        self.sock.settimeout(max(timeout_s, 0.001))
        packet = _LENGTH.pack(len(body)) + body
        try:
            sent = socket.send_fds(self.sock, [packet], passed) if passed else 0
            self.sock.sendall(packet[sent:])
        except TimeoutError:
            self.alive = self._can_send = False  # it has not read for so long that its side is full
        except OSError as error:
            if passed and error.errno == errno.ETOOMANYREFS:
                return False
            if passed and error.errno == errno.EBADF:  # nothing was sent
                raise PutgetError(f"{len(passed)} file descriptors cannot be sent: {error.strerror}") from error
            self._can_send = False  # its earlier bytes may still be read
        return True

    def receive(self) -> bool:
        """Takes some of what has arrived, without waiting; False where there was nothing."""
        return shielded(self._receive)

    def _receive(self) -> bool:
        if not self.alive:
            return False
        self.sock.settimeout(0)
        try:
            data, descriptors, lacks_room = _receive(self.sock)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.alive = False
            return False
        self._descriptors.extend(descriptors)
        self._lacks_room = self._lacks_room or lacks_room
        if not data:
            self.alive = False
            return False
        self._bytes += data
        self._parse()
        return True

    def receive_all(self) -> None:
        """Takes all that has arrived, without waiting."""

        def receive() -> None:
            while self._receive():
                pass

        shielded(receive)

    def _parse(self) -> None:
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_MESSAGE_BYTES:
                self.alive = False
                return
            if len(self._bytes) < _LENGTH.size + length:
                return
            body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
            del self._bytes[: _LENGTH.size + length]
            fields = json.loads(body)
            sent = int(fields.pop("descriptors", 0))
            count = min(sent, len(self._descriptors))
            message = Message(fields, [self._descriptors.popleft() for _ in range(count)])
            if sent and self._lacks_room:
                message.lacking, self._lacks_room = sent - count, False
            if "step" in fields:
                self.inbox.append(message)
                self.last_heard = str(fields.get("at", ""))
            else:
                self.agreement.append(fields)
                message.close()

    def close(self) -> None:
        """Ends the connection, and closes what came and was not read."""
        self.alive = False
        self._can_send = False
        while self.inbox:
            self.inbox.popleft().close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self.sock.close()
