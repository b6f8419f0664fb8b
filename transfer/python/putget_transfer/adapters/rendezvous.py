"""Where trainers and the workers of an engine exchange plans and offers: a store of torch, which trainer rank 0 holds.

Engines return nothing to a client's calls, so what workers say goes this way. The store trusts its network, as the
engines' own control planes do: everybody who reaches it can read offers.
"""

from __future__ import annotations

import base64
import datetime
import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from putget_transfer.weights import Layout, Param, Shard, Slot, Slots, UpdateFailed

POLL_S = 0.02


class Rendezvous:
    """One trainer's session. Values are JSON; all waits have a deadline and name what is missing."""

    def __init__(self, store: Any) -> None:
        self.store = store

    @classmethod
    def open(cls, address: str, port: int, *, holds: bool, timeout_s: float) -> Rendezvous:
        """Hold the store at a port (0: any), or reach it.

        Raises:
            UpdateFailed: Nothing listens there in time.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            store = TCPStore(address, port, is_master=holds, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise UpdateFailed(f"rendezvous {address}:{port}: {error}", ["trainer rank 0"]) from error
        return cls(store)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.store.port)

    def of(self, session: str) -> Rendezvous:
        """Return a part of it, in which nothing has been said yet by another name."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return Rendezvous(PrefixStore(session, self.store))

    def _asked(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise UpdateFailed(f"rendezvous: the store does not answer: {error}", ["trainer rank 0"]) from error

    def put(self, key: str, value: Any) -> None:
        """Say something, once."""
        self._asked(self.store.set, key, zlib.compress(json.dumps(value).encode(), 1))

    def has(self, key: str) -> bool:
        """Say whether something has been said."""
        return bool(self._asked(self.store.check, [key]))

    def take(self, keys: Mapping[str, str], end: float, watch: Callable[[], None] = lambda: None) -> list[Any]:
        """Wait until all has been said; return it.

        Args:
            keys: Keys, and who says it.
            end: When (of `time.monotonic`) what is missing counts as failed.
            watch: Called while it waits; it raises to end that.

        Raises:
            UpdateFailed: The time is over; `missing` names who has said nothing.
        """
        found: dict[str, Any] = {}
        while True:
            for key in keys:
                if key not in found and self.has(key):
                    found[key] = json.loads(zlib.decompress(self._asked(self.store.get, key)))
            if len(found) == len(keys):
                return [found[key] for key in keys]
            watch()
            if time.monotonic() > end:
                missing = [name for key, name in keys.items() if key not in found]
                raise UpdateFailed(f"rendezvous: nothing came from {', '.join(missing)}", missing)
            time.sleep(POLL_S)

    def remove(self, keys: Iterable[str]) -> None:
        """Give the memory of an old version back."""
        for key in keys:
            self._asked(self.store.delete_key, key)


def workers(prefix: str, count: int, engine: str) -> dict[str, str]:
    """Return the keys under which all workers of an engine say something, for `take`."""
    return {f"{prefix}/{rank}": f"{engine} worker {rank}" for rank in range(count)}


def forget(rendezvous: Rendezvous, told: list[int], version: int, num_workers: int, engine: str) -> None:
    """Take what workers said for old versions out of the store, and note a new one.

    That of the version before stays: a trainer rank that writes nothing may still read it, and workers may still vote
    for one that failed.
    """
    for old in told[:-1]:
        for what in ("offers", "vote"):
            rendezvous.remove(workers(f"{what}/{old}", num_workers, engine))
    told.append(version)


def trainers(prefix: str, count: int) -> dict[str, str]:
    """Return the keys under which all trainer ranks say something, for `take`."""
    return {f"{prefix}/{rank}": f"trainer rank {rank}" for rank in range(count)}


def params_out(params: Iterable[Param]) -> dict[str, Any]:
    """Return parameters as JSON has them; those that lie alike share their layout."""
    layouts: dict[int, int] = {}
    kept: list[Any] = []
    rows = []
    for param in params:
        number = layouts.setdefault(id(param.layout), len(layouts))
        if number == len(kept):
            kept.append(asdict(param.layout))
        rows.append([param.name, param.shape, param.dtype, number])
    return {"layouts": kept, "params": rows}


def params_in(found: Mapping[str, Any]) -> list[Param]:
    """Read parameters."""
    layouts = []
    for layout in found["layouts"]:
        shards = tuple(Shard(tuple(one["start"]), tuple(one["size"]), tuple(one["ranks"])) for one in layout["shards"])
        layouts.append(Layout(shards, layout["group"], layout["gathers"]))
    return [Param(name, tuple(shape), dtype, layouts[number]) for name, shape, dtype, number in found["params"]]


def slots_out(slots: Slots) -> dict[str, Any]:
    """Return slots as JSON has them."""
    return {"slots": [list(vars(slot).values()) for slot in slots], "memory": slots.memory}


def slots_in(found: Mapping[str, Any]) -> Slots:
    """Read slots."""
    slots = [
        Slot(name, tuple(start), tuple(size), memory, offset, tuple(strides), dtype, recipe)
        for name, start, size, memory, offset, strides, dtype, recipe in found["slots"]
    ]
    return Slots(slots, [(name, num_bytes) for name, num_bytes in found["memory"]])


def bytes_out(value: bytes) -> str:
    """Return bytes as JSON has them."""
    return base64.b64encode(value).decode()


def bytes_in(value: str) -> bytes:
    """Read bytes."""
    return base64.b64decode(value, validate=True)


def planned_slots(
    rendezvous: Rendezvous, num_workers: int, end: float, watch: Callable[[], None], engine: str
) -> list[Slots]:
    """Return the slots of all workers, as the plan takes them.

    Raises:
        UpdateFailed: A worker has none, or has said nothing.
    """
    found = rendezvous.take(workers("slots", num_workers, engine), end, watch)
    failed = [one["failed"] for one in found if "failed" in one]
    if failed:
        raise UpdateFailed("; ".join(failed))
    return [slots_in(one) for one in found]
