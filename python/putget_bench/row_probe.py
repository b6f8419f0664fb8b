"""A round without its logic: the memory traffic and the flags that no dispatch and no combine can do without."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from putget import PutgetError, Workspace
from putget.tuning import Launch
from putget_bench import probe_library

WAYS = ("spread", "block", "counted")
_STATE_WORDS = 4  # and one for each rank


class RowProbe:
    """Puts rows into slots of a workspace that a table names, and gets rows from there. GPUs only, up to 32 ranks.

    A put and one of the others take turns on all ranks: each but ``send`` begins or ends with flags to every rank, as a
    round does. Collective to make. Nothing else may use the workspace.

    Args:
        workspace: All of its memory is used.

    Attributes:
        room: The own memory that slots lie in, as uint8.
    """

    def __init__(self, workspace: Workspace) -> None:
        size = workspace.comm.size
        self._workspace = workspace
        self._memory = probe_library.memory_of(workspace)
        flags = self.bytes_for(size, 0)
        memory = workspace.memory.peer_tensor(workspace.comm.rank)
        memory[:flags] = 0
        self.room = memory[flags:]
        self._state = torch.zeros(_STATE_WORDS + size, dtype=torch.int64, device=workspace.device)
        workspace.comm.synchronize(workspace.device)
        workspace.comm.compare("row probe", {"bytes": len(self.room)}, workspace.warmup_timeout_s)

    @staticmethod
    def bytes_for(comm_size: int, slot_bytes: int) -> int:
        """Bytes of a workspace whose room has so many bytes.

        Raises:
            ValueError: comm_size is out of range.
        """
        if not 1 <= comm_size <= probe_library.MAX_RANKS:
            raise ValueError(f"comm_size is {comm_size}, allowed are 1 to {probe_library.MAX_RANKS}")
        return int(probe_library.library().putget_probe_flag_bytes(comm_size)) + slot_bytes

    def put(self, slots: Tensor, rows: Tensor, launch: Launch, way: str = "spread", first_slot: int = 0) -> None:
        """Enqueues: puts rows, tells every rank, and waits until the rows of all ranks are there.

        Args:
            slots: [num_tokens, ep_size] int32, a slot in that rank's room, -1 for no row.
            rows: [num_tokens, row_bytes] uint8, row_bytes a multiple of 16.
            launch: All fields are used.
            way: "spread": warps share rows. "block": a CTA takes a token. "counted": likewise, and it counts the slots
                of each rank with atomics, from first_slot on.
            first_slot: Of this rank in every rank's room.

        Raises:
            ValueError: An argument is not allowed.
            BackendUnavailable: The memory is not on a GPU.
        """
        self._run(probe_library.WRITE, slots, rows, launch, way, first_slot=first_slot)

    def get(self, slots: Tensor, out: Tensor, launch: Launch, offset: int = 0) -> None:
        """Enqueues: tells every rank, waits for all, gets the rows and writes the sums of their 32-bit words.

        Args:
            slots: As for ``put``.
            out: [num_tokens, row_bytes] uint8.
            launch: All fields are used but splits.
            offset: Of slot 0 in the room, in bytes; a multiple of 16.

        Raises:
            ValueError: An argument is not allowed.
            BackendUnavailable: The memory is not on a GPU.
        """
        self._run(probe_library.READ, slots, out, launch, "spread", offset=offset)

    def send(
        self,
        slots: Tensor,
        num_rows: Tensor,
        out: Tensor,
        launch: Launch,
        offset: int,
        landing: int,
        slots_of_rank: int,
    ) -> None:
        """Enqueues: sends each rank's rows to it, waits for the own ones and writes the sums of their 32-bit words.

        They are sentinel rows: no eight bytes of them may have every bit set, and before the first call every bit
        from ``landing`` on must be set, as each call leaves it. Own rows are summed where they are.

        Args:
            slots: As for ``put``; those of rank r begin at ``r * slots_of_rank``.
            num_rows: [ep_size] int32: how many slots of each rank are in use here, counted from its first one.
            out: [num_tokens, row_bytes] uint8.
            launch: All fields are used but splits. ``senders`` CTAs send, the others sum; if none is left, all do both.
            offset: Of slot 0 in the room, in bytes; a multiple of 16.
            landing: Likewise, of the memory where rows come: as large as that of the slots.
            slots_of_rank: Slots for each rank.

        Raises:
            ValueError: An argument is not allowed.
            BackendUnavailable: The memory is not on a GPU.
        """
        size = self._workspace.comm.size
        if tuple(num_rows.shape) != (size,) or num_rows.dtype != torch.int32 or not num_rows.is_contiguous():
            raise ValueError(f"num_rows is {tuple(num_rows.shape)} {num_rows.dtype}, expected {(size,)} torch.int32")
        self._run(
            probe_library.SEND,
            slots,
            out,
            launch,
            "spread",
            offset=offset,
            first_slot=self._workspace.comm.rank * slots_of_rank,
            slots_of_rank=slots_of_rank,
            num_rows=num_rows.data_ptr(),
            landing=landing,
        )

    def check(self) -> None:
        """Waits for the device.

        Raises:
            PutgetError: A wait for another rank was given up.
        """
        given_up = int(self._state[2].item())
        if given_up:
            raise PutgetError(f"{given_up} waits of a probe of rows were given up")

    def _run(self, kind: int, slots: Tensor, rows: Tensor, launch: Launch, way: str, **fields: int) -> None:
        if way not in WAYS:
            raise ValueError(f"way is {way!r}, allowed are {WAYS}")
        if rows.dim() != 2 or rows.dtype != torch.uint8 or not rows.is_contiguous():
            raise ValueError(f"rows is {tuple(rows.shape)} {rows.dtype}, expected [num_tokens, row_bytes] torch.uint8")
        shape = (len(rows), self._workspace.comm.size)
        if tuple(slots.shape) != shape or slots.dtype != torch.int32 or not slots.is_contiguous():
            raise ValueError(f"slots is {tuple(slots.shape)} {slots.dtype}, expected {shape} torch.int32")
        args = probe_library.RowsArgs(
            kind=kind,
            slots_by=WAYS.index(way),
            slots=slots.data_ptr(),
            rows=rows.data_ptr(),
            out=rows.data_ptr(),
            state=self._state.data_ptr(),
            stream=probe_library.current_stream(self._workspace.device),
            num_tokens=len(rows),
            row_bytes=rows.shape[1],
            blocks=launch.blocks or 0,
            threads=launch.threads or 0,
            segment_bytes=launch.segment_bytes or 0,
            splits=launch.splits or 0,
            senders=launch.senders or 0,
            **fields,
        )
        probe_library.call("putget_probe_rows", ctypes.byref(self._memory), ctypes.byref(args))
