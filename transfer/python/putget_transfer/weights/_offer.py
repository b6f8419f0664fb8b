"""Offers: where a rollout rank takes a version, for one trainer rank."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

_FIELDS = {
    "digest": str,
    "version": int,
    "rank": int,
    "address": str,
    "imm": int,
    "memory": list,
    "descs": list,
    "inbox": list,
}


def make_offer(
    digest: str,
    version: int,
    rank: int,
    address: bytes,
    imm: int,
    memory: Sequence[tuple[int, int]],
    descs: Sequence[bytes],
    inbox: Sequence[Any] = (),
) -> bytes:
    """Return an offer's bytes. Whoever has them may write to the memory: treat them as a secret.

    Args:
        digest: The schedule's.
        version: The version that is expected.
        rank: The rollout rank.
        address: How the trainer rank knows it.
        imm: The immediate that it counts.
        memory: For each memory of the schedule the descriptor, by its place, and the offset in it.
        descs: Descriptors, valid for this trainer rank alone.
        inbox: The version that the memory holds, the token of records, the descriptor by its place, and records (task,
            offset, length). Empty: no deltas.
    """
    fields = {
        "digest": digest,
        "version": version,
        "rank": rank,
        "address": base64.b64encode(address).decode(),
        "imm": imm,
        "memory": list(memory),
        "descs": [base64.b64encode(desc).decode() for desc in descs],
        "inbox": list(inbox),
    }
    return json.dumps(fields).encode()


def read_offer(offer: bytes) -> dict[str, Any]:
    """Read an offer.

    Raises:
        ValueError: For anything else.
    """
    try:
        found = json.loads(offer)
        if not all(type(found[name]) is kind for name, kind in _FIELDS.items()):
            raise TypeError("a field of another type")
        found["address"] = base64.b64decode(found["address"], validate=True)
        found["descs"] = [base64.b64decode(desc, validate=True) for desc in found["descs"]]
        found["memory"] = [(int(number), int(base)) for number, base in found["memory"]]
        if not all(0 <= number < len(found["descs"]) for number, _ in found["memory"]):
            raise ValueError("a descriptor that is not there")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"offers: {len(offer)} bytes came that are no offer: {error}") from error
    return dict(found)


class Delta:
    """The part of an offer about deltas: `base` is the version that the rollout rank holds."""

    def __init__(self, found: dict[str, Any], descs: Sequence[Any]) -> None:
        try:
            self.base, self.token, number, records = found["inbox"]
            self.desc, self.imm = descs[number], int(found["imm"])
            self.records = {int(task): (int(at), int(length)) for task, at, length in records}
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(f"offers: one came without a sound inbox: {error}") from error
