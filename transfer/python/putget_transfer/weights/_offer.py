"""Offers: where a rollout rank takes a version, for one trainer rank."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from putget_transfer._native import MrDesc

_FIELDS = {
    "digest": str,
    "version": int,
    "rank": int,
    "address": str,
    "imm": int,
    "memory": str,
    "descs": str,
    "inbox": list,
}
MOST_BYTES = 1 << 28
"""Descriptors of a rollout rank, for one trainer rank, have fewer bytes in all."""


ROW = struct.Struct("<IQ")


def pack_memory(places: Sequence[tuple[int, int]]) -> bytes:
    """Return, for each memory of a schedule, the number of its descriptor and the offset in it, as offers have them."""
    return b"".join(ROW.pack(number, base) for number, base in places)


def make_offer(
    digest: str,
    version: int,
    rank: int,
    address: bytes,
    imm: int,
    memory: bytes,
    descs: bytes,
    inbox: Sequence[Any] = (),
) -> bytes:
    """Return an offer's bytes. Whoever has them may write to the memory: treat them as a secret.

    Args:
        digest: The schedule's.
        version: The version that is expected.
        rank: The rollout rank.
        address: How the trainer rank knows it.
        imm: The immediate that it counts.
        memory: Where each memory of the schedule lies (`pack_memory`).
        descs: Descriptors, valid for this trainer rank alone (`descs_for`).
        inbox: The version that the memory holds, the token of records, the descriptor (`text`), and records (task,
            offset, length). Empty: no deltas.
    """
    fields = {"digest": digest, "version": version, "rank": rank, "imm": imm, "inbox": list(inbox)}
    # Descriptors of one rank differ in their keys alone.
    found = {"memory": text(zlib.compress(memory, 1)), "descs": text(zlib.compress(descs, 1))}
    return json.dumps({**fields, **found, "address": text(address)}).encode()


def text(data: bytes) -> str:
    """Return bytes as text."""
    return base64.b64encode(data).decode()


def _whole(packed: bytes) -> bytes:
    """Return what was compressed."""
    reader = zlib.decompressobj()
    whole = reader.decompress(packed, MOST_BYTES)
    if not reader.eof:
        raise ValueError("bytes that are cut off, or too many")
    return whole


def read_offer(offer: bytes) -> dict[str, Any]:
    """Read an offer.

    Raises:
        ValueError: For anything else.
    """
    if not isinstance(offer, (bytes, bytearray, str)):
        raise ValueError(f"offers: {type(offer).__name__} came; a list of what `Rollout.expect` has returned is needed")
    try:
        found = json.loads(offer)
        if not all(type(found[name]) is kind for name, kind in _FIELDS.items()):
            raise TypeError("a field of another type")
        for name in ("address", "memory", "descs"):
            found[name] = base64.b64decode(found[name], validate=True)
        found["memory"], found["descs"] = _whole(found["memory"]), _whole(found["descs"])
    except (ValueError, TypeError, KeyError, RecursionError, zlib.error) as error:
        raise ValueError(f"offers: {len(offer)} bytes came that are no offer: {error}") from error
    return dict(found)


class Delta:
    """The part of an offer about deltas: `base` is the version that the rollout rank holds."""

    def __init__(self, found: dict[str, Any]) -> None:
        try:
            self.base, self.token, desc, records = found["inbox"]
            self.desc, self.imm = MrDesc.from_bytes(base64.b64decode(desc, validate=True)), int(found["imm"])
            self.records = {task: (at, length) for task, at, length in records}
            words = [self.base, self.token, *(word for row in records for word in row)]
            if not all(type(word) is int and 0 <= word < 1 << 63 for word in words):
                raise ValueError("a word that is no count")
            if any(at + length > len(self.desc) for at, length in self.records.values()):
                raise ValueError("a record behind its memory")
        except (ValueError, TypeError) as error:
            raise ValueError(f"offers: one came without a sound inbox: {error}") from error
