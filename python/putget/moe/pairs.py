"""(token, expert) pairs that travel as tokens of one expert each: the kernels before, between and behind their rounds.

DeepEP's low-latency calls have this form. Each method is one kernel on the current stream, or on CPU is done when it
returns; sizes that only the device knows stay there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from putget import _abi, _abi_moe
from putget.memory.workspace import current_stream

_FORMS = {None: 0, "exact": 1, "rounded": 2, "exponents": 3}  # putget_scale_form


@dataclass(frozen=True)
class SentPairs:
    """Rows of a dispatch of pairs.

    Attributes:
        pairs: [num_tokens * top_k, 1] int32: the ids, an expert that a token names twice once, with -1 for the others.
        rows: [num_tokens * top_k, *] for each payload, and behind them the tokens' numbers, int32 [*, 1].
    """

    pairs: torch.Tensor
    rows: list[torch.Tensor]


@dataclass(frozen=True)
class PlacedPairs:
    """Room for received pairs by expert, which ``Pairs.place`` fills.

    Attributes:
        rows: For each payload [num_experts, capacity, *]; rows behind an expert's own are undefined.
        counts: [num_experts] int32, rows of each expert.
        place: [max_rows * ep_size] int32: where each received row is, expert * capacity + row; -1 for none.
        source_rows: [num_experts * capacity] int32, the inverse; undefined behind an expert's rows.
    """

    rows: list[torch.Tensor]
    counts: torch.Tensor
    place: torch.Tensor
    source_rows: torch.Tensor


class Pairs:
    """Pairs of one shape, of one rank.

    Args:
        device: Where the rows live.
        ep_size: Ranks of the group.
        ep_rank: This rank.
        top_k: Experts of a token.
        num_experts: Experts of a rank.
        max_rows: Most pairs of a source rank.
        capacity: Rows of an expert.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        ep_size: int,
        ep_rank: int,
        top_k: int,
        num_experts: int,
        max_rows: int,
        capacity: int,
    ) -> None:
        self._device = device
        self._top_k = top_k
        self._received = max_rows * ep_size
        self._shape = (num_experts, capacity)
        where = {"device": _abi.DEVICE_CUDA if device.type == "cuda" else _abi.DEVICE_CPU}
        where["ordinal"] = device.index or 0
        self._send = _abi_moe.MoeSendPairsArgs(**where, top_k=top_k)
        self._place = _abi_moe.MoePlacePairsArgs(
            **where,
            ep_size=ep_size,
            max_rows=max_rows,
            first_expert=ep_rank * num_experts,
            num_experts=num_experts,
            capacity=capacity,
        )
        self._sum = _abi_moe.MoeSumPairsArgs(**where, top_k=top_k)
        self._take = _abi_moe.MoeExpandArgs(**where, num_source_rows=num_experts * capacity, num_payloads=1)
        self._take.valid.limit = self._received

    def send(self, topk_idx: torch.Tensor, x: torch.Tensor, scales: str | None = None) -> SentPairs:
        """Makes the rows of a dispatch of pairs.

        Args:
            topk_idx: [num_tokens, top_k] int32 or int64, contiguous; -1 is "no expert".
            x: Contiguous [num_tokens, hidden].
            scales: None: rows travel as they are. "exact", "rounded" or "exponents": bfloat16 rows become
                float8_e4m3fn, and each 128 values have a scale: float32 [hidden / 128], the same rounded up to a power
                of two, or the exponents of such powers, biased by 127, four to an int32. hidden is a multiple of 128,
                of 512 with exponents.

        """
        args, num_tokens = self._send, topk_idx.shape[0]
        count = num_tokens * self._top_k
        pairs, tokens = torch.empty(2, count, 1, dtype=torch.int32, device=self._device)
        rows = [x.new_empty(count, *x.shape[1:])] if scales is None else self._quantised(count, x.shape[1], scales)
        args.ids, args.pairs, args.tokens = topk_idx.data_ptr(), pairs.data_ptr(), tokens.data_ptr()
        args.num_tokens, args.ids_are_64bit = num_tokens, topk_idx.dtype == torch.int64
        args.scale_form, args.elements = _FORMS[scales], x.shape[1]
        _name_rows(args, [x], rows[:1], num_tokens)
        if scales is not None:
            args.to_rows[1] = rows[1].data_ptr()
        self._run("putget_moe_send_pairs", args)
        return SentPairs(pairs, [*rows, tokens])

    def _quantised(self, count: int, hidden: int, scales: str) -> list[torch.Tensor]:
        multiple = 512 if scales == "exponents" else 128
        codes = torch.empty(count, hidden, dtype=torch.float8_e4m3fn, device=self._device)
        dtype = torch.int32 if scales == "exponents" else torch.float32
        return [codes, torch.empty(count, hidden // multiple, dtype=dtype, device=self._device)]

    def room(self, payloads: Sequence[torch.Tensor]) -> PlacedPairs:
        """Memory for a round's received pairs; payloads give the kinds of rows."""
        experts, capacity = self._shape
        place = torch.empty(self._received, dtype=torch.int32, device=self._device)
        source_rows, counts = torch.split(
            torch.empty(experts * (capacity + 1), dtype=torch.int32, device=self._device), [experts * capacity, experts]
        )
        rows = [part.new_empty(experts, capacity, *part.shape[1:]) for part in payloads]
        return PlacedPairs(rows, counts, place, source_rows)

    def place(
        self,
        room: PlacedPairs,
        ids: torch.Tensor,
        num_tokens: torch.Tensor,
        rows: Sequence[torch.Tensor],
        added: torch.Tensor | None = None,
    ) -> None:
        """Copies the received pairs to their experts, in the order of source ranks and tokens.

        Args:
            room: Of ``room``.
            ids: [max_rows * ep_size, 1] int32, as they arrived.
            num_tokens: [ep_size] int32, pairs of each source.
            rows: Flat [max_rows * ep_size, *] for each payload.
            added: [num_experts] int32, to which counts are added; or None.
        """
        args = self._place
        args.ids, args.num_tokens = ids.data_ptr(), num_tokens.data_ptr()
        args.place, args.source_rows = room.place.data_ptr(), room.source_rows.data_ptr()
        args.counts, args.added = room.counts.data_ptr(), None if added is None else added.data_ptr()
        _name_rows(args, rows, room.rows, self._received)
        self._run("putget_moe_place_pairs", args)

    def take(self, rows: torch.Tensor, place: torch.Tensor, into: torch.Tensor) -> None:
        """Copies the experts' rows [num_experts, capacity, *] to where the pairs came from, flat [received, *]."""
        args = self._take
        args.source_rows = place.data_ptr()
        args.from_rows[0], args.to_rows[0] = rows.data_ptr(), into.data_ptr()
        args.row_bytes[0] = into.nbytes // self._received
        self._run("putget_moe_expand", args)

    def sum(
        self,
        pairs: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Adds up each token's rows in float32, each with the weights of all choices that name its expert.

        Args:
            pairs: Of ``send``.
            topk_idx: That of ``send``.
            weights: [num_tokens, top_k] float32, contiguous.
            rows: [num_tokens * top_k, hidden] bfloat16.
            out: [num_tokens, hidden] bfloat16, contiguous.
        """
        args = self._sum
        args.pairs, args.ids, args.weights = pairs.data_ptr(), topk_idx.data_ptr(), weights.data_ptr()
        args.rows, args.out = rows.data_ptr(), out.data_ptr()
        args.num_tokens, args.elements = out.shape
        args.ids_are_64bit = topk_idx.dtype == torch.int64
        self._run("putget_moe_sum_pairs", args)

    def _run(self, name: str, args: Any) -> None:
        args.stream = current_stream(self._device)
        _abi.call(name, ctypes.byref(args))


def _name_rows(args: Any, rows: Sequence[torch.Tensor], into: Sequence[torch.Tensor], count: int) -> None:
    """Tells a call which rows it copies; count is that of `rows`."""
    args.num_payloads = len(rows)
    for index, (source, target) in enumerate(zip(rows, into, strict=False)):
        args.from_rows[index], args.to_rows[index] = source.data_ptr(), target.data_ptr()
        args.row_bytes[index] = source.nbytes // max(count, 1)
