"""The low-latency half of DeepEP's ``Buffer``: every (token, expert) pair travels as a token of one expert.

A token's row goes to an expert once, also where its ids name the expert twice: each expert has room for one row of
every token. Combine then gives that row the weights of all these ids, which is what the token would get from as many
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from putget import Communicator, Payload, ProtocolMisuse, Received
from putget.adapters import placement
from putget.adapters.deep_ep.arguments import (
    check_count,
    check_given,
    check_handle,
    check_here,
    check_ids,
    check_weights,
    check_x,
)
from putget.adapters.deep_ep.rounds import (
    EventOverlap,
    Lanes,
    LowLatencyHandle,
    Rows,
    Ticket,
    no_hook,
    pairs_bytes,
)
from putget.adapters.deep_ep.stream import CommStream
from putget.adapters.engines import require_supported
from putget.adapters.rounds import Rounds
from putget.adapters.shared import SharedWorkspace
from putget.moe.pairs import Pairs, PlacedPairs


class LowLatencyCalls:
    """The base class of ``Buffer``."""

    rank: int
    group_size: int
    _comm: Communicator
    _device: torch.device
    _timeouts: tuple[float, float]
    _lanes: dict[tuple[int, ...], Lanes]
    _zero_copy: dict[tuple[int, int, int], torch.Tensor]
    _kernels: dict[tuple[int, int, int, int], Pairs]
    _comm_stream: CommStream

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing has to be cleaned."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None]]:
        """Puts each token's row once for each of its experts; rows arrive grouped by expert.

        Args:
            x: [num_tokens, hidden] bfloat16.
            topk_idx: [num_tokens, top_k] int64; -1 is "no expert". An expert that a token names twice gets its row
                once, which counts as one.
            num_max_dispatch_tokens_per_rank: Most tokens that one rank sends, the same on every rank.
            num_experts: Experts of all ranks together, a multiple of the number of ranks.
            cumulative_local_expert_recv_stats: [local experts] int32: what each expert got is added.
            dispatch_wait_recv_cost_stats: Must be None.
            use_fp8: Whether rows travel as FP8 with one scale for 128 values.
            round_scale: Whether scales are powers of two.
            use_ue8m0: Whether such scales are exponents, of one byte each, four in an int32.
            async_finish: The current stream does not wait; the event says when the call is done.
            return_recv_hook: Rows are sent and not waited for: results are there when the hook has been called, and no
                kernel of this call runs meanwhile. Not together with async_finish.

        Returns:
            [local experts, num_max_dispatch_tokens_per_rank * ranks, hidden] bfloat16, or such FP8 rows and their
            scales [..., hidden // 128] float32, or [..., hidden // 512] int32 (whose last two dimensions lie in
            column-major order); rows of each expert [local experts] int32; a handle; an event; a hook, which does
            nothing without return_recv_hook.

        Raises:
            ValueError: An argument is wrong or not supported; nothing has happened on any rank.
            PeerTimeout: As ``AllToAll.dispatch``.
        """
        require_supported(dispatch_wait_recv_cost_stats=(dispatch_wait_recv_cost_stats, None))
        num_tokens, top_k = check_ids(topk_idx)
        hidden = check_x(x, (torch.bfloat16,))
        check_count("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        if num_tokens > num_max_dispatch_tokens_per_rank:
            most = num_max_dispatch_tokens_per_rank
            raise ValueError(f"topk_idx has {num_tokens} tokens, num_max_dispatch_tokens_per_rank is {most}")
        if len(x) != num_tokens:
            raise ValueError(f"x has {len(x)} tokens, topk_idx has {num_tokens}")
        num_local = self._local(num_experts)
        check_here(self._device, x=x, topk_idx=topk_idx)
        scales = _scales_of(hidden, use_fp8, round_scale, use_ue8m0)
        counted = cumulative_local_expert_recv_stats
        if counted is not None:
            check_given("cumulative_local_expert_recv_stats", counted, (num_local,), torch.int32, self._device)
        capacity = num_max_dispatch_tokens_per_rank * self.group_size
        with self._comm_stream.turn_or_here(return_recv_hook, async_finish) as turn:
            lanes = self._pairs(num_max_dispatch_tokens_per_rank, top_k, hidden, num_experts)
            kernels = self._pair_kernels(num_max_dispatch_tokens_per_rank, top_k, hidden, num_experts)
            lane = lanes.begin()
            made = kernels.send(topk_idx.contiguous(), x.contiguous(), scales)
            pairs, sent = made.pairs, made.rows
            names = ["x", "tokens"] if scales is None else ["x", "the scales of x", "tokens"]
            room = kernels.room(sent)  # made here, and filled where the rows are there
            result = _as_deep_ep(room)
            shape = (num_local, capacity, hidden)
            ticket = Ticket(lane, lane.number)
            handle = LowLatencyHandle(None, pairs.view(num_tokens, top_k), shape, self.group_size, room, lanes, ticket)

            def arrive(received: Received) -> None:
                flat = received.flat
                kernels.place(room, flat.topk_ids, received.num_tokens, flat.payloads, counted)
                if isinstance(result, tuple):
                    result[1].copy_(room.rows[1])
                handle.place = room.place

            hook = no_hook
            if return_recv_hook:
                lane.rounds.dispatch_start(pairs, None, sent, names=names)
                hook = lane.rounds.later(lambda: arrive(lane.rounds.dispatch_finish()), keep=(pairs, sent))
            else:
                arrive(lane.rounds.dispatch(pairs, None, sent, names=names))
            turn.share(x, topk_idx, pairs, counted, room.rows, room.place, result)
        return result, room.counts, handle, turn.event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None]]:
        """Gets one row for each of a token's experts, and sums them with weights in float32.

        Args:
            x: [local experts, num_max_dispatch_tokens_per_rank * ranks, hidden] bfloat16, in the order of what dispatch
                returned.
            topk_idx: [num_tokens, top_k], that of the dispatch.
            topk_weights: [num_tokens, top_k] float32.
            handle: Of that dispatch.
            use_logfmt: Must be False.
            zero_copy: Takes the rows of ``get_next_low_latency_combine_buffer`` instead of x.
            async_finish: As for dispatch.
            return_recv_hook: As for dispatch.
            out: Where to write, contiguous [num_tokens, hidden] bfloat16.
            combine_wait_recv_cost_stats: Must be None.

        Returns:
            [num_tokens, hidden] bfloat16, an event, a hook, which does nothing without return_recv_hook.

        Raises:
            ValueError: An argument is wrong or not supported; nothing has happened on any rank.
            ProtocolMisuse: The hook of the handle's dispatch has not been called.
            PeerTimeout: As ``AllToAll.combine``.
        """
        require_supported(
            use_logfmt=(use_logfmt, False), combine_wait_recv_cost_stats=(combine_wait_recv_cost_stats, None)
        )
        check_handle(handle, LowLatencyHandle, "low_latency_dispatch")
        routes = tuple(handle.sent.shape)
        for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if tuple(tensor.shape) != routes:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the dispatch had {list(routes)}")
        source = self.get_next_low_latency_combine_buffer(handle) if zero_copy else x
        if tuple(source.shape) != handle.shape or source.dtype != torch.bfloat16:
            raise ValueError(
                f"x is {list(source.shape)} {source.dtype}, expected {list(handle.shape)} torch.bfloat16: the rows of "
                "each local expert, as dispatch returned them"
            )
        check_ids(topk_idx)
        check_weights(topk_weights, routes[0])
        if out is not None:
            check_given("out", out, (routes[0], handle.shape[2]), torch.bfloat16, self._device)
        check_here(self._device, x=source, topk_idx=topk_idx, topk_weights=topk_weights)
        if handle.place is None:
            raise ProtocolMisuse("low_latency_combine: the hook of this handle's dispatch has not been called")
        with self._comm_stream.turn_or_here(return_recv_hook, async_finish) as turn:
            rounds = self._pairs_under_way(handle)
            hidden = handle.shape[2]
            kernels = self._kernels_of(handle)
            kernels.take(source.contiguous(), handle.place, rounds.combine_input())
            combined = torch.empty(routes[0], hidden, dtype=torch.bfloat16, device=x.device) if out is None else out
            choices, weights = topk_idx.contiguous(), topk_weights.contiguous()

            def arrive(rows: torch.Tensor) -> None:
                kernels.sum(handle.sent, choices, weights, rows, combined)

            hook = no_hook
            if return_recv_hook:
                rounds.combine_start(None, name="x")
                hook = rounds.later(lambda: arrive(rounds.combine_finish()), keep=(choices, weights))
            else:
                arrive(rounds.combine(None, name="x"))
            turn.share(source, topk_idx, topk_weights, handle.place, handle.sent, combined)
        return combined, turn.event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """[local experts, num_max_dispatch_tokens_per_rank * ranks, hidden] bfloat16, for ``zero_copy``."""
        found = self._zero_copy.get(handle.shape)
        if found is None:
            found = torch.zeros(handle.shape, dtype=torch.bfloat16, device=self._device)
            self._zero_copy[handle.shape] = found
        return found

    # --- inside -------------------------------------------------------------------------------------------------------

    def _pairs_under_way(self, handle: LowLatencyHandle) -> Rounds:
        """The round that a handle's combine ends: its dispatch's, or one more."""
        if handle.ticket.is_open:
            return handle.ticket.lane.rounds
        lane = handle.lanes.begin()
        handle.ticket = Ticket(lane, lane.number)
        experts, _, hidden = handle.shape
        known = (handle.sent >= 0) & (handle.sent < experts * self.group_size)
        owners = torch.where(known, handle.sent // experts, -1)
        lane.rounds.reopen(owners.reshape(-1, 1), Payload((hidden,), torch.bfloat16))
        return lane.rounds

    def _pairs(self, max_tokens: int, top_k: int, hidden: int, num_experts: int) -> Lanes:
        """Low-latency rounds: every (token, expert) pair travels as a token of one expert."""
        max_pairs = max_tokens * top_k
        key = (max_tokens, top_k, hidden, num_experts)
        arguments = {
            "num_max_dispatch_tokens_per_rank": max_tokens,
            "the number of columns of topk_idx": top_k,
            "the length of rows of x": hidden,
            "num_experts": num_experts,
        }
        if key not in self._lanes:
            num_bytes = pairs_bytes(self.group_size, max_pairs, hidden)
            self._lanes[key] = Lanes(lambda: self._rounds(num_bytes, num_experts, max_pairs, hidden, arguments))
        return self._lanes[key]

    def _pair_kernels(self, max_tokens: int, top_k: int, hidden: int, num_experts: int) -> Pairs:
        """The kernels around rounds of ``_pairs``."""
        key = (max_tokens, top_k, hidden, num_experts)
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = Pairs(
                self._device,
                ep_size=self.group_size,
                ep_rank=self.rank,
                top_k=top_k,
                num_experts=num_experts // self.group_size,
                max_rows=max_tokens * top_k,
                capacity=max_tokens * self.group_size,
            )
        return found

    def _kernels_of(self, handle: LowLatencyHandle) -> Pairs:
        experts, rows, hidden = handle.shape
        return self._pair_kernels(rows // self.group_size, handle.sent.shape[1], hidden, experts * self.group_size)

    def _local(self, num_experts: int) -> int:
        if num_experts < 1 or num_experts % self.group_size:
            raise ValueError(f"num_experts is {num_experts}, expected a multiple of the {self.group_size} ranks")
        return num_experts // self.group_size

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

    def _rounds(
        self, num_bytes: int, num_experts: int, capacity: int, hidden: int, arguments: Mapping[str, int]
    ) -> Rounds:
        output = Payload((hidden,), torch.bfloat16)
        return Rounds(
            self._memory(num_bytes, arguments),
            num_experts=num_experts,
            top_k=1,
            max_tokens_per_rank=capacity,
            output=output,
            expert_to_rank=placement.even(num_experts, self.group_size, engine="DeepEP"),
        )


def _scales_of(hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> str | None:
    """The form of scales for ``Pairs.send``.

    Raises:
        ValueError: They do not go together, or rows have not the length for them.
    """
    if not use_fp8:
        return None
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 is True, round_scale is False: expected both, such scales are powers of two")
    multiple = 512 if use_ue8m0 else 128
    if hidden % multiple:
        raise ValueError(f"x has rows of {hidden}, FP8 needs a multiple of {multiple}; use_fp8=False sends bfloat16")
    return "exponents" if use_ue8m0 else "rounded" if round_scale else "exact"


def _as_deep_ep(room: PlacedPairs) -> Rows:
    """The experts' rows; of FP8 ones also their scales, in memory of their own in column-major order."""
    rows, *scales, _ = room.rows
    if not scales:
        return rows
    by_column = scales[0].transpose(1, 2)
    return rows, torch.empty_like(by_column, memory_format=torch.contiguous_format).transpose(1, 2)
