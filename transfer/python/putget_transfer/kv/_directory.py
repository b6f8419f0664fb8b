"""Members that are there: prefillers and decoders that join, drain, change roles and leave at any time.

One process holds a `Directory`. Members tell it over the engine's messages that they are there, again and again. Each
message has the whole entry, so a directory that has forgotten a member knows it again after one interval, and a member
that is lost is forgotten after the timeout. Nobody keeps a list of members, and nobody starts again. If the directory's
process ends, so does its address: members join a new one by another client.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
import logging
import math
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from putget_transfer._native import Engine, EngineClosed, EngineError, NetAddr

_LOG = logging.getLogger("putget_transfer.kv")
_BUFFERS = ((4 << 10, 64), (64 << 10, 16), (1 << 20, 2))
_MOST_BYTES = 1 << 20
_MOST_NAME = 256
_BEATS = 3
"""Messages of a member within one timeout: all but one may get lost."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One member, as the directory knows it.

    Attributes:
        name: Its name, which no other member has.
        role: What it does now, such as "prefill" or "decode".
        source: What decoders must know of a prefiller: `Prefiller.source()`. Any bytes for others.
        load: A number by which routers choose.
        draining: It takes no new requests.
        began_ns: When the member began: of two with one name the later one counts.
    """

    name: str
    role: str
    source: bytes
    load: float
    draining: bool
    began_ns: int

    def encode(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "source": base64.b64encode(self.source).decode()}

    @staticmethod
    def decode(found: Mapping[str, Any]) -> Entry:
        """Read and check what came.

        Raises:
            ValueError: It is not an entry.
        """
        kinds = {"name": str, "role": str, "source": str, "load": (int, float), "draining": bool, "began_ns": int}
        for name, kind in kinds.items():
            if not isinstance(found.get(name), kind):  # type: ignore[arg-type]
                raise ValueError(f"{name}: {found.get(name)!r} came")
        entry = Entry(**{**{name: found[name] for name in kinds}, "source": base64.b64decode(found["source"])})
        entry.check()
        return entry

    @staticmethod
    def _made(**values: Any) -> Entry:
        """Check and return an entry of a caller's values; the source may be any bytes, and the load any number.

        Raises:
            ValueError: A value is of another type, or as `check` says.
        """
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            values["load"] = float(values["load"])
        if isinstance(values["source"], (bytearray, memoryview)):
            values["source"] = bytes(values["source"])
        for name, kind in {"name": str, "role": str, "source": bytes, "load": float, "draining": bool}.items():
            if not isinstance(values[name], kind):
                raise ValueError(f"{name}: {values[name]!r:.80} came; {kind.__name__} is needed")
        entry = Entry(**values)
        entry.check()
        return entry

    def check(self) -> None:
        """Check lengths and the load.

        Raises:
            ValueError: A name or role is empty or too long, there are too many bytes, or the load is not finite.
        """
        if not math.isfinite(self.load):
            raise ValueError(f"load: {self.load} came; a finite number is needed")
        for name, text in (("name", self.name), ("role", self.role)):
            if not 1 <= len(text.encode()) <= _MOST_NAME:
                raise ValueError(f"{name}: {len(text.encode())} bytes came; 1 to {_MOST_NAME} are allowed")
        if len(self.source) > _MOST_BYTES // 2:
            raise ValueError(f"source: {len(self.source)} bytes came; at most {_MOST_BYTES // 2} are allowed")


def _receive(engine: Engine, hear: Any) -> int:
    """Receive JSON objects in a pool of their own; return its number."""
    pool = random.randrange(1 << 31, 1 << 32)

    def read(peer: NetAddr, data: bytes) -> None:
        try:
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError("it is no object")
            hear(peer, message)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            _LOG.warning("a message to a directory cannot be read: %s", error)

    for length, count in _BUFFERS:
        engine.submit_recvs(length, count, read, pool=pool)
    return pool


class Directory:
    """The process that knows who is there.

    Members may be lost and come back, so build its engine with `readmit("lost")`.
    """

    def __init__(self, engine: Engine, *, timeout_s: float = 5.0, max_members: int = 4096) -> None:
        """Begin to listen.

        Args:
            engine: The engine that carries messages.
            timeout_s: The silence after which a member is forgotten.
            max_members: More are refused.

        Raises:
            ValueError: A number is not greater than 0, or the timeout is longer than threads can wait.
        """
        if not 0 < timeout_s <= threading.TIMEOUT_MAX:
            most = f"at most {threading.TIMEOUT_MAX:g}"
            raise ValueError(f"timeout_s: {timeout_s} came; more than 0 s, {most}, are allowed")
        if not max_members > 0:
            raise ValueError(f"max_members: {max_members} came; more than 0 is needed")
        self._engine, self._timeout_s, self._max_members = engine, timeout_s, max_members
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[Entry, float, int]] = {}
        """Members, until when they are known, and how often each has changed its entry: messages have no order."""
        self._left: dict[str, tuple[int, float]] = {}
        """When members began that have left, and how long that is remembered: what they said before may come later."""
        self._pool = _receive(engine, self._hear)

    @property
    def address(self) -> bytes:
        """The facts that members must know."""
        address = base64.b64encode(self._engine.main_address().to_bytes()).decode()
        return json.dumps({"address": address, "pool": self._pool, "timeout_s": self._timeout_s}).encode()

    def entries(self, role: str | None = None) -> list[Entry]:
        """Return the members of a role, or all: those with the lowest load first, and those that drain last."""
        with self._lock:
            self._forget()
            found = [entry for entry, *_ in self._entries.values() if role in (None, entry.role)]
        return sorted(found, key=lambda entry: (entry.draining, entry.load, entry.name))

    def _forget(self) -> None:
        now = time.monotonic()
        for name in [name for name, (_, until, _) in self._entries.items() if until <= now]:
            _LOG.warning("%s was not heard of for %g s and is forgotten", name, self._timeout_s)
            del self._entries[name]
        for name in [name for name, (_, until) in self._left.items() if until <= now]:
            del self._left[name]

    def _hear(self, peer: NetAddr, message: dict[str, Any]) -> None:
        kind, pool, number = message["kind"], int(message["answers"]), message["number"]
        if kind == "list":
            found = self.entries(message["role"])
            for entry in found:
                self._answer(peer, pool, {"number": number, "of": len(found), "entry": entry.encode()})
            if not found:
                self._answer(peer, pool, {"number": number, "of": 0})
            return
        entry = Entry.decode(message["entry"])
        refusal = self._leave(entry) if kind == "leave" else self._enter(entry, int(message.get("changes", 0)))
        self._answer(peer, pool, {"number": number, "of": 0, "refusal": refusal})

    def _enter(self, entry: Entry, changes: int) -> str | None:
        """Take an entry, or return why not."""
        with self._lock:
            self._forget()
            if entry.began_ns <= self._left.get(entry.name, (-1, 0.0))[0]:
                return "it has left"
            before = self._entries.get(entry.name)
            if before is None and len(self._entries) >= self._max_members:
                return f"there are {self._max_members} members"
            if before is not None and before[0].began_ns > entry.began_ns:
                return f"another member has the name {entry.name!r}"
            if before is not None and (before[0].began_ns, before[2]) > (entry.began_ns, changes):
                entry, changes = before[0], before[2]
            self._entries[entry.name] = entry, time.monotonic() + self._timeout_s, changes
            return None

    def _leave(self, entry: Entry) -> str | None:
        with self._lock:
            before = self._entries.get(entry.name)
            if before is not None and before[0].began_ns > entry.began_ns:
                return None
            # It may be known under an earlier life, or not yet: what it said before it left may come later.
            self._entries.pop(entry.name, None)
            began_ns = max(entry.began_ns, self._left.pop(entry.name, (-1, 0.0))[0])
            if len(self._left) >= self._max_members:
                del self._left[next(iter(self._left))]
            self._left[entry.name] = began_ns, time.monotonic() + self._timeout_s
        return None

    def _answer(self, peer: NetAddr, pool: int, answer: dict[str, Any]) -> None:
        try:
            # Without `done` nobody is told: a member that misses an answer asks again.
            self._engine.submit_send(peer, json.dumps(answer).encode(), pool=pool, deadline_s=self._timeout_s)
        except EngineError as error:
            _LOG.warning("%s was not answered: %s", peer.peer, error)


class Member:
    """A place in a directory, as long as this lives."""

    def __init__(self, client: DirectoryClient, entry: Entry) -> None:
        """Keep a place; `DirectoryClient.join` makes one."""
        self._client, self.entry, self._changes = client, entry, 0
        self.refusal: str | None = None
        """Why the directory has struck this member out: another one has its name."""

    def update(
        self,
        *,
        role: str | None = None,
        source: bytes | None = None,
        load: float | None = None,
        draining: bool | None = None,
    ) -> None:
        """Change what the directory says of this member; None leaves a value alone.

        Raises:
            ValueError: As `DirectoryClient.join`.
        """
        values = {"role": role, "source": source, "load": load, "draining": draining}
        with self._client._changed:
            changed = Entry._made(
                **{**asdict(self.entry), **{name: new for name, new in values.items() if new is not None}}
            )
            self.entry, self._changes = changed, self._changes + 1
            fields = self.fields()
        self._client._say("here", changed, **fields)

    def fields(self) -> dict[str, Any]:
        """Return what the directory is told, by name."""
        return {"entry": self.entry.encode(), "changes": self._changes}

    def leave(self) -> None:
        """Leave the directory. If it cannot be told, it forgets this member after its timeout."""
        self._client._drop(self)

    def __enter__(self) -> Member:
        """Return this member."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self.leave()


class DirectoryClient:
    """A directory, as other processes see it: they join it, and ask it who is there."""

    def __init__(self, engine: Engine, directory: bytes) -> None:
        """Remember where a directory is.

        Args:
            engine: The engine that carries messages.
            directory: `Directory.address`.

        Raises:
            ValueError: It is not the address of a directory.
        """
        try:
            found = json.loads(directory)
            self._address = NetAddr.from_bytes(base64.b64decode(found["address"]))
            self._pool, self._timeout_s = int(found["pool"]), float(found["timeout_s"])
            if not 0 < self._timeout_s <= threading.TIMEOUT_MAX:
                raise ValueError(f"timeout_s: {self._timeout_s} came")
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"directory: {directory[:40]!r} came; an address of a directory is needed") from error
        self._engine = engine
        self._changed = threading.Condition()
        self._members: dict[str, Member] = {}
        self._answers: dict[int, list[dict[str, Any]]] = {}
        self._number = random.randrange(1 << 48)
        self._thread: threading.Thread | None = None
        self._lost = False
        """The directory was not reached by the last message of which that is known."""
        self._posts, self._newest = itertools.count(1), 0
        """Numbers of messages, and that last one's: what they have come to is told in any order."""
        self._own_pool = _receive(engine, self._hear)

    def join(self, name: str, role: str, *, source: bytes = b"", load: float = 0.0) -> Member:
        """Join the directory under a name. A member before it that had the name is struck out.

        Args:
            name: A name that no other member has.
            role: What this member does, such as "prefill" or "decode".
            source: What others must know: `Prefiller.source()`.
            load: A number by which routers choose.

        Raises:
            ValueError: The name or the role is empty or too long, the source is too long, or the directory refuses.
            TimeoutError: The directory does not answer within its timeout.
        """
        entry = Entry._made(name=name, role=role, source=source, load=load, draining=False, began_ns=time.time_ns())
        answers = self._ask("here", self._timeout_s, entry=entry.encode())
        if answers[0].get("refusal"):
            raise ValueError(f"name: {name!r} came; the directory refuses it: {answers[0]['refusal']}")
        member = Member(self, entry)
        with self._changed:
            self._members[name] = member
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="putget-kv-directory", daemon=True)
                self._thread.start()
        return member

    def entries(self, role: str | None = None, *, timeout_s: float | None = None) -> list[Entry]:
        """Ask the directory for the members of a role, or for all.

        Raises:
            TimeoutError: It does not answer in time; None: its own timeout.
        """
        answers = self._ask("list", self._timeout_s if timeout_s is None else timeout_s, role=role)
        found = [Entry.decode(answer["entry"]) for answer in answers if "entry" in answer]
        return sorted(found, key=lambda entry: (entry.draining, entry.load, entry.name))

    def _post(self, kind: str, number: int, **fields: Any) -> None:
        message = {"kind": kind, "answers": self._own_pool, "number": number, **fields}
        data = json.dumps(message).encode()
        done = functools.partial(self._note_sent, next(self._posts))
        self._engine.submit_send(self._address, data, pool=self._pool, deadline_s=self._timeout_s, done=done)

    def _note_sent(self, post: int, error: EngineError | None) -> None:
        """Log that the directory is not reached: once, until it is again."""
        if post < self._newest:
            return
        self._newest = post
        lost = error is not None and not isinstance(error, EngineClosed)
        if lost and not self._lost:
            _LOG.warning("the directory at %s is not reached, so it forgets its members: %s", self._address.peer, error)
        self._lost = lost

    def _ask(self, kind: str, timeout_s: float, **fields: Any) -> list[dict[str, Any]]:
        """Return the answers to a question, which is asked again while there is time."""
        end = time.monotonic() + timeout_s
        pause = timeout_s / _BEATS
        while time.monotonic() < end:
            with self._changed:
                self._number += 1
                number, answers = self._number, self._answers.setdefault(self._number, [])
            try:
                self._post(kind, number, **fields)
                with self._changed:
                    left = min(pause, end - time.monotonic())
                    self._changed.wait_for(lambda own=answers: own and len(own) >= own[0]["of"], left)  # type: ignore[misc]
                    if answers and len(answers) >= answers[0]["of"]:
                        return answers
            except EngineClosed:
                raise
            except EngineError as error:
                _LOG.warning("a directory was not asked: %s", error)
                time.sleep(min(pause, max(0.0, end - time.monotonic())))
            finally:
                with self._changed:
                    del self._answers[number]
        raise TimeoutError(f"the directory at {self._address.peer} has not answered for {timeout_s:g} s")

    def _hear(self, _: NetAddr, message: dict[str, Any]) -> None:
        number, of = int(message["number"]), int(message["of"])
        with self._changed:
            answers = self._answers.get(number)
            if answers is not None and len(answers) < max(of, 1):
                answers.append(message)
                self._changed.notify_all()
            for member in [member for member in self._members.values() if member.entry.began_ns == number]:
                if message.get("refusal"):
                    member.refusal = message["refusal"]
                    _LOG.warning("%s is no member any more: %s", member.entry.name, member.refusal)
                    del self._members[member.entry.name]

    def _say(self, kind: str, of: Entry, **fields: Any) -> None:
        """Say something of a member whose answer nobody waits for; the member's number is the entry's."""
        try:
            self._post(kind, of.began_ns, **fields)
        except EngineError as error:
            _LOG.warning("a directory was not told of %s: %s", of.name, error)

    def _drop(self, member: Member) -> None:
        with self._changed:
            if self._members.get(member.entry.name) is member:
                del self._members[member.entry.name]
            self._changed.notify_all()
        self._say("leave", member.entry, **member.fields())

    def _beat(self) -> None:
        """Say again and again that members are there, until there are none."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._members, self._timeout_s / _BEATS)
                told = [(member.entry, member.fields()) for member in self._members.values()]
                if not told:
                    self._thread = None
                    return
            for entry, fields in told:
                try:
                    self._post("here", entry.began_ns, **fields)
                except EngineClosed:
                    return
                except EngineError as error:
                    _LOG.warning("a directory was not told of %s: %s", entry.name, error)
