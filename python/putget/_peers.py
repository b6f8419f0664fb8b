"""One connection to one other rank: bytes and descriptors on their way to becoming messages.

A message is a length, then JSON fields. Descriptors travel beside it where both ranks share a host.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from putget.errors import PutgetError

_LENGTH = struct.Struct("!I")
_DESCRIPTOR = struct.Struct("i")
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_DESCRIPTORS = 64  # of one message: as many as objects of a workspace share memory


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    if sock.family != socket.AF_UNIX:
        return sock.recv(1 << 16), []
    # Not socket.recv_fds, which ignores its flags: programs that this process starts must not inherit a peer's memory.
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _DESCRIPTOR.size)
    data, ancillary, _, _ = sock.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _DESCRIPTOR.size
            descriptors += [descriptor for (descriptor,) in _DESCRIPTOR.iter_unpack(content[:whole])]
    return data, descriptors


@dataclass
class Message:
    """One message of a peer: JSON fields and the descriptors that came with it (the receiver closes them)."""

    fields: dict[str, Any]
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class Peer:
    """One connection.

    Attributes:
        alive: False once nothing more can come.
        inbox: Steps of exchanges, in order.
        agreement: What else came, in order: the messages of ``putget._agreement``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.alive = True
        self._can_send = True
        self.inbox: deque[Message] = deque()
        self.agreement: deque[dict[str, Any]] = deque()
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def send(self, fields: dict[str, Any], descriptors: Iterable[int], timeout_s: float) -> None:
        """A peer that is gone is not an error here: waiting for its answer will name it.

        Raises:
            PutgetError: The message is longer than a peer would read.
        """
        if not self._can_send:
            return
        passed = list(descriptors)
        body = json.dumps({**fields, "descriptors": len(passed)}).encode()
        if len(body) > _MAX_MESSAGE_BYTES:
            raise PutgetError(f"a message has {len(body)} bytes, allowed are {_MAX_MESSAGE_BYTES}")
        self.sock.settimeout(max(timeout_s, 0.001))
        packet = _LENGTH.pack(len(body)) + body
        try:
            sent = socket.send_fds(self.sock, [packet], passed) if passed else 0
            self.sock.sendall(packet[sent:])
        except TimeoutError:
            self.alive = self._can_send = False  # it has not read for so long that its side is full
        except OSError:
            self._can_send = False  # what it sent before may still be read

    def receive(self) -> bool:
        """Takes some of what has arrived, without waiting; False where there was nothing."""
        if not self.alive:
            return False
        self.sock.settimeout(0)
        try:
            data, descriptors = _receive(self.sock)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.alive = False
            return False
        self._descriptors.extend(descriptors)
        if not data:
            self.alive = False
            return False
        self._bytes += data
        self._parse()
        return True

    def receive_all(self) -> None:
        """Takes all that has arrived, without waiting."""
        while self.receive():
            pass

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
