"""Received rows grouped by local expert, what a grouped GEMM takes, and the way back to the rows that combine gets."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from putget import _abi, _abi_moe
from putget._arguments import check_apart, check_int, check_tensor
from putget.core.geometry import OUTPUT_TYPES, Geometry
from putget.errors import ProtocolMisuse
from putget.memory.workspace import current_stream
from putget.payload import Payload

MAX_ALIGNMENT = 4096  # rows
# The size of putget_moe_networks_args.progress.
_PROGRESS_WORDS = 2
_PROGRESS_ROWS = 16


@dataclass(frozen=True)
class GroupSizes:
    """The purpose of a set of memory for expert-major rows."""

    device: torch.device
    ep_size: int
    ep_rank: int
    num_experts: int
    num_local_experts: int
    top_k: int
    max_rows: int
    alignment: int
    payloads: tuple[Payload, ...]

    def config(self) -> _abi_moe.MoeConfig:
        """The same for the C ABI."""
        row_bytes = [payload.row_bytes for payload in self.payloads]
        return _abi_moe.MoeConfig(
            device=_abi.DEVICE_CUDA if self.device.type == "cuda" else _abi.DEVICE_CPU,
            ordinal=self.device.index or 0,
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
            num_experts=self.num_experts,
            num_local_experts=self.num_local_experts,
            top_k=self.top_k,
            max_rows=self.max_rows,
            alignment=self.alignment,
            num_payloads=len(row_bytes),
            row_bytes=(ctypes.c_uint32 * _abi.MAX_PAYLOADS)(*row_bytes),
        )


@dataclass(frozen=True)
class FlatRows:
    """The received rows as contiguous tensors, what engines feed to their kernels.

    Row index = slot * ep_size + source rank.

    Attributes:
        payloads: Each [max_rows * ep_size, *shape].
        topk_ids: [max_rows * ep_size, top_k] int32.
        topk_weights: [max_rows * ep_size, top_k] float32.
    """

    payloads: tuple[torch.Tensor, ...]
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


class ExpertMajorMemory:
    """Memory for one round's expert-major rows. Made by ``AllToAll.expert_major_memory``.

    Objects of equal sizes (layers of a model) may share one, one round after the other.

    Attributes:
        num_bytes: On the device.
        alignment: Groups begin at multiples of this many rows.
        max_rows: Slots of each source rank that it is made for.
        capacity: Rows that there is room for.
    """

    def __init__(self, sizes: GroupSizes) -> None:
        self.alignment = sizes.alignment
        self.max_rows = sizes.max_rows
        self._sizes = sizes
        self._config = sizes.config()
        layout = _abi_moe.MoeLayout()
        _abi.call("putget_moe_layout_of", ctypes.byref(self._config), ctypes.byref(layout))
        self.num_bytes = int(layout.total_bytes)
        self._memory = memory = torch.zeros(int(layout.total_bytes), dtype=torch.uint8, device=sizes.device)
        rows = self.capacity = int(layout.capacity)
        experts = sizes.num_local_experts

        def view(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            count = torch.Size(shape).numel()
            return memory[offset : offset + count * dtype.itemsize].view(dtype).view(shape)

        self._payloads = tuple(
            view(layout.payload[index], (rows, *payload.shape), payload.dtype)
            for index, payload in enumerate(sizes.payloads)
        )
        self._offsets = view(layout.offsets, (experts + 1,), torch.int32)
        self._num_rows = view(layout.num_rows, (experts,), torch.int32)
        self._weights = view(layout.weights, (rows,), torch.float32)
        self._source_rows = view(layout.source_rows, (rows,), torch.int32).fill_(-1)
        received = (sizes.max_rows * sizes.ep_size, sizes.top_k)
        self._positions = view(layout.positions, received, torch.int32).fill_(-1)
        words = _PROGRESS_WORDS + experts + rows // _PROGRESS_ROWS
        self.num_bytes += 4 * words
        self._progress = torch.zeros(words, dtype=torch.int32, device=sizes.device)
        if sizes.device.type == "cuda":
            torch.cuda.current_stream(sizes.device).synchronize()  # rounds may use it from any stream
        self._used_for: tuple[object, int] | None = None  # the Grouper and its round


@dataclass(frozen=True, eq=False)
class ExpertMajor:
    """Received rows grouped by local expert, in the order (expert, source rank, token). Valid until the round ends.

    The local index of an expert is its place among this rank's experts, by id. A token that names an expert twice has
    two rows. All numbers are on the device; the host knows none of them.

    Attributes:
        payloads: Each [capacity, *shape]; empty with ``copy_rows=False``. Rows of padding are left alone: they hold
            zeros or rows of earlier rounds.
        offsets: [num_local_experts + 1] int32: the row at which each group begins, a multiple of ``alignment``; the
            last is the end. ``offsets[1:]`` is what ``torch._grouped_mm`` takes.
        num_rows: [num_local_experts] int32: rows of each group, without padding.
        weights: [capacity] float32: the router's weight of each row; 0 in padding and behind the end.
        source_rows: [capacity] int32: the row in ``Received.flat``, slot * ep_size + source rank; -1 likewise.
        positions: [max_rows * ep_size, top_k] int32: where a received row's k-th choice is; -1 where that expert is
            not local, and in empty slots.
        capacity: Rows that there is room for: every received row with all of its experts here, and padding.
        alignment: In rows.
    """

    payloads: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    num_rows: torch.Tensor
    weights: torch.Tensor
    source_rows: torch.Tensor
    positions: torch.Tensor
    capacity: int
    alignment: int
    _memory: ExpertMajorMemory = field(repr=False)
    _grouper: Grouper = field(repr=False)
    _round: int = field(repr=False)

    @property
    def num_local_experts(self) -> int:
        """Groups."""
        return int(self.num_rows.shape[0])

    @property
    def progress(self) -> torch.Tensor:
        """Zeros in which the CTAs of one kernel over these rows tell each other how far they are; it leaves zeros.

        [2 + num_local_experts + capacity / 16] int32.
        """
        return self._memory._progress


class Grouper:
    """Groups what one AllToAll receives, and sums what experts made of it. Arguments of calls come checked.

    Args:
        geometry: Of the AllToAll.
        ep_rank: This rank.
        expert_to_rank: [num_experts] int32 on the device, read at every round.
        num_tokens: [ep_size] int32 on the device, of the last dispatch.
    """

    def __init__(
        self, geometry: Geometry, ep_rank: int, expert_to_rank: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        self._geometry = geometry
        self._ep_rank = ep_rank
        self._device = device = expert_to_rank.device
        self._expert_to_rank = expert_to_rank
        self._num_tokens = num_tokens
        self.num_local_experts = int((expert_to_rank == ep_rank).sum())
        self.lost_rows = torch.zeros(1, dtype=torch.int64, device=device)
        self.stray_rows = torch.zeros(geometry.ep_size, dtype=torch.int64, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # kernels may use it from any stream
        self._sets: dict[tuple[int, int, bool], ExpertMajorMemory] = {}
        self._group_args = _abi_moe.MoeGroupArgs(
            num_tokens=num_tokens.data_ptr(),
            expert_to_rank=expert_to_rank.data_ptr(),
            lost_rows=self.lost_rows.data_ptr(),
            stray_rows=self.stray_rows.data_ptr(),
        )
        self._finalize_args = _abi_moe.MoeFinalizeArgs()
        self._flat: FlatRows | None = None
        self._combine_input: torch.Tensor | None = None
        self._round = 0
        self._is_open = False

    def begin(self) -> int:
        """A dispatch has delivered rows; which one of this object."""
        self._round += 1
        self._is_open = True
        return self._round

    def end(self) -> None:
        """The round is over, or about to be."""
        self._is_open = False

    def refuse_rows(self, max_rows: int, open_max_rows: int, number: int | None) -> str | None:
        """Why rows of the object's n-th dispatch, if that is known, cannot be grouped now, or None."""
        if not self._is_open:
            return "expert_major: the round of these rows has ended"
        if max_rows != open_max_rows:
            return (
                f"expert_major: these rows are of a dispatch with max_rows {max_rows}, the open one has {open_max_rows}"
            )
        if number not in (None, self._round):
            return (
                f"expert_major: these rows are of dispatch {number} of this object, open is dispatch {self._round}: "
                "take what the last dispatch returned"
            )
        return None

    def raise_lost(self) -> None:
        """For ``check``, when the device has been waited for.

        Raises:
            ProtocolMisuse: Rows had no group.
        """
        count = int(self.lost_rows.item())
        if count:
            self.lost_rows.zero_()
            raise ProtocolMisuse(
                f"expert_major: {count} rows were left out, because expert_to_rank gives rank {self._ep_rank} more "
                f"than the {self.num_local_experts} experts that it had at construction"
            )
        strays = {source: rows for source, rows in enumerate(self.stray_rows.tolist()) if rows}
        if strays:
            self.stray_rows.zero_()
            sources = ", ".join(f"{rows} from rank {source}" for source, rows in strays.items())
            raise ProtocolMisuse(
                f"expert_major: {sum(strays.values())} rows have no expert on rank {self._ep_rank} by the table here "
                f"({sources}) and were lost: their source has another expert_to_rank"
            )

    def sizes(self, alignment: int, max_rows: int, copy_rows: bool = True) -> GroupSizes:
        """Raises ValueError where an argument is out of range."""
        geometry = self._geometry
        check_int("alignment", alignment, 1, MAX_ALIGNMENT)
        if not isinstance(copy_rows, bool):
            raise ValueError(f"copy_rows is {copy_rows!r}, expected a bool")
        check_int("max_rows", max_rows, 1, geometry.max_tokens_per_rank)
        return GroupSizes(
            self._device,
            geometry.ep_size,
            self._ep_rank,
            geometry.num_experts,
            self.num_local_experts,
            geometry.top_k,
            max_rows,
            alignment,
            geometry.payloads if copy_rows else (),
        )

    def memory_for(
        self, alignment: int, max_rows: int, given: ExpertMajorMemory | None, copy_rows: bool = True
    ) -> ExpertMajorMemory:
        """The given set, checked, or the own one for these sizes.

        Raises:
            ValueError: The given set is made for other sizes.
            ProtocolMisuse: There is none yet, and none can be allocated while a CUDA graph is captured.
        """
        own = self._sets.get((alignment, max_rows, copy_rows)) if given is None else None
        if own is not None:
            return own
        sizes = self.sizes(alignment, max_rows, copy_rows)
        if given is not None:
            if not isinstance(given, ExpertMajorMemory):
                raise ValueError(f"memory is a {type(given).__name__}, expected what expert_major_memory makes")
            if given._sizes.payloads:  # room for them need not be used
                sizes = self.sizes(alignment, max_rows)
            for name in GroupSizes.__dataclass_fields__:
                came, expected = getattr(given._sizes, name), getattr(sizes, name)
                if came != expected:
                    raise ValueError(f"memory is made for {name} {came!r}, expected {expected!r}")
            return given
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ProtocolMisuse(
                f"expert_major: nothing is allocated for alignment {alignment} and max_rows {max_rows} yet, and a CUDA "
                "graph is being captured: run the same call once before, or pass memory=a2a.expert_major_memory(...)"
            )
        made = self._sets[alignment, max_rows, copy_rows] = ExpertMajorMemory(sizes)
        return made

    def group(
        self,
        flat: FlatRows,
        combine_input: torch.Tensor,
        memory: ExpertMajorMemory,
        *,
        copy_rows: bool = True,
        expected_rows: int = 0,
    ) -> ExpertMajor:
        """Groups received rows into `memory`; `combine_input` is flat.

        About expected_rows came; 0: nobody knows.
        """
        self._flat, self._combine_input = flat, combine_input
        self._point(memory)
        self._group_args.leave_rows = not copy_rows
        self._group_args.expected_rows = expected_rows
        _abi.call("putget_moe_group", ctypes.byref(memory._config), ctypes.byref(self._group_args))
        memory._used_for = (self, self._round)
        return ExpertMajor(
            memory._payloads if copy_rows else (),
            memory._offsets,
            memory._num_rows,
            memory._weights,
            memory._source_rows,
            memory._positions,
            memory.capacity,
            memory.alignment,
            memory,
            self,
            self._round,
        )

    def check_layout(self, layout: Any) -> ExpertMajor:
        """An ExpertMajor of this object's open round.

        Raises:
            ValueError: It is none, or another object's.
            ProtocolMisuse: It is of another round.
        """
        if not isinstance(layout, ExpertMajor):
            raise ValueError(f"layout is a {type(layout).__name__}, expected what received.expert_major() returns")
        if layout._grouper is not self:
            raise ValueError("layout comes from another AllToAll: pass what this object's received.expert_major() made")
        if not self._is_open or layout._round != self._round:
            raise ProtocolMisuse(
                f"layout is of dispatch {layout._round} of this object, "
                + (f"open is dispatch {self._round}" if self._is_open else f"dispatch {self._round} has ended")
                + ": call received.expert_major() after each dispatch"
            )
        if layout._memory._used_for != (self, self._round):
            raise ProtocolMisuse("layout: its memory has been used for other rows since")
        return layout

    def check_rows(self, rows: Any, layout: ExpertMajor, name: str, *, into_combine_input: bool = True) -> None:
        """Raises ValueError unless they are [capacity, *shape] as experts write them in this layout."""
        output = self._geometry.output
        check_tensor(name, rows, (layout.capacity, *output.shape), (output.dtype,), self._device)
        if into_combine_input and self._combine_input is not None:
            check_apart("combine_input", self._combine_input, name, rows)

    def finalize(self, rows: torch.Tensor, layout: ExpertMajor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The weighted sums of the layout's rows, into flat `out` or combine_input."""
        if out is None:
            out = self._combine_input
        assert out is not None
        output = self._geometry.output
        self._point(layout._memory)
        args = self._finalize_args
        args.rows = rows.data_ptr()
        args.out = out.data_ptr()
        args.elements = output.row_bytes // output.dtype.itemsize
        args.element_type = OUTPUT_TYPES[output.dtype]
        _abi.call(
            "putget_moe_finalize",
            ctypes.byref(layout._memory._config),
            ctypes.byref(self._group_args),
            ctypes.byref(args),
        )
        return out

    def _point(self, memory: ExpertMajorMemory) -> None:
        assert self._flat is not None
        args = self._group_args
        args.memory = memory._memory.data_ptr()
        args.topk_ids = self._flat.topk_ids.data_ptr()
        args.topk_weights = self._flat.topk_weights.data_ptr()
        for index, payload in enumerate(self._flat.payloads):
            args.payload[index] = payload.data_ptr()
        args.stream = current_stream(self._device)

    def close(self) -> None:
        """Nothing of the workspace is used any more."""
        self.end()
        self._sets.clear()
        self._flat = None
        self._combine_input = None
