"""``Buffer`` with DeepEP's signatures, for the ranks of one NVLink domain (or one CPU host).

    from putget.adapters import deep_ep    # instead of: import deep_ep
    buffer = deep_ep.Buffer(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode=True, ...)

Supported:

- ``get_dispatch_layout``, ``dispatch`` (bfloat16 rows, or FP8 rows with scales), cached dispatch with a handle,
  ``num_worst_tokens``, ``combine`` with up to one bias;
- ``low_latency_dispatch`` (bfloat16, or FP8 with float32 scales) and ``low_latency_combine`` with its weights, ``out``
  and ``zero_copy``;
- ``return_recv_hook``: the call sends, and the hook waits for what others have sent; no kernel runs between the two;
- ``previous_event``, ``async_finish`` and ``allocate_on_comm_stream``: calls run on a stream of the buffer's
  (``get_comm_stream``), which waits for the event or for the current stream; the current stream waits for the call, or,
  with ``async_finish``, for the event that is returned. Calls with a hook run on the current stream;
- up to two rounds under way, as two micro-batches need them: a third dispatch gives up the oldest one.

Not supported, with a ``ValueError`` that says so: ``topk_weights`` in ``combine``, a first ``dispatch`` without
``topk_idx``, rounded or UE8M0 scales, LogFMT, statistics of waiting times. Masks of ranks and ranks of several hosts
are not there either. Sizes of buffers, configurations and numbers of SMs are accepted and not used. DeepEP's layouts
are made by gathering rows after dispatch, which costs a copy; ``putget.AllToAll`` has none.
"""

from __future__ import annotations

from typing import Any

import torch

from putget import Communicator, Payload, ProtocolMisuse, Received
from putget.adapters import deep_ep_layout as layouts
from putget.adapters.deep_ep_arguments import check_count, check_goes, check_handle, check_ids, check_x
from putget.adapters.deep_ep_low_latency import LowLatencyCalls
from putget.adapters.deep_ep_rounds import (
    MAX_RANKS,
    Config,
    EventOverlap,
    Handle,
    Lanes,
    Rows,
    Ticket,
    as_given,
    event_now,
    pairs_bytes,
)
from putget.adapters.deep_ep_stream import CommStream
from putget.adapters.engines import require_supported
from putget.adapters.shared import (
    TIMEOUT_S,
    WARMUP_TIMEOUT_S,
    communicator_of,
    default_device,
    engine_workspace_bytes,
)

topk_idx_t = torch.int64


class Buffer(LowLatencyCalls):
    """Dispatch and combine with DeepEP's signatures. Construction is collective over the group.

    Args:
        group: The torch.distributed group, or a ``putget.Communicator``.
        num_nvl_bytes: Not used.
        num_rdma_bytes: Not used.
        low_latency_mode: Not used: both kinds of calls work.
        num_qps_per_rank: Not used.
        allow_nvlink_for_low_latency_mode: Not used.
        allow_mnnvl: Not used.
        explicitly_destroy: Not used; ``destroy`` always works.
        enable_shrink: Must be False.
        comm: Must be None.
        max_tokens_per_rank: Most tokens that one rank sends in one normal dispatch; by default the class attribute.
        device: Where the rows live; by default the current CUDA device, or the CPU where there is none.
        timeout_s: Deadline of every wait, in seconds.
        warmup_timeout_s: Deadline of set-up and first rounds, in seconds.

    Attributes:
        rank: This rank.
        group_size: Ranks of the group.

    Raises:
        ValueError: An argument is wrong or not supported.
        PeerTimeout: A rank did not connect in time.
    """

    num_sms: int = 20
    max_tokens_per_rank: int = 4096

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        max_tokens_per_rank: int | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = TIMEOUT_S,
        warmup_timeout_s: float = WARMUP_TIMEOUT_S,
    ) -> None:
        require_supported(enable_shrink=(enable_shrink, False), comm=(comm, None))
        self._comm: Communicator = communicator_of(group)
        if self._comm.size > MAX_RANKS:
            raise ValueError(f"group has {self._comm.size} ranks, supported are up to {MAX_RANKS}")
        self.group = group
        self.rank = self._comm.rank
        self.group_size = self._comm.size
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self._device = default_device() if device is None else torch.device(device)
        self._timeouts = (timeout_s, warmup_timeout_s)
        if max_tokens_per_rank is not None:
            self.max_tokens_per_rank = max_tokens_per_rank
        self._lanes: dict[tuple[int, ...], Lanes] = {}
        self._zero_copy: dict[tuple[int, int, int], torch.Tensor] = {}
        self._comm_stream = CommStream(self._device)
        self._lost_rows: torch.Tensor | None = None  # [1] int64, made with the first memory

    def get_comm_stream(self) -> Any:
        """The ``torch.cuda.Stream`` that calls run on; None on the CPU."""
        return self._comm_stream.stream

    def check(self) -> None:
        """Waits for the calls so far.

        Raises:
            ProtocolMisuse: Rows were left out, because num_worst_tokens was too small for what came.
        """
        self._comm_stream.join()
        if self._lost_rows is None or not (lost := int(self._lost_rows)):
            return
        self._lost_rows.zero_()
        raise ProtocolMisuse(f"dispatch: {lost} rows were left out, num_worst_tokens was too small for what came")

    def destroy(self) -> None:
        """Frees the memory. Needs no peer. Idempotent.

        Raises:
            ProtocolMisuse: As ``check``; all is freed the same.
        """
        while self._lanes:
            self._lanes.popitem()[1].close()
        self._zero_copy.clear()
        self.check()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: what DeepEP builds for SM90 alone (FP8 rows, low-latency calls) is always there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Remembered, not used: putget chooses by size."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current CUDA stream; on a machine without CUDA, nothing to wait for."""
        return event_now(torch.cuda.is_available())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Something to pass on."""
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Symmetric bytes that low-latency rounds of 8 experts a token take; the constructor does not need it."""
        return pairs_bytes(num_ranks, num_max_dispatch_tokens_per_rank * 8, hidden)

    # --- normal rounds ------------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts what goes where.

        Args:
            topk_idx: [num_tokens, top_k] ids of experts; -1 is "no expert", and so is every id out of range.
            num_experts: Experts of all ranks together, a multiple of the number of ranks.
            previous_event: What the communication stream waits for before; None: all that the current stream has got.
            async_finish: The current stream does not wait; the event says when the call is done.
            allocate_on_comm_stream: Results are memory of the communication stream, which they always are; needs
                previous_event and async_finish.

        Returns:
            Tokens for each rank [ranks] int32, None, tokens for each expert [num_experts] int32, whether a token goes
            to a rank [num_tokens, ranks] bool, and an event.

        Raises:
            ValueError: topk_idx is not such a tensor, or num_experts not a multiple of the number of ranks.
        """
        num_local = self._local(num_experts)
        check_ids(topk_idx)
        with self._comm_stream.turn(previous_event, async_finish, allocate_on_comm_stream) as turn:
            ids = topk_idx.long()
            known = (ids >= 0) & (ids < num_experts)
            ranks = torch.where(known, ids // num_local, self.group_size)
            goes = torch.zeros(ids.shape[0], self.group_size + 1, dtype=torch.bool, device=ids.device)
            in_rank = goes.scatter_(1, ranks, True)[:, : self.group_size].contiguous()
            per_expert = layouts.count(torch.where(known, ids, num_experts), num_experts)
            per_rank = in_rank.sum(0).int()
            turn.share(topk_idx, per_rank, per_expert, in_rank)
        return per_rank, None, per_expert, in_rank, turn.event

    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Puts each token's row into the ranks of its experts.

        Args:
            x: [num_tokens, hidden] bfloat16; or float8_e4m3fn and its scales [num_tokens, hidden // 128] float32,
                which may be strided (they are copied then).
            handle: Of an earlier dispatch with the same ranks for each token: ids and weights do not travel again.
            num_tokens_per_rank: Not needed.
            num_tokens_per_rdma_rank: Must be None.
            is_token_in_rank: [num_tokens, ranks] bool, of ``get_dispatch_layout``.
            num_tokens_per_expert: [num_experts], of ``get_dispatch_layout``.
            topk_idx: [num_tokens, top_k] int64 ids of experts; -1 is "no expert".
            topk_weights: [num_tokens, top_k] float32.
            expert_alignment: The counts that are returned are rounded up to a multiple of it.
            num_worst_tokens: Rows of the result; with it the host does not wait. Rows beyond it are left out, counted,
                and reported by ``check``. 0: as many as arrived, for which the host waits.
            config: Not used.
            previous_event: What the communication stream waits for before; None: all that the current stream has got.
            async_finish: The current stream does not wait; the event says when the call is done.
            allocate_on_comm_stream: Results are memory of the communication stream, which they always are; needs
                previous_event and async_finish.

        Returns:
            Rows by source rank, then token, in new tensors; ids of this rank's experts, -1 for others; weights, 0 for
            others; rows of each of this rank's experts (an empty list with num_worst_tokens); a handle; an event. Of a
            cached dispatch, the rows and the event alone.

        Raises:
            ValueError: An argument is wrong or not supported; nothing has happened on any rank.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        require_supported(num_tokens_per_rdma_rank=(num_tokens_per_rdma_rank, None))
        check_x(x)
        rows = list(x) if isinstance(x, tuple) else [x]
        names = ["x", "the scales of x"][: len(rows)]
        if handle is not None:
            check_handle(handle, Handle, "dispatch")
            require_supported(topk_idx=(topk_idx, None), topk_weights=(topk_weights, None))
            with self._comm_stream.turn(previous_event, async_finish, allocate_on_comm_stream) as turn:
                ticket, received = self._put(handle.ids, layouts.packed(rows), names)
                handle.ticket = ticket
                taken = [payload[handle.places.rows] for payload in received.flat.payloads]
                turn.share(rows, taken)
            return as_given(x, taken), None, None, None, None, turn.event
        if topk_idx is None or topk_weights is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise ValueError(
                "supported is a dispatch with topk_idx, topk_weights, is_token_in_rank and num_tokens_per_expert, or "
                "with the handle of one"
            )
        num_local = self._local(num_tokens_per_expert.numel())
        num_tokens, _ = check_ids(topk_idx)
        check_goes(is_token_in_rank, num_tokens, self.group_size)
        check_count("num_worst_tokens", num_worst_tokens, 0)
        check_count("expert_alignment", expert_alignment, 1)
        with self._comm_stream.turn(previous_event, async_finish, allocate_on_comm_stream) as turn:
            here = torch.arange(self.group_size, dtype=torch.int32, device=is_token_in_rank.device)
            ids = torch.where(is_token_in_rank, here, -1)
            carried = [*layouts.packed(rows), topk_idx.contiguous(), topk_weights.contiguous()]
            ticket, received = self._put(ids, carried, [*names, "topk_idx", "topk_weights"])
            count = num_worst_tokens or int(received.num_tokens.sum())
            if num_worst_tokens and self._lost_rows is not None:
                self._lost_rows += (received.num_tokens.sum() - count).clamp(min=0)
            places = layouts.compact(received.num_tokens, self.max_tokens_per_rank, count)
            *taken, experts, weights = (payload[places.rows] for payload in received.flat.payloads)
            local = torch.where(places.is_row[:, None], layouts.local_experts(experts, self.rank, num_local), -1)
            per_expert: list[int] = []
            if not num_worst_tokens:
                counts = layouts.count(torch.where(local >= 0, local, num_local), num_local)
                per_expert = (-(-counts // expert_alignment) * expert_alignment).tolist()
            made = Handle(ids, places, num_worst_tokens > 0, ticket)
            seen, local = torch.where(local >= 0, weights, 0.0), local.to(topk_idx.dtype)
            turn.share(rows, topk_idx, topk_weights, is_token_in_rank, taken, local, seen)
        return as_given(x, taken), local, seen, per_expert, made, turn.event

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, EventOverlap]:
        """Sums each token's rows, without weights.

        Args:
            x: [rows, hidden] bfloat16, in the order of the rows that dispatch returned.
            handle: Of that dispatch.
            topk_weights: Must be None.
            bias: None, or one tensor [num_tokens, hidden] that is added last.
            config: Not used.
            previous_event: What the communication stream waits for before; None: all that the current stream has got.
            async_finish: The current stream does not wait; the event says when the call is done.
            allocate_on_comm_stream: Results are memory of the communication stream, which they always are; needs
                previous_event and async_finish.

        Returns:
            [num_tokens, hidden] bfloat16, None, an event.

        Raises:
            ValueError: An argument is wrong or not supported; nothing has happened on any rank.
            ProtocolMisuse: The handle's round is over.
            PeerTimeout: As ``AllToAll.combine``.
        """
        require_supported(topk_weights=(topk_weights, None))
        check_handle(handle, Handle, "dispatch")
        check_x(x, (torch.bfloat16,))
        if isinstance(bias, tuple):
            if len(bias) != 1:
                raise ValueError(f"bias has {len(bias)} tensors, supported is one")
            bias = bias[0]
        rounds = handle.ticket.rounds()
        place = rounds.combine_input()
        expected = [handle.places.rows.numel(), place.shape[1]]
        if list(x.shape) != expected or x.dtype != place.dtype:
            raise ValueError(
                f"x is {list(x.shape)} {x.dtype}, expected {expected} {place.dtype}: a row for each that dispatch gave"
            )
        with self._comm_stream.turn(previous_event, async_finish, allocate_on_comm_stream) as turn:
            rows = None
            if handle.is_worst:
                rows = x[handle.places.position]
            else:
                place.index_copy_(0, handle.places.rows, x)
            combined = rounds.combine(rows, name="x", addend=bias)
            turn.share(x, bias, combined)
        return combined, None, turn.event

    # --- inside -------------------------------------------------------------------------------------------------------

    def _put(self, ids: torch.Tensor, payloads: list[torch.Tensor], names: list[str]) -> tuple[Ticket, Received]:
        """A normal round: every rank is an "expert", and a token goes to each of its ranks once."""
        hidden = payloads[0].shape[1]
        key = (self.max_tokens_per_rank, hidden)
        if self._lost_rows is None:
            self._lost_rows = torch.zeros(1, dtype=torch.int64, device=self._device)
        if key not in self._lanes:
            ranks = self.group_size
            num_bytes = engine_workspace_bytes(
                ep_size=ranks,
                max_tokens_per_rank=self.max_tokens_per_rank,
                dispatch_bytes=2 * hidden + 12 * MAX_RANKS,
                output=Payload((hidden,), torch.bfloat16),
            )
            self._lanes[key] = Lanes(lambda: self._rounds(num_bytes, ranks, ranks, self.max_tokens_per_rank, hidden))
        lane = self._lanes[key].begin()
        received = lane.rounds.dispatch(ids, None, payloads, names=names)
        return Ticket(lane, lane.number), received
