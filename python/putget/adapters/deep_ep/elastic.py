"""``ElasticBuffer`` of DeepEP 2.1, for the ranks of one NVLink domain (or one CPU host).

    from putget.adapters.deep_ep import ElasticBuffer    # instead of: from deep_ep import ElasticBuffer

Supported are ``dispatch`` and ``combine`` in both layouts: one row a token, and expanded, one row for each of its local
experts, grouped by expert. Handles can be sent again and combined more than once. Order is always the same, so
``deterministic`` changes nothing. Remote storage (``engram_*``), pipelines (``pp_*``) and ``agrs_*`` are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from putget import Payload
from putget.adapters.deep_ep import expanded
from putget.adapters.deep_ep.arguments import (
    check_biases,
    check_count,
    check_given,
    check_handle,
    check_here,
    check_ids,
    check_rows_of,
    check_weights,
    check_x,
)
from putget.adapters.deep_ep.normal import Layout, NormalRounds
from putget.adapters.deep_ep.rounds import MAX_RANKS, EventOverlap, Rows, as_given, event_now, packed
from putget.adapters.deep_ep.stream import CommStream
from putget.adapters.engines import require_supported
from putget.adapters.shared import SharedWorkspace, communicator_of, engine_workspace_bytes, place_of
from putget.moe.compact import Choices, compact, count_routes

_NUM_SMS, _NUM_QPS = 24, 17  # answers to those who ask; not used


@dataclass
class EPHandle:
    """The handle that ``dispatch`` gives, and ``combine`` and cached dispatches take. The names are DeepEP's.

    Attributes:
        do_expand: Whether rows are expanded.
        num_experts: Experts of all ranks together.
        expert_alignment: Groups begin at multiples of it.
        num_max_tokens_per_rank: Most tokens that one rank sends.
        num_sms: Not used.
        topk_idx: [num_tokens, top_k].
        num_recv_tokens: Rows of the result; with the host's knowledge, as many as came.
        num_expanded_tokens: Rows of the expanded result.
        num_recv_tokens_per_expert_list: Rows of each local expert, rounded up; empty without the host's knowledge.
        psum_num_recv_tokens_per_scaleup_rank: [ranks] int32, ends of the rows of each source.
        psum_num_recv_tokens_per_expert: [local experts] int32, ends of the rows of each expert: rounded up, or in the
            expanded layout begin of its group plus its rows.
        num_unaligned_recv_tokens_per_expert: [local experts] int32.
        recv_src_metadata: [rows, 2 + top_k] int32: rank times num_max_tokens_per_rank plus token; -1; the slots of the
            expanded layout, -1 for none.
        dst_buffer_slot_idx: [num_tokens, ranks] int32: the ranks of each token, -1 elsewhere.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    dst_buffer_slot_idx: torch.Tensor
    layout: Layout
    local: torch.Tensor  # [rows, top_k] ids of this rank's experts, -1 for others

    @property
    def slots(self) -> torch.Tensor:
        """[rows, top_k] int64 of the expanded layout, -1 for none."""
        return self.recv_src_metadata[: len(self.local), 2:].long()


@dataclass(frozen=True)
class _Arrived:
    """The result of a dispatch: rows (and their scales), ids and weights of this rank's experts."""

    rows: list[torch.Tensor]
    weights: torch.Tensor | None


class ElasticBuffer:
    """Dispatch and combine with DeepEP 2.1's signatures. Construction is collective over the group.

    Args:
        group: The torch.distributed group, or a ``putget.Communicator``.
        num_bytes: Not used: memory is made for the rows that come.
        num_cpu_bytes: Must be 0.
        num_max_tokens_per_rank: Most tokens that one rank sends, for dispatches that do not say so.
        hidden: Not used.
        num_topk: Not used.
        use_fp8_dispatch: Not used: rows say.
        deterministic: Not used: order is always the same.
        allow_hybrid_mode: Not used.
        allow_multiple_reduction: Not used: expanded rows are summed in each rank, then over ranks.
        prefer_overlap_with_compute: Not used.
        sl_idx: Not used.
        num_allocated_qps: Not used.
        num_cpu_timeout_secs: Deadline of set-up and first rounds, in seconds.
        num_gpu_timeout_secs: Deadline of every wait, in seconds.
        explicitly_destroy: Not used; ``destroy`` always works.
        device: Where the rows live; by default the current CUDA device, or the CPU where there is none.

    Raises:
        ValueError: An argument is wrong or not supported.
        PeerTimeout: A rank did not connect in time.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        require_supported(num_cpu_bytes=(num_cpu_bytes, 0))
        self._comm = communicator_of(group)
        if self._comm.size > MAX_RANKS:
            raise ValueError(f"group has {self._comm.size} ranks, supported are up to {MAX_RANKS}")
        self.group = group
        self.rank_idx = self._comm.rank
        self.num_ranks = self._comm.size
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or _NUM_QPS
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks = self.num_rdma_ranks = 1
        self.num_scaleup_ranks = self.num_nvlink_ranks = self.num_ranks
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self._device = place_of(device)
        self._timeouts = (float(num_gpu_timeout_secs), float(num_cpu_timeout_secs))
        self._stream = CommStream(self._device)
        self._normal = NormalRounds(self._comm, self._device, self._memory, "num_max_tokens_per_rank")

    def _memory(self, num_bytes: int, arguments: Mapping[str, int]) -> SharedWorkspace:
        timeout_s, warmup_timeout_s = self._timeouts
        return SharedWorkspace(
            self._comm,
            num_bytes,
            self._device,
            timeout_s=timeout_s,
            warmup_timeout_s=warmup_timeout_s,
            arguments=arguments,
        )

    def destroy(self) -> None:
        """Frees the memory. Needs no peer. Idempotent."""
        self._normal.close()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Symmetric bytes of one round; the constructor does not need them."""
        return engine_workspace_bytes(
            ep_size=communicator_of(group).size,
            max_tokens_per_rank=num_max_tokens_per_rank,
            dispatch_bytes=2 * hidden + 12 * MAX_RANKS,
            output=Payload((hidden,), torch.bfloat16),
        )

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current CUDA stream; on a machine without CUDA, nothing to wait for."""
        return event_now(torch.cuda.is_available())

    def get_comm_stream(self) -> Any:
        """The ``torch.cuda.Stream`` that calls run on; None on the CPU."""
        return self._stream.stream

    def get_physical_domain_size(self) -> tuple[int, int]:
        """1, and the number of ranks: they are in one NVLink domain."""
        return 1, self.num_ranks

    get_logical_domain_size = get_physical_domain_size

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *_: Any, **__: Any) -> int:
        """Something to pass on: putget chooses by size."""
        return _NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Something to pass on."""
        return min(num_sms, self.num_allocated_qps)

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """A round without rows: who is behind it has heard of every rank."""
        if with_cpu_sync:
            self._comm.synchronize(self._device)
        with self._stream.turn_or_here(not use_comm_stream, False):
            self._normal.counts(torch.zeros(self.num_ranks, dtype=torch.int32, device=self._device))
        if with_cpu_sync:
            self._comm.synchronize(self._device)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | None = None,
        previous_event_before_epilogue: EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Puts each token's row into the ranks of its experts.

        Args:
            x: [num_tokens, hidden] bfloat16; or float8_e4m3fn and its scales [num_tokens, *].
            topk_idx: [num_tokens, top_k] ids of experts; -1 is "no expert". None with a handle.
            topk_weights: [num_tokens, top_k] float32, or None.
            cumulative_local_expert_recv_stats: [local experts] int32: what each expert got is added.
            num_experts: Experts of all ranks together, a multiple of the number of ranks; that of the handle.
            num_max_tokens_per_rank: Most tokens that one rank sends; by default that of the handle, or the buffer.
            expert_alignment: Groups of the expanded layout begin at multiples of it; counts are rounded up to it.
            num_sms: Not used.
            num_qps: Not used.
            previous_event: What the communication stream waits for before; None: all that the current stream has got.
            previous_event_before_epilogue: What it waits for after the rows have come.
            async_with_compute_stream: The current stream does not wait; the event says when the call is done.
            allocate_on_comm_stream: Results are memory of the communication stream, which they always are.
            handle: Of an earlier dispatch of the same layout: its ids hold, and do not travel again.
            do_handle_copy: Whether the handle has a copy of topk_idx.
            do_cpu_sync: Whether the host waits for the number of rows; None: yes, without a handle.
            do_expand: A row for each (token, local expert), grouped by expert.
            do_zero_padding: Whether slots without a row are zeros, in the expanded layout.
            use_tma_aligned_col_major_sf: Whether scales come in column-major order, columns at multiples of 16 bytes.

        Returns:
            Rows by source rank, then token, or expanded; ids of this rank's experts, -1 for others (None if expanded);
            weights [rows, top_k], 0 for others, or [rows] if expanded (None without topk_weights); a handle; an event.
            Without do_cpu_sync as many rows as could come, the last ones undefined.

        Raises:
            ValueError: An argument is wrong or not supported; nothing has happened on any rank.
            PeerTimeout: As ``AllToAll.dispatch``.
        """
        check_x(x)
        if previous_event is not None and not allocate_on_comm_stream:
            raise ValueError("previous_event is given, allocate_on_comm_stream is False: expected True with it")
        if handle is not None:
            check_handle(handle, EPHandle, "dispatch")
            require_supported(topk_idx=(topk_idx, None), do_cpu_sync=(bool(do_cpu_sync), False))
        asked = _Asked.of(self, handle, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync)
        if topk_weights is not None:
            check_weights(topk_weights, *asked.topk_idx.shape)
        counted = cumulative_local_expert_recv_stats
        if counted is not None:
            num_local = asked.num_experts // self.num_ranks
            check_given("cumulative_local_expert_recv_stats", counted, (num_local,), torch.int32, self._device)
        check_here(
            self._device, x=x, topk_idx=asked.topk_idx, topk_weights=[] if topk_weights is None else topk_weights
        )
        with self._stream.turn(previous_event, async_with_compute_stream) as turn:
            if handle is None:
                handle, arrived = self._first(x, asked, topk_weights, do_expand, do_handle_copy)
            else:
                arrived = self._again(x, handle, topk_weights)
            if previous_event_before_epilogue is not None:
                previous_event_before_epilogue.current_stream_wait()
            if counted is not None:
                counted.add_(handle.num_unaligned_recv_tokens_per_expert)
            ids: torch.Tensor | None = handle.local.to(handle.topk_idx.dtype)
            if handle.do_expand:
                arrived, ids = self._expanded(handle, arrived, do_zero_padding), None
            rows = arrived.rows
            if use_tma_aligned_col_major_sf:
                rows = [rows[0], *(expanded.column_major(scales) for scales in rows[1:])]
            turn.share(x, topk_weights, counted, rows, ids, arrived.weights)
        return as_given(x, rows), ids, arrived.weights, handle, turn.event

    def _first(
        self, x: Rows, asked: _Asked, topk_weights: torch.Tensor | None, do_expand: bool, do_handle_copy: bool
    ) -> tuple[EPHandle, _Arrived]:
        parts = list(x) if isinstance(x, tuple) else [x]
        ids, capacity = asked.topk_idx, asked.capacity
        num_local = asked.num_experts // self.num_ranks
        tokens = torch.arange(len(ids), dtype=torch.int32, device=self._device)[:, None] + self.rank_idx * capacity
        weights = [] if topk_weights is None else [topk_weights]
        carried = [*packed(parts), *weights, ids.contiguous(), tokens]
        names = [*["x", "the scales of x"][: len(parts)], *["topk_weights"][: len(weights)], "topk_idx", "tokens"]
        goes = count_routes(ids.contiguous(), self.num_ranks, num_local).in_rank
        routes = self._normal.ids(goes)
        ticket, received = self._normal.put(routes, carried, names, capacity)
        count = int(received.num_tokens.sum()) if asked.do_cpu_sync else capacity * self.num_ranks
        *flat, seen, numbers = received.flat.payloads
        choices = Choices(seen, None, self.rank_idx * num_local, num_local)
        lost = torch.zeros(1, dtype=torch.int64, device=self._device)  # never: there is room for all
        places, taken, here = compact(received.num_tokens, capacity, count, [*flat, numbers], lost, choices)
        assert here is not None
        *rows, sources = taken
        local = here.ids.long()
        made = expanded.expand(local, num_local, asked.alignment)
        slots = made.slots if do_expand else torch.full_like(made.slots, -1)
        numbers = torch.cat([sources, torch.full_like(sources, -1), slots.int()], 1)
        total = int(made.aligned.sum()) if asked.do_cpu_sync else local.numel() + num_local * (asked.alignment - 1)
        layout = Layout(routes, places, capacity, parts[0].shape[1], ticket)
        handle = EPHandle(
            do_expand,
            asked.num_experts,
            asked.alignment,
            capacity,
            _NUM_SMS,
            ids.clone() if do_handle_copy else ids,
            count,
            total,
            made.aligned.tolist() if asked.do_cpu_sync else [],
            places.ends,
            made.begins + made.counts if do_expand else made.aligned.cumsum(0).int(),
            made.counts,
            numbers,
            routes,
            layout,
            local,
        )
        return handle, self._arrived(handle, rows, len(parts))

    def _again(self, x: Rows, handle: EPHandle, topk_weights: torch.Tensor | None) -> _Arrived:
        parts = list(x) if isinstance(x, tuple) else [x]
        layout = handle.layout
        weights = [] if topk_weights is None else [topk_weights]
        names = [*["x", "the scales of x"][: len(parts)], *["topk_weights"][: len(weights)]]
        carried = [*packed(parts), *weights]
        layout.ticket, received = self._normal.put(layout.ids, carried, names, layout.capacity)
        layout.hidden = parts[0].shape[1]
        return self._arrived(handle, self._normal.again(layout, received), len(parts))

    @staticmethod
    def _arrived(handle: EPHandle, rows: list[torch.Tensor], num_parts: int) -> _Arrived:
        if len(rows) == num_parts:
            return _Arrived(rows, None)
        return _Arrived(rows[:num_parts], torch.where(handle.local >= 0, rows[num_parts], 0.0))

    @staticmethod
    def _expanded(handle: EPHandle, arrived: _Arrived, zeros: bool) -> _Arrived:
        source = expanded.sources(handle.slots, handle.num_expanded_tokens)
        choices = handle.local.shape[1]
        row = torch.where(source >= 0, source // choices, -1)
        rows = [expanded.take(part, row, zeros) for part in arrived.rows]
        weights = None if arrived.weights is None else expanded.take(arrived.weights.flatten(), source, True)
        return _Arrived(rows, weights)

    # --- combine ------------------------------------------------------------------------------------------------------

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | None = None,
        previous_event_before_epilogue: EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sums each token's rows, without weights.

        Args:
            x: [rows, hidden] bfloat16, in the order of the rows that dispatch returned.
            handle: Of that dispatch, which may have been combined before.
            topk_weights: None; or [rows, top_k] float32, expanded [rows]: they are summed in the same way, in a round
                of their own.
            bias: None, or one or two tensors [num_tokens, hidden] that are added last (with two, rows travel as
                float32).
            num_sms: Not used.
            num_qps: Not used.
            previous_event: What the communication stream waits for before; None: all that the current stream has got.
            previous_event_before_epilogue: Likewise.
            async_with_compute_stream: The current stream does not wait; the event says when the call is done.
            allocate_on_comm_stream: Results are memory of the communication stream, which they always are.

        Returns:
            [num_tokens, hidden] bfloat16; [num_tokens, top_k] float32 with topk_weights, else None; an event.

        Raises:
            ValueError: An argument is wrong or not supported; nothing has happened on any rank.
            PeerTimeout: As ``AllToAll.combine``.
        """
        layout = check_handle(handle, EPHandle, "dispatch").layout
        check_x(x, (torch.bfloat16,))
        count = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        check_rows_of(x, (count, layout.hidden), torch.bfloat16)
        if topk_weights is not None:
            check_weights(topk_weights[:, None] if handle.do_expand else topk_weights, count)
        biases = check_biases(bias, (len(handle.topk_idx), layout.hidden))
        check_here(self._device, x=x, topk_weights=[] if topk_weights is None else topk_weights, bias=biases)
        with self._stream.turn(previous_event, async_with_compute_stream) as turn:
            if previous_event_before_epilogue is not None:
                previous_event_before_epilogue.current_stream_wait()
            rows, weights = x, topk_weights
            if handle.do_expand:
                slots = handle.slots
                rows = expanded.fold(x, slots)
                if topk_weights is not None:
                    weights = torch.where(
                        slots >= 0, expanded.take(topk_weights, slots.flatten(), False).view_as(slots), 0.0
                    )
            combined = self._normal.sum_rows(layout, rows, biases)
            summed = None if weights is None else self._normal.sum_weights(layout, weights.float())
            turn.share(x, topk_weights, biases, combined, summed, layout.ids, layout.places.position)
        return combined, summed, turn.event


@dataclass(frozen=True)
class _Asked:
    """Sizes of a dispatch, checked."""

    topk_idx: torch.Tensor
    num_experts: int
    capacity: int
    alignment: int
    do_cpu_sync: bool

    @staticmethod
    def of(
        buffer: ElasticBuffer,
        handle: EPHandle | None,
        topk_idx: torch.Tensor | None,
        num_experts: int | None,
        capacity: int | None,
        alignment: int | None,
        do_cpu_sync: bool | None,
    ) -> _Asked:
        """Raises ValueError for the first argument that is wrong, or not that of the handle."""
        if handle is not None:
            held = (handle.num_experts, handle.num_max_tokens_per_rank, handle.expert_alignment)
            names = ("num_experts", "num_max_tokens_per_rank", "expert_alignment")
            for name, given, own in zip(names, (num_experts, capacity, alignment), held, strict=True):
                if given not in (None, own):
                    raise ValueError(f"{name} is {given}, the handle has {own}")
            return _Asked(handle.topk_idx, *held, False)
        check_ids(topk_idx)
        assert topk_idx is not None
        check_count("num_experts", num_experts, 1)
        assert num_experts is not None
        if num_experts % buffer.num_ranks:
            raise ValueError(f"num_experts is {num_experts}, expected a multiple of the {buffer.num_ranks} ranks")
        most = buffer.num_max_tokens_per_rank if capacity is None else capacity
        check_count("num_max_tokens_per_rank", most, 1)
        aligned = 1 if alignment is None else alignment
        check_count("expert_alignment", aligned, 1)
        return _Asked(topk_idx, num_experts, most, aligned, do_cpu_sync is not False)
