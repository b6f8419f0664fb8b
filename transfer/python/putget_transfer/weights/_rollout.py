"""The rollout ranks' side: a version lands, and comes into force as a whole."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from putget_transfer._native import CountMissed, Engine, EngineClosed, EngineError, MrHandle, NetAddr, Transfer
from putget_transfer.weights._delta import Unsound
from putget_transfer.weights._experts import ExpertSlots, Held
from putget_transfer.weights._inbox import Inbox
from putget_transfer.weights._model import Slot, Slots, UpdateFailed
from putget_transfer.weights._native import Schedule, descs_for
from putget_transfer.weights._offer import make_offer, pack_memory, text
from putget_transfer.weights._report import metrics_text

CONNECT_S = 1.0
"""How long a connection to a trainer rank may take; one that takes longer is waited for without watching it."""
NUM_IMMS = 16
"""Attempts take immediates in turn, so that a count of an old attempt is told apart."""
SMALL = 1 << 20
"""Bytes of memory below which a copy takes as long as its call, so that many are copied with one call."""
FENCE_S = 10.0
"""How long a fence may take before it counts as failed. The engine's own bounds are shorter."""


@dataclass
class _Attempt:
    """A version that is landing."""

    version: int
    imm: int
    senders: dict[int, NetAddr]
    arrival: Transfer | None
    unreached: list[int]
    fences: dict[int, Transfer | None] = field(default_factory=dict)
    failed: str = ""
    applied: bool = False


class Rollout:
    """A rollout rank.

    With `commit="swap"` a version lands in a second copy of the weights and moves over in `commit`: the model serves
    until then, and an update that fails leaves it whole. With `commit="paused"` it lands in the weights themselves: the
    engine stands still meanwhile, and if the update fails, the weights are torn until one is complete.
    """

    def __init__(
        self,
        engine: Engine,
        slots: Slots,
        schedule: Schedule,
        rank: int,
        *,
        commit: Literal["swap", "paused"] = "swap",
        move: Callable[[], None] | None = None,
        delta_bytes: int = 0,
        experts: ExpertSlots | None = None,
    ) -> None:
        """Register the memory that versions land in.

        Args:
            engine: The engine that receives.
            slots: This rank's slots, with their memory (`record`).
            schedule: The plan, the same on all ranks.
            rank: This rank, counted over all replicas.
            commit: Where versions land: "swap" or "paused".
            move: Brings a complete version from the memory of `slots` into the weights. With it, versions land in that
                memory, which is the caller's own second copy, or the weights themselves in part ("paused").
            delta_bytes: Memory for deltas. Where a task's delta does not fit into its share, the task comes whole.
            experts: Slots of experts that a balancer writes, too: `putget.experts.ExpertSlots`, the balancer's own. A
                version takes them in `expect` and gives them back in `commit` or when it fails; with "paused" a version
                that fails keeps them until one is complete. While it has them, no expert moves. A version is refused
                while experts move, and after they have moved since the slots were recorded.

        Raises:
            ValueError: Another word, less than 0 bytes, a rank that the schedule does not have, or memory that differs
                from the schedule's, which is named.
        """
        if commit not in ("swap", "paused"):
            raise ValueError(f"commit: {commit!r} came; 'swap' and 'paused' are allowed")
        if delta_bytes < 0:
            raise ValueError(f"delta_bytes: {delta_bytes} came; bytes from 0 on are allowed")
        _compared(slots, schedule, rank)
        self.engine, self.slots, self.schedule, self.rank = engine, slots, schedule, rank
        self.mode, self._own_move = commit, move
        self._held = Held(experts, rank, slots.moved)
        self.version = 0
        self._torn = self._closed = False
        self._attempt: _Attempt | None = None
        self._senders = schedule.senders(rank)
        self._count = schedule.count(rank)
        self._imms = engine.reserve_imms(f"putget_transfer.weights, rollout rank {rank}", None, NUM_IMMS)
        self._next = 0
        self._totals = {"updates": 0, "failed": 0, "fenced": 0, "bytes": 0, "deltas": 0}
        self._handles: list[MrHandle] = []
        self._places: list[tuple[int, int]] = []
        self._copies: list[Any] = []
        self._base: int | None = None
        """The version that the memory holds in which versions land."""
        self._inbox: Inbox | None = None
        self._inbox_handle: MrHandle | None = None
        self._register()
        self._memory = pack_memory(self._places)
        self._moves = Copies(slots)
        if delta_bytes and self.slots.tensors:
            self._inbox = Inbox(schedule, rank, delta_bytes, self.slots.tensors[0].device)
            self._inbox_handle = engine.reg_mr(self._inbox.bytes)[0]

    def _register(self) -> None:
        """Register the weights, or a second copy of them."""
        import torch

        if self.mode == "paused" or self._own_move is not None:
            self._handles = [self.engine.reg_mr(tensor)[0] for tensor in self.slots.tensors]
            self._places = [(number, 0) for number in range(len(self._handles))]
            return
        bases: dict[str, int] = {}
        for tensor in self.slots.tensors:
            device = str(tensor.device)
            self._places.append((list(bases).index(device) if device in bases else len(bases), bases.get(device, 0)))
            bases[device] = bases.get(device, 0) + -(-tensor.numel() // 64) * 64
        memory = []
        for device, num_bytes in bases.items():
            copy = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            memory.append(copy)
            self._handles.append(self.engine.reg_mr(copy)[0])
        for (number, base), tensor in zip(self._places, self.slots.tensors, strict=True):
            self._copies.append(memory[number][base : base + tensor.numel()])

    @property
    def state(self) -> Literal["whole", "filling", "torn"]:
        """Whether the weights are one version ("whole"), one is landing ("filling"), or they are mixed ("torn")."""
        if self._attempt is not None and not self._attempt.failed:
            return "filling"
        return "torn" if self._torn else "whole"

    @property
    def landing(self) -> int | None:
        """The version that is landing, or has landed and waits for `commit`; None without one."""
        return self._attempt.version if self._attempt is not None and not self._attempt.failed else None

    def expect(self, version: int, trainers: Mapping[int, bytes], deadline_s: float = 60.0) -> dict[int, bytes]:
        """Begin to expect a version: nothing of an earlier one lands from now on.

        Senders of an attempt that did not become complete are fenced first. They are let in again here, with keys of
        their own for the new version.

        Args:
            version: The version, larger than the one in force.
            trainers: `Trainer.address` by trainer rank; all that write to this rank.
            deadline_s: Time until the attempt fails.

        Returns:
            Offers, by trainer rank; none if the version is in force already.

        Raises:
            ValueError: An older version, or another one while one is landing; trainers that are missing; experts that
                are on their way, or have moved since the slots were recorded; this rank is closed.
            UpdateFailed: A sender of an attempt that failed could not be fenced: it might still write. It is named.
        """
        self._require_open("expect")
        version = operator.index(version)
        if version == self.version and self.state == "whole":
            return {}
        if version <= self.version:
            raise ValueError(f"version: {version} came; {self.version} is in force")
        if self.state == "filling" and self._attempt is not None:
            raise ValueError(f"version: {version} came while {self._attempt.version} is landing; `abort` ends that")
        missing = [rank for rank in self._senders if rank not in trainers]
        if missing:
            raise ValueError(f"trainers: {sorted(trainers)} came; {missing} write to rollout rank {self.rank} as well")
        self._settle()
        self._held.take(version)
        try:
            return self._begin(version, trainers, deadline_s)
        except BaseException:
            if self._attempt is None and not self._torn:
                self._held.give_back()
            raise

    def _begin(self, version: int, trainers: Mapping[int, bytes], deadline_s: float) -> dict[int, bytes]:
        """Let the senders in, and return their offers."""
        senders = {rank: NetAddr.from_bytes(trainers[rank]) for rank in self._senders}
        keys: dict[int, bytes] = {}
        for rank, address in senders.items():
            self.engine.admit(address)
            keys[rank] = descs_for(self.engine, self._handles, address)
        imm = self._imms.imm(self._next % NUM_IMMS)
        self._next += 1
        self.engine.reset_imm(imm)
        unreached = self._unreached(senders)
        watched = [address for rank, address in senders.items() if rank not in unreached]
        arrival = None
        if self._count:
            arrival = self.engine.expect_imm_count(imm, self._count, deadline_s=deadline_s, senders=watched)
        if self.mode == "paused":
            self._held.put_in_force(None)
        self._attempt = _Attempt(version, imm, senders, arrival, unreached)
        inboxes = self._inboxes(senders)
        # Bytes that land from now on may be a part of the version only.
        self._base = None
        own = self.engine.main_address().to_bytes()
        return {
            rank: make_offer(
                self.schedule.digest,
                version,
                self.rank,
                own,
                imm,
                self._memory,
                descs,
                inboxes.get(rank, ()),
            )
            for rank, descs in keys.items()
        }

    def _inboxes(self, senders: Mapping[int, NetAddr]) -> dict[int, list[Any]]:
        """Return what offers say about deltas, by trainer rank; nothing where a version has to come whole."""
        if self._inbox is None or self._inbox_handle is None:
            return {}
        # Also where none are offered: what is left of an attempt before must not count.
        token = self._inbox.begin()
        if self._base is None:
            return {}
        found = {}
        for rank, address in senders.items():
            desc = self.engine.desc_for(self._inbox_handle, address).to_bytes()
            found[rank] = [self._base, token, text(desc), self._inbox.records(rank)]
        return found

    def _unreached(self, senders: Mapping[int, NetAddr]) -> list[int]:
        """Connect to trainer ranks; return those without a connection, whose loss would not be noticed."""
        connecting = {
            rank: self.engine.add_peer_group([address], deadline_s=CONNECT_S) for rank, address in senders.items()
        }
        found = []
        for rank, (_, transfer) in connecting.items():
            try:
                transfer.wait(2 * CONNECT_S)
            except (EngineError, TimeoutError):
                found.append(rank)
        return found

    def ready(self, timeout_s: float = 0.0) -> bool:
        """Say whether the expected version is complete, after waiting for it for some time.

        Raises:
            ValueError: No version is expected.
            UpdateFailed: It will not become complete; `missing` has the trainer ranks from which nothing came.
        """
        attempt = self._attempt
        if attempt is None:
            raise ValueError("ready: no version is expected")
        if attempt.failed:
            raise UpdateFailed(attempt.failed)
        if attempt.arrival is None:
            return True
        try:
            attempt.arrival.wait(timeout_s)
        except TimeoutError:
            return False
        except CountMissed as error:
            lost = [
                rank for rank, to in attempt.senders.items() if to.peer in error.missing or rank in attempt.unreached
            ]
            blamed = [f"trainer rank {rank}" for rank in lost]
            text = f"version {attempt.version}, rollout rank {self.rank}: {error}; missing: {', '.join(blamed)}"
            self._fail(text)
            raise UpdateFailed(text, blamed) from error
        self._apply(attempt)
        return True

    def _apply(self, attempt: _Attempt) -> None:
        """Apply deltas, once, to the memory in which the rest has landed."""
        if self._inbox is None or attempt.applied:
            return
        try:
            self._totals["deltas"] += self._inbox.apply(self.slots, self._copies or self.slots.tensors)
        except Unsound as error:
            blamed = f"trainer rank {error.sender}"
            text = f"version {attempt.version}, rollout rank {self.rank}: a delta of {blamed}: {error}"
            self._fail(text)
            raise UpdateFailed(text, [blamed]) from error
        attempt.applied = True

    def abort(self, reason: str = "it was given up") -> None:
        """Give up the version that is landing: its senders are fenced."""
        if self._attempt is not None and not self._attempt.failed:
            self._fail(f"version {self._attempt.version}, rollout rank {self.rank}: {reason}")

    def close(self) -> None:
        """Give up the version that is landing, and the memory that versions land in. A second call has no effect.

        The engine stays open, and another `Rollout` may take its place. Slots of experts go back to the others that
        move them, also where the weights are torn: their tags say so.

        Raises:
            UpdateFailed: A sender of an attempt that failed could not be fenced: it might still write. It is named, and
                the memory stays registered; a second call tries again.
        """
        self._closed = True
        with suppress(EngineClosed):
            self.abort("it was closed")
        self._settle()
        handles = [*self._handles, *([] if self._inbox_handle is None else [self._inbox_handle])]
        # Each step has nothing to do the second time, where an interrupt came between two.
        self._handles, self._copies, self._inbox, self._inbox_handle = [], [], None, None
        with suppress(EngineClosed):
            self.engine.dereg_mrs(handles)
        self._imms.release()
        self._held.give_back()

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise ValueError(f"{call}: rollout rank {self.rank} is closed")

    def _fail(self, reason: str) -> None:
        """End an attempt. What its senders still send does not land once their fences are over."""
        attempt = self._attempt
        if attempt is None or attempt.failed:
            return
        # An interrupt may come at any time: `_settle` begins the fences that are missing here.
        attempt.fences = dict.fromkeys(attempt.senders)
        attempt.failed = reason
        self._torn = self._torn or self.mode == "paused"
        self._totals["failed"] += 1
        if not self._torn:  # torn slots are not given to a mover that would spread them
            self._held.give_back()
        if attempt.arrival is not None:
            attempt.arrival.cancel()
        for rank in attempt.senders:
            attempt.fences[rank] = self._fence(attempt.senders[rank])

    def _fence(self, peer: NetAddr) -> Transfer:
        self._totals["fenced"] += 1
        return self.engine.fence(peer)

    def _settle(self) -> None:
        """Wait until nothing of an attempt that failed can land."""
        attempt = self._attempt
        if attempt is None:
            return
        end = time.monotonic() + FENCE_S
        for rank, fence in list(attempt.fences.items()):
            try:
                # A fence that failed is tried again.
                fence = fence if fence is not None else self._fence(attempt.senders[rank])
                fence.wait(max(end - time.monotonic(), 0.0))
                attempt.fences.pop(rank)
            except EngineClosed:
                attempt.fences.pop(rank)  # nothing lands by an engine that is closed
            except (EngineError, TimeoutError) as error:
                attempt.fences[rank] = None
                name = f"trainer rank {rank}"
                text = f"rollout rank {self.rank}: {name} might still write version {attempt.version}: {error}"
                raise UpdateFailed(text, [name]) from error
        self._attempt = None

    def commit(self, version: int) -> None:
        """Bring a complete version into force, between two steps of the engine. A second call has no effect.

        Caches that were computed with the old weights are the caller's to drop.

        Raises:
            ValueError: The version is not the expected one, or not complete.
        """
        if version == self.version and self._attempt is None:
            return
        attempt = self._attempt
        if attempt is None or attempt.version != version or attempt.failed or not self.ready():
            now = "none" if attempt is None else f"{attempt.version}, {attempt.failed or 'landing'}"
            raise ValueError(f"version: {version} came; expected: {now}")
        move = self._own_move or (self._move if self.mode == "swap" else None)
        if move is not None:
            self._torn = True
            self._held.put_in_force(None)
            move()
        self._held.put_in_force(version)
        self._held.give_back()
        self._torn = False
        self.version = self._base = version
        self._attempt = None
        self._totals["updates"] += 1
        self._totals["bytes"] += self.schedule.received(self.rank)

    def _move(self) -> None:
        """Copy the slots of the second copy into the weights."""
        self._moves.copy(self._copies, self.slots.tensors)

    def metrics_text(self) -> str:
        """Return counts as text for Prometheus."""
        state = {name: int(self.state == name) for name in ("whole", "filling", "torn")}
        lines = [f'putget_weights_rollout_state{{state="{name}"}} {value}' for name, value in state.items()]
        lines.insert(0, "# TYPE putget_weights_rollout_state gauge")
        lines += ["# TYPE putget_weights_rollout_version gauge", f"putget_weights_rollout_version {self.version}"]
        return metrics_text("rollout", self._totals) + "\n".join(lines) + "\n"


class Copies:
    """Copies of slots from one list of memory to another: which memory slots fill is found once."""

    def __init__(self, slots: Slots) -> None:
        covered: dict[int, int] = {}
        for slot in slots:
            covered[slot.memory] = covered.get(slot.memory, 0) + _num_bytes(slot)
        whole = {number: length for number, (_, length) in enumerate(slots.memory) if covered.get(number) == length}
        self.small = [number for number, length in whole.items() if length < SMALL]
        self.large = [number for number, length in whole.items() if length >= SMALL]
        self.slots = [slot for slot in slots if slot.memory not in whole]

    def copy(self, sources: Sequence[Any], to: Sequence[Any]) -> None:
        """Copy slots in flat bytes; memory without a source (None) is left out."""
        import torch

        small, large = ([at for at in numbers if sources[at] is not None] for numbers in (self.small, self.large))
        if small:
            torch._foreach_copy_([to[at] for at in small], [sources[at] for at in small])
        for at in large:
            to[at].copy_(sources[at])
        for slot in self.slots:
            source, tensor = sources[slot.memory], to[slot.memory]
            if source is not None:
                _view(tensor, slot).copy_(_view(source, slot))


def _compared(slots: Slots, schedule: Schedule, rank: int) -> None:
    """Check that a rank's slots are those that the schedule was made from."""
    planned = schedule.memory(rank)
    pairs = zip(slots.memory, planned, strict=False)
    different = [f"{ours} here, {theirs} planned" for ours, theirs in pairs if ours != theirs]
    if different or not len(slots.memory) == len(slots.tensors) == len(planned):
        counts = f"{len(slots.tensors)} memories came; the schedule has {len(planned)} for rank {rank}"
        raise ValueError(f"slots: {different[0] if different else counts}")
    rows = schedule.slots(rank)
    if len(rows) != len(slots):
        raise ValueError(f"slots: {len(slots)} came; the schedule has {len(rows)} for rank {rank}")
    for slot, row in zip(slots, rows, strict=True):
        place = (slot.memory, slot.offset, list(slot.strides), slot.dtype, slot.recipe)
        if (slot.name, list(slot.start), list(slot.size), *place) != row:
            raise ValueError(f"slots: {slot} came; the schedule has {row} for rank {rank}")


def _item_bytes(slot: Slot) -> int:
    import torch

    return int(getattr(torch, slot.dtype).itemsize)


def _num_bytes(slot: Slot) -> int:
    num = _item_bytes(slot)
    for size in slot.size:
        num *= size
    return num


def _view(flat: Any, slot: Slot) -> Any:
    """Return a slot's bytes in flat memory, as a tensor of its shape and the bytes of an element."""
    item = _item_bytes(slot)
    return flat.as_strided((*slot.size, item), (*slot.strides, 1), flat.storage_offset() + slot.offset)
