"""One rank's native all-to-all object: its tables on the device, and its calls."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from typing import Any

import torch

from putget import _abi, _fork
from putget._log import logger
from putget.core.domain_rounds import DomainRounds
from putget.core.geometry import Beside, Geometry
from putget.core.overlap import Span, extent
from putget.errors import PeerTimeout, PutgetError
from putget.memory.signals import take_raised
from putget.memory.workspace import Workspace, current_stream

_CALLS = ("putget_dispatch", "putget_combine", "putget_release")
_NONE_BESIDE: list[int | None] = [None, None, None]


class NativeObject:
    """Arguments come checked; see ``AllToAll`` for what they mean.

    Attributes:
        expert_to_rank: [num_experts] int32, read at every dispatch.
        target_ranks: [max_tokens_per_rank, top_k] int32 of the last dispatch.
        target_slots: Likewise.
        span: The bytes of the workspace on this rank.
        received_tokens: [ep_size] int32, rows that each source sent here.
        invalid_ids: [1] int64, ids outside [-1, num_experts) so far.
        num_tokens: Of the last dispatch.
        max_rows: Of the last dispatch.
    """

    def __init__(
        self, workspace: Workspace, geometry: Geometry, expert_to_rank: torch.Tensor, config: _abi.Config
    ) -> None:
        self._workspace = workspace
        self._process = _fork.here
        self._timeout_s = config.timeout_ns / 1e9
        self._device = device = workspace.device
        self._on_gpu = device.type == "cuda"
        self.span = Span(workspace.memory, geometry)
        self._names = ("topk_ids", "topk_weights", *(f"payloads[{i}]" for i in range(len(geometry.payloads))))
        self._moved = (0, 0)  # addresses of the rows from outside that combine takes, (first, behind the last)
        routes = (geometry.max_tokens_per_rank, geometry.top_k)
        self.expert_to_rank = expert_to_rank
        self.target_ranks = torch.full(routes, -1, dtype=torch.int32, device=device)
        self.target_slots = torch.full(routes, -1, dtype=torch.int32, device=device)
        self.received_tokens = torch.zeros(geometry.ep_size, dtype=torch.int32, device=device)
        self.invalid_ids = torch.zeros(1, dtype=torch.int64, device=device)
        # Across domains combine goes by routes of the own domain, and the caller sees those of all.
        across = workspace.comm.network is not None
        self._near = (self.target_ranks.clone(), self.target_slots.clone()) if across else None
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # kernels may use them from any stream
        ranks, slots = self._near or (self.target_ranks, self.target_slots)
        tables = _abi.Tables(
            expert_to_rank=self.expert_to_rank.data_ptr(),
            target_ranks=ranks.data_ptr(),
            target_slots=slots.data_ptr(),
            num_tokens=self.received_tokens.data_ptr(),
            invalid_ids=self.invalid_ids.data_ptr(),
        )
        self.num_tokens = 0
        self.max_rows = geometry.max_tokens_per_rank
        # One struct of each kind for all calls: a fresh one costs as much as the call.
        self._dispatch_args = _abi.DispatchArgs(max_rows=self.max_rows)
        self._combine_args = _abi.CombineArgs()
        self._dispatch_ref, self._combine_ref = map(ctypes.byref, (self._dispatch_args, self._combine_args))
        self._payload = self._dispatch_args.payload  # asking for it again makes a new view
        self._beside: list[int | None] = _NONE_BESIDE  # as it is in the struct
        self._described = (0, self.max_rows, False, 0)
        self._sums: dict[int, bool] = {}  # by the tokens of a call: sums_experts
        library = _abi.library()
        self._functions = {name: getattr(library, name) for name in _CALLS}
        self._across: DomainRounds | None = None
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p()
        _abi.call(
            "putget_create",
            ctypes.byref(config),
            workspace.memory.handle,
            ctypes.byref(tables),
            ctypes.byref(self._handle),
        )
        _fork.watched.add(self)
        if across:
            try:
                routes_of_all = self.target_ranks, self.target_slots
                self._across = DomainRounds(workspace, self._handle, config, geometry.home, routes_of_all)
                workspace.across.append(self._across)
            except BaseException:
                self.destroy()
                raise

    @property
    def network_bytes(self) -> int:
        """Memory of this rank for rounds across domains, beside the workspace."""
        return 0 if self._across is None else self._across.num_bytes

    @property
    def is_open(self) -> bool:
        """False after ``destroy``."""
        return self._handle is not None

    def require_open(self) -> ctypes.c_void_p:
        """The handle for native calls.

        Raises:
            ValueError: The object is closed.
            ForkedChild: This process is a fork of the rank.
        """
        if self._handle is None:
            self._process.require_here(self._workspace.comm.rank, "AllToAll")
            raise ValueError("this AllToAll is closed")
        return self._handle

    def describe_dispatch(
        self, num_tokens: int, max_rows: int, *, ids_are_64bit: bool, busiest_tokens: int = 0
    ) -> None:
        """Fixes the form of the next dispatches, until this is called again: all but where their tensors lie.

        busiest_tokens is 0 where nobody knows them.
        """
        args = self._dispatch_args
        self._described = num_tokens, max_rows, ids_are_64bit, busiest_tokens
        args.num_tokens, args.max_rows, args.ids_are_64bit, _ = self._described

    @property
    def busiest_tokens(self) -> int:
        """Tokens of this rank in the last dispatch, or of the busiest one where that is known and more."""
        num_tokens, _, _, busiest = self._described
        return max(num_tokens, busiest)

    def dispatch(self, half: int, tensors: tuple[torch.Tensor, ...], beside: Beside | None) -> None:
        """``_abi.BOTH`` or ``_abi.START`` of the ids, the weights and the payloads, as described.

        Raises:
            ValueError: A tensor lies in the workspace.
        """
        args, payload = self._dispatch_args, self._payload
        ids, weights, *rows = self.span.addresses(self._names, tensors)
        addresses = _NONE_BESIDE if beside is None else self._addresses_beside(beside)
        if addresses != self._beside:
            args.num_valid_tokens, args.expert_load, args.stats = self._beside = addresses
        args.topk_ids = ids
        args.topk_weights = weights
        for index, address in enumerate(rows):
            payload[index] = address
        self._dispatch(half)
        self.num_tokens, self.max_rows, _, self._combine_args.busiest_tokens = self._described

    def _addresses_beside(self, beside: Beside) -> list[int | None]:
        """In the order of its fields; None where there is no tensor."""
        addresses: list[int | None] = [None] * len(beside)
        for index, tensor in enumerate(beside):
            if tensor is not None:
                (addresses[index],) = self.span.addresses((beside._fields[index],), (tensor,))
        return addresses

    def finish_dispatch(self) -> None:
        """The other half, with the arguments of the last ``dispatch``."""
        self._dispatch(_abi.FINISH)

    def _dispatch(self, half: int) -> None:
        args = self._dispatch_args
        args.stream = self._stream()
        args.half = half
        self._run("putget_dispatch", self.require_open(), self._dispatch_ref)

    def take_rows(self, x: torch.Tensor | None, strides: tuple[int, int]) -> None:
        """Rows for the next combine; strides in bytes, (slot, source). None: combine_input.

        Raises:
            ValueError: They lie in the workspace, where they cannot be taken from.
        """
        args = self._combine_args
        args.positions = None
        self._moved = (0, 0)
        if x is None or self.span.takes_in_place(x, strides, self.max_rows):
            args.rows = None
            args.row_slot_bytes = args.row_source_bytes = 0
            return
        args.rows = begin = x.data_ptr()
        args.row_slot_bytes, args.row_source_bytes = strides
        self._moved = begin, begin + extent(x)

    def sums_experts(self) -> bool:
        """Whether the next combine takes rows of experts, as many tokens as the last dispatch had."""
        found = self._sums.get(self.num_tokens)
        if found is None:
            sums = ctypes.c_uint32()
            _abi.call("putget_sums_experts", self.require_open(), self.num_tokens, ctypes.byref(sums))
            found = self._sums[self.num_tokens] = self._across is None and sums.value != 0
        return found

    def take_expert_major(self, x: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> None:
        """Rows of experts for the next combine, where ``sums_experts`` says so; see ``ExpertMajor`` for the tables."""
        args = self._combine_args
        args.rows = begin = x.data_ptr()
        args.row_slot_bytes = args.row_source_bytes = 0
        args.positions = positions.data_ptr()
        args.weights = weights.data_ptr()
        args.max_rows = self.max_rows
        self._moved = begin, begin + extent(x)

    def take_out(self, out: torch.Tensor, addend: torch.Tensor | None) -> None:
        """Where the next combine writes, and what it adds.

        Raises:
            ValueError: One of them lies in the workspace, or out overlaps what combine reads.
        """
        args = self._combine_args
        args.out, args.addend = self.span.result(out, addend, self._moved)

    def combine(self, half: int) -> None:
        """With what has been taken, for as many tokens as the last dispatch had."""
        args = self._combine_args
        args.stream = self._stream()
        args.num_tokens = self.num_tokens
        args.half = half
        self._run("putget_combine", self.require_open(), self._combine_ref)
        self._moved = (0, 0)  # a start takes the rows: their memory may be anybody's, also `out`'s

    def release(self) -> None:
        """Ends an open round without combine."""
        self._run("putget_release", self.require_open(), self._stream())

    def launches(self, num_tokens: int) -> tuple[_abi.Launch, _abi.Launch]:
        """How dispatch and combine are launched with this many tokens on the current stream."""
        found = (_abi.Launch(), _abi.Launch())
        stream = current_stream(self._device)
        _abi.call("putget_launches", self.require_open(), num_tokens, stream, *map(ctypes.byref, found))
        return found

    def destroy(self) -> PeerTimeout | None:
        """Frees the native object.

        Returns:
            The error of a network that has not delivered by the deadline, where no fault stands that has told of it.
            Memory that it may still touch is kept.
        """
        handle, self._handle = self._handle, None
        if self._across in self._workspace.across:
            self._workspace.across.remove(self._across)
        if handle is None:
            return None
        try:
            return None if self._across is None else self._end_across(self._across)
        finally:
            _abi.library().putget_destroy(handle)

    def _end_across(self, across: DomainRounds) -> PeerTimeout | None:
        missing = across.end_writes()
        if not missing:
            return None
        workspace = self._workspace
        is_open = workspace._memory is not None
        epoch = workspace.memory.epoch() if is_open else 0
        late = PeerTimeout("close", workspace.comm.rank, epoch, missing, self._timeout_s)
        logger.warning("%s", str(late))  # a handler may keep the record: not the frames of a caller
        return None if is_open and workspace.fault() is not None else late

    def forget_in_child(self) -> None:
        """In a forked child: calls are refused, and the native object stays as it is."""
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            warnings.warn("an AllToAll was dropped without close()", ResourceWarning, stacklevel=1, source=self)
            self.destroy()

    def _run(self, name: str, *args: Any) -> None:
        self._workspace.require_consistent()
        function = self._functions[name]
        # A trace of torch's profiler shows calls by these names. Where none is taken, asking costs 0.2 us or less.
        if torch._C._autograd._profiler_enabled():
            with torch.profiler.record_function(name):
                status = function(*args)
        else:
            status = function(*args)
        if status == _abi.FAULT:
            raised = take_raised()
            if raised is not None:
                with contextlib.suppress(PutgetError):
                    self._workspace.raise_fault()  # from now on it has been seen
                raise raised
            self._workspace.raise_fault()
        if status != _abi.OK:
            _abi.raise_status(status)

    def _stream(self) -> int:
        if not self._on_gpu:
            return 0
        stream: int = torch._C._cuda_getCurrentRawStream(self._device.index)
        comm = self._workspace.comm
        group = comm._local_group
        if group is not None and not torch.cuda.is_current_stream_capturing():
            owner = group.claim_stream(self._device.index, stream, comm.rank)
            if owner != comm.rank:
                raise ValueError(
                    f"the current stream is already rank {owner}'s: emulated ranks need a torch.cuda.Stream each, "
                    "because their kernels wait for each other"
                )
        return stream
