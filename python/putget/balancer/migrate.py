"""Moves experts between ranks while rounds go on: into landing areas, and into slots when all ranks agree."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from putget import _abi, _abi_balancer
from putget._arguments import as_count, check_int, check_seconds, shown
from putget.balancer.gathering import LandingTables, LoadGathering
from putget.errors import PutgetError
from putget.experts.blobs import ExpertBlobs
from putget.experts.movers import MOST_SMS, require_one_domain
from putget.experts.slots import MOVES, ExpertSlots, Mover
from putget.group.communicator import Communicator, collective
from putget.memory.workspace import Workspace, current_stream, resolve_device

MOVERS = ("kernel", "thread")
_WORDS = 4  # bytes: parts of an expert are summed word by word


def check_mover(mover: str) -> None:
    """Raises ValueError unless something can put experts so."""
    if not isinstance(mover, str) or mover not in MOVERS:
        raise ValueError(f"mover is {shown(mover)}, allowed are {', '.join(MOVERS)}")


def check_most_bytes(most_bytes: int) -> None:
    """Raises ValueError unless a kernel can move up to so many bytes."""
    is_int = isinstance(most_bytes, int) and not isinstance(most_bytes, bool)
    if not is_int or not 16 <= most_bytes < 1 << 40 or most_bytes % 16:
        raise ValueError(f"most_bytes is {shown(most_bytes)}, allowed are multiples of 16 from 16 on")


@dataclass(frozen=True)
class Move:
    """An expert that a rank shall get.

    Attributes:
        layer: index of the layer's `ExpertBlobs`.
        src: rank that holds it.
        src_slot: slot there, which keeps its expert until the batch is taken.
        dst: rank that gets it.
        dst_slot: slot there.
    """

    layer: int
    src: int
    src_slot: int
    dst: int
    dst_slot: int


@dataclass(frozen=True)
class LandingProgress:
    """How far the orders of this rank are; host numbers, which kernels write.

    Attributes:
        batch: the last batch that kernels have seen.
        put: experts that this rank has put, in all.
        taken: experts that it has taken, in all.
        agreed: the last batch that `take` was called with, or that `step` found told by all ranks.
        written: tables that it has written, in all.
        gathered: the last window whose loads of all ranks are there; 0 without a `LoadGathering`.
    """

    batch: int
    put: int
    taken: int
    agreed: int
    written: int
    gathered: int


class Landing:
    """A landing area on each rank, for experts on their way. Construction is collective over the group.

    A rank that holds an expert puts its bytes into the landing area of the rank that shall have it, with a sum of them;
    that rank compares the sum. Bytes go into slots in `take`, which the caller runs when all ranks agree: what each
    rank has completely is in `landed`, which it tells the others by ``dispatch(..., stats=)``. All ranks of a round see
    the same numbers, so the least of them is the same batch everywhere. docs/protocol.md has the proofs.

    Tensors stay the caller's: nothing is registered. `move` and `take` only enqueue kernels on CUDA, and can be
    captured; kernels find the orders that `post` leaves in host memory when they run, and wait for nobody.

    Who puts is this rank's choice. With ``mover="thread"`` a thread of this object does, on CUDA by the copy engine.
    `move` tells it which cells are free, and finds what it has copied; no kernel waits for it. Graphs are captured
    while it has nothing to copy.

    Args:
        comm: the group; its ranks map each other's memory.
        layers: the experts of each layer. All ranks give the same sizes in the same order.
        cells: experts that the landing area of a rank has room for, 1 to 128.
        num_sms: SMs that `move` and `take` use, 1 to 1024; on CPU the calling thread runs them.
        mover: "kernel": `move` and `step` put experts; "thread": a thread does.
        device: where the tensors are.
        timeout_s: deadline of set-up, and of each stage of `set_active_ranks`, in seconds.
        tables: contiguous tensors on the device that batches change: see `post`.
        gathering: what ranks tell each other, for `step`; its first number is `landed` then.
        slots: what is in force in the slots, where an update of weights writes them, too; `layers` are its layers then.
            While an update has the slots, `post` returns False. While moves are under way, no update gets them.

    Raises:
        ValueError: An argument is wrong, here or on another rank; the group has several domains; a tensor's part of a
            slot is not a multiple of 4 bytes at a multiple of 4; ranks differ in sizes.
        BackendUnavailable, PeerTimeout, PutgetError: As `putget.Workspace`.
    """

    @collective
    def __init__(
        self,
        comm: Communicator,
        layers: Sequence[ExpertBlobs],
        *,
        cells: int = 2,
        num_sms: int = 8,
        mover: str = "kernel",
        device: str | torch.device = "cuda",
        timeout_s: float = 30.0,
        tables: Sequence[torch.Tensor] = (),
        gathering: LoadGathering | None = None,
        slots: ExpertSlots | None = None,
    ) -> None:
        try:
            require_one_domain(comm)
            self._device = resolve_device(device)
            self._layers = _checked_layers(layers, self._device)
            _check_slots(slots, self._layers)
            self._tables = LandingTables(tables, self._device)
            self._blob_bytes = max(blobs.slot_bytes for blobs in self._layers)
            cells = as_count("cells", cells, 1, _abi_balancer.MAX_CELLS)
            num_bytes = _abi.library().putget_landing_bytes(comm.size, cells, self._blob_bytes)
            if num_bytes == 0:
                raise ValueError(_abi.last_error())
            check_int("num_sms", num_sms, 1, MOST_SMS)
            check_mover(mover)
            check_seconds("timeout_s", timeout_s)
        except (ValueError, PutgetError) as error:
            comm.refuse(str(error))
            raise
        self._cells, self._num_sms, self._mover = cells, num_sms, mover
        sizes = [[blobs.num_slots, *(blob.num_bytes for blob in blobs.layout)] for blobs in self._layers]
        told = None if gathering is None else gathering.configuration()
        comm.compare(
            "Landing", {"cells": cells, "slots and bytes of each layer's tensors": sizes, "gathering": told}, timeout_s
        )
        self._comm = comm
        self._workspace = Workspace(comm, num_bytes, self._device, timeout_s=timeout_s, warmup_timeout_s=timeout_s)
        self._gathering = gathering
        self._slots, self._has_slots, self._moves = slots, False, False
        self._as_mover = Mover(MOVES)
        self._keeps_slots = self._is_closed = False
        own = torch.zeros(1, dtype=torch.int32, device=self._device) if gathering is None else gathering.landed
        self._landed: torch.Tensor = own
        self._native: ctypes.c_void_p | None = None
        self._settled = 0  # the batch that set_active_ranks found to be the last one taken here
        try:
            self._start()
        except BaseException:
            self._is_closed = True
            self._workspace.close()
            raise

    def _start(self) -> None:
        """A native object for what is posted from now on."""
        self._landed.zero_()
        gathering = None
        if self._gathering is not None:
            self._gathering.begin()
            gathering = self._gathering.native()
        self._comm.synchronize(self._device)
        self._first = self._workspace.memory.epoch()
        self._arrivals = [self._first] * self._comm.size
        self._batch = 0
        table, self._part_of = _parts_of(self._layers)
        config = _abi_balancer.LandingConfig(
            device=_abi.DEVICE_CUDA if self._device.type == "cuda" else _abi.DEVICE_CPU,
            cells=self._cells,
            num_parts=len(table),
            num_sms=self._num_sms,
            first=self._first,
            blob_bytes=self._blob_bytes,
            parts=ctypes.addressof(table),
            landed=self._landed.data_ptr(),
            tables=self._tables.entries.data_ptr() if len(self._tables) else None,
            gathering=None if gathering is None else ctypes.addressof(gathering),
            num_tables=len(self._tables),
            by_thread=self._mover == "thread",
        )
        native = ctypes.c_void_p()
        _abi.call("putget_landing_create", ctypes.byref(config), self._workspace.memory.handle, ctypes.byref(native))
        self._native = native

    @property
    def landed(self) -> torch.Tensor:
        """int32 [1] on the device: the last batch of which this rank has everything; `move` writes it."""
        return self._landed

    @property
    def batch(self) -> int:
        """The last batch that was posted here; 0 at the start, and after `set_active_ranks`."""
        return self._batch

    def post(self, moves: Sequence[Move], tables: Mapping[int, torch.Tensor] | None = None) -> bool:
        """Posts the next batch. All ranks post the same moves in the same order, each in its own time.

        Every slot that moves come from holds its expert on when the batch before has been taken; no slot gets two
        experts in one batch.

        Args:
            moves: of which this rank puts and takes its own. It may have none, and the batch counts all the same.
            tables: by number, what tables of this rank hold from the moment on when the batch is taken: tensors like
                them, on the CPU.

        Returns:
            False where kernels have not done enough of the batches before, or an update of weights has the slots:
            nothing has happened, post again later. A batch with tables waits until the one before has been taken.

        Raises:
            ValueError: A move names a layer, rank or slot that does not exist, stays on its rank, or two of them have
                one slot as their target; or the batch has more moves of this rank, or tables, than fit at once; or a
                table is of another form. Nothing has happened.
        """
        self._check_moves(moves)
        changed = dict(tables or {})
        if len(changed) > _abi_balancer.MAX_ORDERS:
            raise ValueError(f"a batch changes {len(changed)} tables, allowed are {_abi_balancer.MAX_ORDERS}")
        for index, words in changed.items():
            self._tables.check(index, words)
        if changed and self.progress().agreed != self._batch:
            return False
        if moves and self.hold_slots() is not None:
            return False
        for index, words in changed.items():
            self._tables.stage(index, words)
        arrivals = list(self._arrivals)
        puts: list[_abi_balancer.PutOrder] = []
        takes: list[_abi_balancer.TakeOrder] = []
        me = self._comm.rank
        for move in moves:
            arrivals[move.dst] = (arrivals[move.dst] + 1) % (1 << 32)
            first, end = self._part_of[move.layer]
            if move.src == me:
                puts.append(_abi_balancer.PutOrder(first, end, move.src_slot, move.dst, arrivals[move.dst]))
            if move.dst == me:
                takes.append(_abi_balancer.TakeOrder(first, end, move.dst_slot, move.src, arrivals[move.dst]))
        posted = ctypes.c_uint32()
        _abi.call(
            "putget_landing_post",
            self._require_open(),
            (_abi_balancer.PutOrder * len(puts))(*puts),
            len(puts),
            (_abi_balancer.TakeOrder * len(takes))(*takes),
            len(takes),
            (ctypes.c_uint32 * len(changed))(*changed),
            len(changed),
            ctypes.byref(posted),
        )
        if posted.value:
            self._arrivals = arrivals
            self._batch += 1
            self._moves = self._moves or bool(moves)
        return bool(posted.value)

    def hold_slots(self) -> str | None:
        """Takes the slots, until `progress` finds that no batch is under way.

        Returns:
            None: this object has them, or was made without `slots`. Otherwise the mover that has them.
        """
        if self._slots is None:
            return None
        other = self._slots.take(self._as_mover)
        self._has_slots = other is None
        return other

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Keeps slots that `hold_slots` has taken until the end, whatever `progress` finds: they get other experts.

        If a batch is under way at the end, they stay until it has been taken.
        """
        self._keeps_slots = self._moves = self._slots is not None and self._has_slots
        try:
            yield
        finally:
            self._keeps_slots = False
            self.release_slots()

    def release_slots(self) -> None:
        """Gives slots back that `hold_slots` has taken, if no batch is under way."""
        if self._native is None or self._found().agreed == self._batch:
            self._give_slots_back()

    def _give_slots_back(self) -> None:
        if self._slots is not None and self._has_slots:
            self._has_slots = False
            self._slots.give_back(self._as_mover, moved=self._moves)
            self._moves = False

    def _check_moves(self, moves: Sequence[Move]) -> None:
        targets = set()
        for index, move in enumerate(moves):
            if not 0 <= move.layer < len(self._layers):
                raise ValueError(f"moves[{index}].layer is {move.layer}, there are {len(self._layers)} layers")
            for name, rank in (("src", move.src), ("dst", move.dst)):
                if not 0 <= rank < self._comm.size or not self._workspace.active_ranks[rank]:
                    raise ValueError(f"moves[{index}].{name} is {rank}, which is no active rank")
            if move.src == move.dst:
                raise ValueError(f"moves[{index}] goes from rank {move.src} to itself: copy it there")
            num_slots = self._layers[move.layer].num_slots
            for name, slot in (("src_slot", move.src_slot), ("dst_slot", move.dst_slot)):
                if not 0 <= slot < num_slots:
                    raise ValueError(f"moves[{index}].{name} is {slot}, allowed are 0 to {num_slots - 1}")
            target = (move.layer, move.dst, move.dst_slot)
            if target in targets:
                raise ValueError(f"moves[{index}] goes to layer {target[0]}, rank {target[1]}, slot {target[2]} too")
            targets.add(target)
        me = self._comm.rank
        mine = max(sum(move.src == me for move in moves), sum(move.dst == me for move in moves))
        most = min(self._cells, _abi_balancer.MAX_ORDERS)
        arrivals = [sum(move.dst == rank for move in moves) for rank in range(self._comm.size)]
        if max(arrivals) > most or mine > _abi_balancer.MAX_ORDERS:
            raise ValueError(f"a batch brings {max(arrivals)} experts to one rank, cells has room for {most}")

    def move(self, most_bytes: int = 1 << 20) -> None:
        """Puts up to `most_bytes` of this rank's next experts, and looks at as many that have come; eight at most.

        On CUDA it enqueues one kernel on the current stream. With a thread it puts nothing, and tells other ranks of
        what the thread has copied.

        Args:
            most_bytes: a multiple of 16. Fewer disturb a step less, more move faster.

        Raises:
            ValueError: most_bytes is out of range, or the object is closed.
            PutgetError: What came differs from what was sent, or a copy of the thread failed; the batch is never taken,
                anywhere.
        """
        self.progress()
        check_most_bytes(most_bytes)
        _abi.call("putget_landing_move", self._require_open(), most_bytes, current_stream(self._device))

    def take(self, batch: torch.Tensor) -> None:
        """Takes what has come of batches up to `batch` into its slots.

        On CUDA it enqueues one kernel on the current stream. All ranks call it at the same point of their rounds, with
        the same number, and between the rounds of two iterations: then no rank uses a slot that changes.

        Args:
            batch: int32 [1] on the device: the least `landed` of all ranks, as the statistics of a round told it.

        Raises:
            ValueError: batch is no such tensor, or the object is closed.
        """
        wanted = isinstance(batch, torch.Tensor) and batch.dtype == torch.int32 and batch.numel() == 1
        if not wanted or batch.device != self._device:
            raise ValueError(f"batch is {batch!r}, expected a tensor of one int32 on {self._device}")
        _abi.call("putget_landing_take", self._require_open(), batch.data_ptr(), current_stream(self._device))

    def step(self, most_bytes: int = 0) -> None:
        """Ends an iteration: what `take` does, for the batch that all ranks have told, and the loads that they told.

        With `most_bytes` it does in the same kernel what `move` does.

        On CUDA it enqueues one kernel on the current stream. All ranks call it behind the same round. The `told` of the
        gathering has what the statistics of the iteration's rounds were, or zeros: then nothing is taken. Behind it,
        `told` is zeros, and `stats` is what the next iteration's rounds shall tell.

        Args:
            most_bytes: as for `move`; 0: nothing is moved.

        Raises:
            ValueError: There is no gathering, most_bytes is out of range, or the object is closed.
            PutgetError: As `move`.
        """
        if most_bytes != 0:
            check_most_bytes(most_bytes)
            self.progress()
        _abi.call("putget_landing_step", self._require_open(), most_bytes, current_stream(self._device))

    def planned(self, window: int) -> None:
        """Says that the host has done with the loads of a window. The next one begins when every host has.

        Raises:
            ValueError: The object is closed.
        """
        _abi.call("putget_landing_planned", self._require_open(), window)

    def write_table(self, index: int, words: torch.Tensor) -> None:
        """Writes a table now, in the current stream's order: while no batch is open, and between two rounds."""
        self._tables.check(index, words)
        self._tables.write(index, words)

    def progress(self) -> LandingProgress:
        """How far this rank is; does not wait for kernels. Gives the slots back when every batch has been taken.

        Raises:
            PutgetError: What came differs from what was sent, or a copy of the thread failed.
            ValueError: The object is closed.
        """
        found = self._found()
        if found.wrong:
            raise PutgetError(
                f"rank {self._comm.rank}: the bytes of arrival {found.wrong - 1} differ from those that were sent; "
                "no batch from this one on is taken on any rank"
            )
        if found.agreed == self._batch and not self._keeps_slots:
            self._give_slots_back()
        return LandingProgress(found.batch, found.put, found.taken, found.agreed, found.written, found.gathered)

    def _found(self) -> Any:
        found = _abi_balancer.LandingProgress()
        _abi.call("putget_landing_progress_of", self._require_open(), ctypes.byref(found))
        return found

    def set_active_ranks(self, mask: Sequence[bool]) -> int:
        """Goes on without some ranks; batches that are not taken are forgotten. Collective among the members.

        It follows the ``AllToAll.set_active_ranks`` of the same mask. A round that ended in a fault may have told some
        members a batch and others not. So the members first agree on the last batch that any of them has taken, and
        take it: each has it completely, since it has said so in that round.

        Args:
            mask: one bool for each rank of the group.

        Returns:
            The batch that all members have taken now; the next one that is posted is number 1 again.

        Raises:
            ValueError: The mask is of another form, or leaves out the own rank; nothing has happened.
            PeerTimeout: As ``AllToAll.set_active_ranks``: call it again without the ranks that are missing.
        """
        self._comm.require_own("Landing")
        if self._is_closed:
            raise ValueError("this Landing is closed")
        wanted = self._workspace.checked_mask(mask)
        members = [rank for rank, is_active in enumerate(wanted) if is_active]
        if self._native is not None:  # otherwise an attempt has failed behind the point where this rank took its batch
            self._comm.synchronize(self._device)
            self._settled = self.progress().agreed
        timeout_s = self._workspace.timeout_s
        said = self._comm.exchange_among("landing", self._settled, timeout_s, members=members, phase="set_active_ranks")
        agreed = max(int(batch) for batch in said.values())
        if self._native is not None:
            self.take(torch.tensor([agreed], dtype=torch.int32, device=self._device))
            self._comm.synchronize(self._device)
            self._settled = agreed
            self._destroy()
        self._workspace.set_active_ranks(wanted)
        self._start()
        return agreed

    def close(self) -> None:
        """Frees the object. Needs no peer. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._comm.synchronize(self._device)
        finally:
            self._destroy()
            self._give_slots_back()
            self._workspace.close()

    def _require_open(self) -> ctypes.c_void_p:
        self._comm.require_own("Landing")
        if self._native is None:
            if not self._is_closed:
                raise PutgetError("set_active_ranks has failed: call it again on the ranks that go on")
            raise ValueError("this Landing is closed")
        return self._native

    def _destroy(self) -> None:
        native, self._native = self._native, None
        if native is not None and self._comm.is_own:  # a forked child's copy ends with it
            _abi.library().putget_landing_destroy(native)

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and self._comm.is_own:
            warnings.warn("a Landing was dropped without close()", ResourceWarning, stacklevel=1, source=self)
            self._destroy()
            self._give_slots_back()


def _checked_layers(layers: Any, device: torch.device) -> list[ExpertBlobs]:
    """Raises ValueError unless they can travel."""
    found = list(layers)
    if not found or not all(isinstance(blobs, ExpertBlobs) for blobs in found):
        raise ValueError(f"layers is {layers!r}, expected one or more ExpertBlobs")
    for index, blobs in enumerate(found):
        if blobs.device != device:
            raise ValueError(f"layers[{index}] is on {blobs.device}, expected {device}")
        for blob, address in blobs.parts():
            if blob.num_bytes % _WORDS or address % _WORDS:
                raise ValueError(
                    f"layers[{index}]: {blob.name} has {blob.num_bytes} bytes a slot at address {address:#x}, "
                    f"expected multiples of {_WORDS}"
                )
    return found


def _check_slots(slots: ExpertSlots | None, layers: Sequence[ExpertBlobs]) -> None:
    if slots is None:
        return
    if not isinstance(slots, ExpertSlots):
        raise ValueError(f"slots is {shown(slots)}, expected an ExpertSlots")
    own = slots.layers
    if len(own) != len(layers) or any(one is not other for one, other in zip(own, layers, strict=True)):
        raise ValueError("layers are not those of slots: give slots.layers, whose tags travel with the experts")


def _parts_of(layers: Sequence[ExpertBlobs]) -> tuple[Any, list[tuple[int, int]]]:
    """All tensors of all layers, one after the other, and where each layer's begin and end."""
    parts: list[_abi_balancer.BlobPart] = []
    ranges: list[tuple[int, int]] = []
    for blobs in layers:
        first = len(parts)
        parts += [_abi_balancer.BlobPart(address, blob.num_bytes, blob.offset) for blob, address in blobs.parts()]
        ranges.append((first, len(parts)))
    return (_abi_balancer.BlobPart * len(parts))(*parts), ranges
