"""``Buffer`` with DeepEP's signatures.

Supported:

- ``get_dispatch_layout``, ``dispatch`` (bfloat16 rows, or FP8 rows with scales; with ids and weights or without),
  cached dispatch with a handle, ``num_worst_tokens``, ``combine`` with weights and up to two biases;
- ``low_latency_dispatch`` (bfloat16, or FP8 with float32, rounded or UE8M0 scales) and ``low_latency_combine`` with its
  weights, ``out`` and ``zero_copy``;
- handles that are combined more than once, and sent again after that;
- ``return_recv_hook``: the call sends, and the hook waits for what others have sent; no kernel runs between the two;
- ``previous_event``, ``async_finish`` and ``allocate_on_comm_stream``: such calls run on a stream of the buffer's
  (``get_comm_stream``), which waits for the event or for the current stream; the current stream waits for the call, or,
  with ``async_finish``, for the event that is returned. Other calls, and those with a hook, run on the current stream,
  behind all calls before them;
- two rounds under way, as two micro-batches need them: a third dispatch ends the oldest one, whose combine begins
  another, as every further combine of a handle does.

Not supported, with a ``ValueError`` that says so: LogFMT, statistics of waiting times, entries of a handle that are
DeepEP's own (channels). Masks of ranks are not there either. Sizes of buffers, configurations and numbers of SMs are
accepted and not used. Ranks may be on several hosts (``putget.Communicator``). DeepEP's layouts are made by gathering
rows after dispatch, which costs a copy; ``putget.AllToAll`` has none.
"""

from __future__ import annotations

from typing import Any

import torch

from putget import Communicator, ProtocolMisuse
from putget.adapters.deep_ep.arguments import (
    check_biases,
    check_count,
    check_goes,
    check_handle,
    check_here,
    check_ids,
    check_rows_of,
    check_weights,
    check_x,
)
from putget.adapters.deep_ep.low_latency import LowLatencyCalls
from putget.adapters.deep_ep.normal import Layout, NormalRounds
from putget.adapters.deep_ep.rounds import (
    MAX_RANKS,
    Config,
    EventOverlap,
    Lanes,
    Rows,
    as_given,
    event_now,
    packed,
    pairs_bytes,
)
from putget.adapters.deep_ep.stream import CommStream
from putget.adapters.engines import require_supported
from putget.adapters.shared import (
    TIMEOUT_S,
    WARMUP_TIMEOUT_S,
    communicator_of,
    place_of,
)
from putget.moe.compact import Choices, compact, count_routes
from putget.moe.pairs import Pairs

topk_idx_t = torch.int64


class Handle:
    """The handle that ``dispatch`` gives, and ``combine`` and cached dispatches take. It is indexed as DeepEP's tuple.

    [0] is [ranks, ranks] int32: in the column of this rank, how many rows have come from each source and those before
    it; -1 in other columns, which this rank does not know. [4] is is_token_in_rank. The others are DeepEP's own.
    """

    def __init__(self, layout: Layout, ep_rank: int) -> None:
        self.layout = layout
        self._ep_rank = ep_rank

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            return self.layout.ids >= 0
        if index != 0:
            raise ValueError(f"handle[{index}] is asked for, supported are 0 and 4: the others are DeepEP's channels")
        ends = self.layout.places.ends
        prefixes = ends.new_full((ends.numel(), ends.numel()), -1, dtype=torch.int32)
        prefixes[:, self._ep_rank] = ends
        return prefixes


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
        max_tokens_per_rank: Most tokens that one rank sends in one normal dispatch that does not say so itself; by
            default the class attribute.
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
        self._device = place_of(device)
        self._timeouts = (timeout_s, warmup_timeout_s)
        if max_tokens_per_rank is not None:
            self.max_tokens_per_rank = max_tokens_per_rank
        self._lanes: dict[tuple[int, ...], Lanes] = {}
        self._zero_copy: dict[tuple[int, int, int], torch.Tensor] = {}
        self._kernels: dict[tuple[int, int, int, int], Pairs] = {}
        self._comm_stream = CommStream(self._device)
        self._normal = NormalRounds(self._comm, self._device, self._memory, "max_tokens_per_rank")
        self._lost_rows = torch.zeros(1, dtype=torch.int64, device=self._device)

    def get_comm_stream(self) -> Any:
        """The ``torch.cuda.Stream`` that calls run on; None on the CPU."""
        return self._comm_stream.stream

    def check(self) -> None:
        """Waits for the calls so far.

        Raises:
            ProtocolMisuse: Rows were left out, because num_worst_tokens was too small for what came.
        """
        self._comm_stream.join()
        lost = int(self._lost_rows)
        if not lost:
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
        self._normal.close()
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
        check_here(self._device, topk_idx=topk_idx)
        with self._comm_stream.turn(previous_event, async_finish, allocate_on_comm_stream) as turn:
            found = count_routes(topk_idx.contiguous(), self.group_size, num_local)
            turn.share(topk_idx, found.per_rank, found.per_expert, found.in_rank)
        return found.per_rank, None, found.per_expert, found.in_rank, turn.event

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
        *,
        max_tokens_per_rank: int | None = None,
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
            topk_idx: [num_tokens, top_k] int64 ids of experts; -1 is "no expert". None: ids do not travel, and rows of
                experts are counted in a round of their own.
            topk_weights: [num_tokens, top_k] float32; with topk_idx.
            expert_alignment: The counts that are returned are rounded up to a multiple of it.
            num_worst_tokens: Rows of the result; with it the host does not wait. Rows beyond it are left out, counted,
                and reported by ``check``. 0: as many as arrived, for which the host waits.
            config: Not used.
            previous_event: What the communication stream waits for before; None: all that the current stream has got.
            async_finish: The current stream does not wait; the event says when the call is done.
            allocate_on_comm_stream: Results are memory of the communication stream, which they always are; needs
                previous_event and async_finish.
            max_tokens_per_rank: Most tokens that one rank sends; None: that of the buffer.

        Returns:
            Rows by source rank, then token, in new tensors; ids of this rank's experts, -1 for others; weights, 0 for
            others (both None without topk_idx); rows of each of this rank's experts (an empty list with
            num_worst_tokens); a handle; an event. Of a cached dispatch, the rows and the event alone.

        Raises:
            ValueError: An argument is wrong or not supported; nothing has happened on any rank.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        require_supported(num_tokens_per_rdma_rank=(num_tokens_per_rdma_rank, None))
        check_x(x)
        order = (previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            require_supported(topk_idx=(topk_idx, None), topk_weights=(topk_weights, None))
            again, event = self._send_again(x, handle, order)
            return again, None, None, None, None, event
        if is_token_in_rank is None or num_tokens_per_expert is None or (topk_idx is None) != (topk_weights is None):
            raise ValueError(
                "supported is a dispatch with is_token_in_rank and num_tokens_per_expert, with topk_idx and "
                "topk_weights or without both, or with the handle of one"
            )
        num_local = self._local(num_tokens_per_expert.numel())
        num_tokens = check_ids(topk_idx)[0] if topk_idx is not None else len(x[0] if isinstance(x, tuple) else x)
        check_goes(is_token_in_rank, num_tokens, self.group_size)
        check_count("num_worst_tokens", num_worst_tokens, 0)
        check_count("expert_alignment", expert_alignment, 1)
        capacity = self.max_tokens_per_rank if max_tokens_per_rank is None else max_tokens_per_rank
        check_count("max_tokens_per_rank", capacity, 1)
        routes = [] if topk_idx is None or topk_weights is None else [topk_idx, topk_weights]
        if topk_idx is not None:
            check_weights(topk_weights, *topk_idx.shape)
        check_here(self._device, **dict(zip(("topk_idx", "topk_weights"), routes, strict=False)))
        check_here(self._device, x=x, is_token_in_rank=is_token_in_rank, num_tokens_per_expert=num_tokens_per_expert)
        with self._comm_stream.turn(*order) as turn:
            rows, seen, layout = self._send(x, routes, is_token_in_rank, num_worst_tokens, capacity, num_local)
            per_expert: list[int] = []
            if not num_worst_tokens:
                told = None if seen is None else seen.per_expert
                counts = self._normal.counts(num_tokens_per_expert) if told is None else told
                per_expert = [-(-count // expert_alignment) * expert_alignment for count in counts.tolist()]
            ids, weights = (None, None) if seen is None else (seen.ids, seen.weights)
            turn.share(x, routes, is_token_in_rank, num_tokens_per_expert, rows, (ids, weights))
        return as_given(x, rows), ids, weights, per_expert, Handle(layout, self.rank), turn.event

    def _send(
        self,
        x: Rows,
        routes: list[torch.Tensor],
        is_token_in_rank: torch.Tensor,
        num_worst_tokens: int,
        capacity: int,
        num_local: int,
    ) -> tuple[list[torch.Tensor], Choices | None, Layout]:
        """Rows as they have arrived, and the choices of each where they travel."""
        parts = list(x) if isinstance(x, tuple) else [x]
        names = [*["x", "the scales of x"][: len(parts)], "topk_idx", "topk_weights"]
        ids = self._normal.ids(is_token_in_rank)
        carried = [*packed(parts), *(tensor.contiguous() for tensor in routes)]
        ticket, received = self._normal.put(ids, carried, names[: len(carried)], capacity)
        count = num_worst_tokens or int(received.num_tokens.sum())
        flat, choices = received.flat.payloads, None
        if routes:
            per_expert = None
            if not num_worst_tokens:
                per_expert = torch.zeros(num_local, dtype=torch.int32, device=self._device)
            choices = Choices(flat[-2], flat[-1], self.rank * num_local, num_local, per_expert)
        places, rows, seen = compact(received.num_tokens, capacity, count, flat[: len(parts)], self._lost_rows, choices)
        return rows, seen, Layout(ids, places, capacity, parts[0].shape[1], ticket)

    def _send_again(
        self, x: Rows, handle: Handle, order: tuple[EventOverlap | None, bool, bool]
    ) -> tuple[Rows, EventOverlap]:
        """A dispatch with the ranks of an earlier one."""
        layout = check_handle(handle, Handle, "dispatch").layout
        parts = list(x) if isinstance(x, tuple) else [x]
        with self._comm_stream.turn(*order) as turn:
            names = ["x", "the scales of x"][: len(parts)]
            layout.ticket, received = self._normal.put(layout.ids, packed(parts), names, layout.capacity)
            layout.hidden = parts[0].shape[1]
            taken = self._normal.again(layout, received)
            turn.share(parts, taken, layout.ids, layout.places.rows)
        return as_given(x, taken), turn.event

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
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sums each token's rows, without weights.

        Args:
            x: [rows, hidden] bfloat16, in the order of the rows that dispatch returned.
            handle: Of that dispatch, which may have been combined before.
            topk_weights: None, or [rows, top_k] float32: they are summed in the same way, in a round of their own.
            bias: None, or one or two tensors [num_tokens, hidden] that are added last (with two, rows travel as
                float32).
            config: Not used.
            previous_event: What the communication stream waits for before; None: all that the current stream has got.
            async_finish: The current stream does not wait; the event says when the call is done.
            allocate_on_comm_stream: Results are memory of the communication stream, which they always are; needs
                previous_event and async_finish.

        Returns:
            [num_tokens, hidden] bfloat16; [num_tokens, top_k] float32 with topk_weights, else None; an event.

        Raises:
            ValueError: An argument is wrong or not supported; nothing has happened on any rank.
            PeerTimeout: As ``AllToAll.combine``.
        """
        layout = check_handle(handle, Handle, "dispatch").layout
        check_x(x, (torch.bfloat16,))
        count = layout.places.rows.numel()
        check_rows_of(x, (count, layout.hidden), torch.bfloat16)
        if topk_weights is not None:
            check_weights(topk_weights, count)
        biases = check_biases(bias, (layout.ids.shape[0], layout.hidden))
        check_here(self._device, x=x, topk_weights=[] if topk_weights is None else topk_weights, bias=biases)
        with self._comm_stream.turn(previous_event, async_finish, allocate_on_comm_stream) as turn:
            combined = self._normal.sum_rows(layout, x, biases)
            weights = None if topk_weights is None else self._normal.sum_weights(layout, topk_weights)
            turn.share(x, topk_weights, biases, combined, weights, layout.ids, layout.places.position)
        return combined, weights, turn.event
