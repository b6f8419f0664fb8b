"""One rank's rounds with FlashInfer's payloads: what travels as what, and rows by source rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from putget import Payload, Received
from putget.adapters.flashinfer_layout import METAINFO_INDEX, row_offsets, table_offsets
from putget.adapters.rounds import Rounds, unquantised_row

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_MOST_PAYLOADS = 8
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
# The row that combine is prepared for where payloads do not say; the first combine says.
_ANY_ROW = Payload((8,), torch.bfloat16)


class RankRounds:
    """Rounds of one rank.

    Args:
        rounds: Where they run. Its ``output`` is set by what payloads stand for, and by the rows that combine gets.
        part: [size] uint8, the rank's part of FlashInfer's workspace, for rows by source; None: rows stay where they
            arrive, without a copy, and their first two dimensions are for flattening.
        size_per_rank: Bytes of that part, as FlashInfer counts them.
        ids_are_routes: Whether the payload of expert ids is always what dispatch routes by.
    """

    def __init__(
        self, rounds: Rounds, part: torch.Tensor | None, size_per_rank: int, *, ids_are_routes: bool = False
    ) -> None:
        self.rounds = rounds
        self._ids_are_routes = ids_are_routes
        self._part = part
        self._ep_size = rounds.shared.comm.size
        self._tables = table_offsets(self._ep_size, rounds.max_tokens_per_rank, rounds.num_stats)
        slots = self._ep_size * rounds.max_tokens_per_rank
        self._room = (size_per_rank - self._tables[-1]) // slots  # bytes of one token's rows, both ways
        device, capacity = rounds.shared.device, rounds.max_tokens_per_rank
        self._slots = torch.arange(capacity, dtype=torch.int32, device=device)
        self._filled = torch.zeros(self._ep_size, capacity, dtype=torch.bool, device=device)
        # Made here: what is allocated after a peer's kernel has begun to wait might wait for that kernel.
        self._zeros = {word: torch.zeros((), dtype=word, device=device) for _, word in _WORDS}
        self._ids: dict[int, torch.Tensor] = {}  # what slots without a token get
        self.received: Received | None = None
        self.stats: torch.Tensor | None = None  # [ep_size, num_stats] int32 of the last dispatch that was given some
        self._counts = torch.zeros(self._ep_size, dtype=torch.int32, device=device)  # rows of the last dispatch
        self.combine_offset = self._tables[-1]  # where rows of combine begin in the part

    def check(self, name: str, ids: Any) -> None:
        """Raises ValueError unless these are ids that dispatch can route by."""
        top_k = self.rounds.top_k
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.int32:
            came = f"{list(ids.shape)} {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ValueError(f"{name}: {came} came, expected an int32 tensor [num_tokens, {top_k}]")

    def dispatch(
        self,
        ids: torch.Tensor,
        payloads: Sequence[Any],
        rows: int,
        *,
        invalid: int = -1,
        ids_index: int | None = None,
        stats: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Routes by ids, and carries the payloads.

        Args:
            ids: [num_tokens, top_k] int32.
            payloads: [num_tokens, *] tensors.
            rows: Slots of each source that this rank looks at.
            invalid: What slots without a token get in the payload of ``ids_index``; elsewhere, in rows by source, they
                are zeros.
            ids_index: Which payload that is.
            stats: [num_stats] int32, what this rank tells all.

        Returns:
            One tensor [ep_size, rows, *] for each payload.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse, PeerTimeout, CapacityExceeded: As ``Rounds.dispatch``.
        """
        self.check("token_selected_experts", ids)
        _check_number(payloads)
        if ids_index is not None:
            self.check("expert ids in input_payloads", payloads[ids_index])
            if self._ids_are_routes and payloads[ids_index] is not ids:
                raise ValueError(
                    f"input_payloads[{ids_index}] is another tensor than token_selected_experts; with ids_are_routes "
                    "it is the same one"
                )
        where = self._place(payloads, rows)
        weights, carried, ids_travel = self._carried(payloads, ids_index)
        received = self.rounds.dispatch(
            ids,
            None if weights is None else payloads[weights],
            [payloads[i] for i in carried],
            names=[f"input_payloads[{i}]" for i in carried],
            max_rows=rows,
            stats=stats,
        )
        self.stats = None if stats is None else received.stats
        self.received, self._counts = received, received.num_tokens
        flat = dict(zip(carried, received.flat.payloads, strict=True))
        if weights is not None:
            flat[weights] = received.flat.topk_weights
        if not ids_travel and ids_index is not None:
            flat[ids_index] = received.flat.topk_ids
        found = [flat[i] for i in range(len(payloads))]
        if where is None:
            if ids_index is not None and (ids_travel or invalid != -1):
                found[ids_index] = self._with_invalid(found[ids_index], rows, invalid)
            return [tensor.view(self._ep_size, rows, *tensor.shape[1:]) for tensor in found]
        offsets, self.combine_offset = where
        is_row = self._is_row(rows)
        return [
            self._by_source(tensor, rows, offset, is_row, invalid if index == ids_index else None)
            for index, (tensor, offset) in enumerate(zip(found, offsets, strict=True))
        ]

    def prepare(self, ids: torch.Tensor, payloads: Sequence[Any]) -> None:
        """Makes what a dispatch of such rows needs. Collective at the first call.

        Raises:
            ValueError, PeerTimeout: As ``dispatch``.
        """
        self.check("token_selected_experts", ids)
        _check_number(payloads)
        _, carried, _ = self._carried(payloads, None)
        names = [f"input_payloads[{i}]" for i in carried]
        self.rounds.prepare(ids, None, [payloads[i] for i in carried], names=names)

    def _carried(self, payloads: Sequence[Any], ids_index: int | None) -> tuple[int | None, list[int], bool]:
        """Which payload travels as router weights, which travel as rows, and whether the expert ids are among those.

        Ids by which dispatch routes come with each row anyway, and slots without a token have -1 then. Ranks have to
        decide alike, so callers say it: some route a dummy row on ranks without tokens, whose payload says "no expert".
        """
        weights = next((i for i, payload in enumerate(payloads) if self._are_weights(payload)), None)
        routed = ids_index if self._ids_are_routes else None
        carried = [i for i in range(len(payloads)) if i not in (weights, routed)]
        if not carried:
            carried, weights, routed = list(range(len(payloads))), None, None
        if self.rounds.output is None:
            self.rounds.output = _row_of(payloads, self._room)
        return weights, carried, routed is None

    def _is_row(self, rows: int) -> torch.Tensor:
        """[ep_size, rows, 1] bool: whether a slot of the last dispatch has a token."""
        return torch.lt(self._slots[:rows], self._counts[:, None], out=self._filled[:, :rows])[:, :, None]

    def sanitize(self, ids: Any, invalid: int) -> None:
        """Writes an id into the slots without a token of what dispatch returned.

        Raises:
            ValueError: These are no such ids.
        """
        rows = self.rounds.max_rows
        lead = (self._ep_size, rows)
        if not isinstance(ids, torch.Tensor) or tuple(ids.shape[:2]) != lead or ids.dtype != torch.int32:
            came = f"{list(ids.shape)} {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ValueError(f"expert_ids: {came} came, expected [{lead[0]}, {lead[1]}, top_k] torch.int32")
        torch.where(self._is_row(rows), ids, self._id(invalid), out=ids)

    def _id(self, invalid: int) -> torch.Tensor:
        if invalid not in self._ids:
            self._ids[invalid] = torch.full((), invalid, dtype=torch.int32, device=self.rounds.shared.device)
        return self._ids[invalid]

    def _place(self, payloads: Sequence[Any], rows: int) -> tuple[list[int], int] | None:
        """Where the rows of each payload go in the part, and where those of combine begin."""
        if self._part is None:
            return None
        tensors = [payload for payload in payloads if isinstance(payload, torch.Tensor) and payload.dim()]
        if len(tensors) < len(payloads):
            return None  # refused by whoever names it
        offsets, end = row_offsets(self._tables[-1], self._ep_size * rows, tensors)
        if end > self._part.numel():
            raise ValueError(
                f"the workspace has {self._part.numel()} bytes a rank, needed are {end} for {rows} rows of each of "
                f"{self._ep_size} ranks"
            )
        return offsets, end

    def _with_invalid(self, flat: torch.Tensor, rows: int, invalid: int) -> torch.Tensor:
        """Ids as they lie, with this one in slots without a token."""
        is_row = (self._slots[:rows, None] < self._counts).view(-1, 1)
        return torch.where(is_row, flat, self._id(invalid))

    def _by_source(
        self, flat: torch.Tensor, rows: int, offset: int, is_row: torch.Tensor, invalid: int | None
    ) -> torch.Tensor:
        """Copies rows into the part, by source rank."""
        assert self._part is not None
        row_bytes = math.prod(flat.shape[1:]) * flat.element_size()
        place = self._part[offset : offset + self._ep_size * rows * row_bytes]
        alike = math.gcd(row_bytes, place.data_ptr())
        word = next(dtype for size, dtype in _WORDS if alike % size == 0) if invalid is None else torch.int32
        filling = self._zeros[word] if invalid is None else self._id(invalid)
        source = flat.view(rows, self._ep_size, -1).view(torch.uint8).view(word).transpose(0, 1)
        torch.where(is_row, source, filling, out=place.view(word).view(self._ep_size, rows, -1))
        return place.view(flat.dtype).view(self._ep_size, rows, *flat.shape[1:])

    def combine(self, payload: Any, rows: int, *, low_precision: bool, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gets rows back and sums them. Rows of another kind than the last combine's take a round more, the first time.

        Args:
            payload: [ep_size, rows, *] or [ep_size * rows, *], in the order of what dispatch returned.
            rows: Those of the dispatch.
            low_precision: Whether they travel as FP8.
            out: Where to write.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: No dispatch came before.
            PeerTimeout: As ``AllToAll.combine``.
        """
        rounds = self.rounds
        rounds.require_open("combine")
        flat = self._check_rows(payload, rows)
        row = Payload(tuple(flat.shape[1:]), flat.dtype)
        num_tokens = rounds.all_to_all.target_ranks.shape[0]
        check_output(out, (num_tokens, *flat.shape[1:]), flat.dtype, flat.device)
        if not rounds.takes(row, low_precision):
            if self._part is None:
                flat = flat.clone()  # it may lie where peers write in the round that follows
            rounds.reopen(rounds.routes(), row, max_rows=rows, low_precision=low_precision)
        combined = rounds.combine(flat, name="payload", out=out, by_source=self._part is not None)
        self.received = self.stats = None
        return combined

    def _check_rows(self, payload: Any, rows: int) -> torch.Tensor:
        """As [ep_size * rows, *]."""
        if rows != self.rounds.max_rows:
            raise ValueError(
                f"runtime_max_tokens_per_rank is {rows}, the last dispatch gave {self.rounds.max_rows} rows a rank"
            )
        if not isinstance(payload, torch.Tensor):
            raise ValueError(f"payload is a {type(payload).__name__}, expected a tensor")
        count, device = self._ep_size * rows, self.rounds.shared.device
        lead = 2 if tuple(payload.shape[:2]) == (self._ep_size, rows) and payload.dim() > 2 else 1
        if math.prod(payload.shape[:lead]) != count or payload.dim() <= lead:
            raise ValueError(
                f"payload has shape {list(payload.shape)}, expected [{self._ep_size}, {rows}, hidden_size]: a row "
                "for each that the last dispatch returned, in the same order"
            )
        if payload.dtype not in _SUMMED:
            raise ValueError(f"payload has dtype {payload.dtype}, supported are {', '.join(map(str, _SUMMED))}")
        if payload.device != device or not payload.is_contiguous():
            raise ValueError(
                f"payload is on {payload.device} with strides {list(payload.stride())}, expected a contiguous "
                f"tensor on {device}"
            )
        return payload.view(count, *payload.shape[lead:])

    def tables(self) -> torch.Tensor:
        """The part with what ``metainfo`` points to: rows sent and received, and routes, of the last dispatch."""
        part = self._part if self._part is not None else self.rounds.shared.local_rows(self._tables[-1])
        ranks, slots = self.rounds.all_to_all.target_ranks, self.rounds.all_to_all.target_slots
        counts = [(ranks == rank).sum() for rank in range(self._ep_size)]
        for name, values in (
            ("SEND_COUNTERS", torch.stack(counts).int()),
            ("RECV_COUNTERS", self._counts),
            ("TOPK_TARGET_RANKS", ranks.flatten()),
            ("TOPK_SEND_INDICES", slots.flatten()),
        ):
            offset = self._tables[METAINFO_INDEX[f"{name}_OFFSET_INDEX"]]
            part[offset : offset + 4 * values.numel()].view(torch.int32).copy_(values)
        return part

    def _are_weights(self, payload: Any) -> bool:
        """Whether these rows fit where router weights travel."""
        shape = (self.rounds.top_k,)
        return (
            isinstance(payload, torch.Tensor) and payload.dtype == torch.float32 and tuple(payload.shape[1:]) == shape
        )


def _check_number(payloads: Sequence[Any]) -> None:
    """Raises ValueError unless there are as many payloads as FlashInfer takes."""
    if not 1 <= len(payloads) <= _MOST_PAYLOADS:
        raise ValueError(f"input_payloads has {len(payloads)} tensors, expected 1 to {_MOST_PAYLOADS} payloads")


def _row_of(payloads: Sequence[Any], room: int) -> Payload:
    """The row that experts return for these: what the first one that says so stands for, if there is room for it."""
    kinds = [Payload(tuple(p.shape[1:]), p.dtype) for p in payloads if isinstance(p, torch.Tensor) and p.dim() == 2]
    for kind in kinds:
        with contextlib.suppress(ValueError):
            row = unquantised_row(kind)
            return row if row.row_bytes + sum(payload.row_bytes for payload in kinds) <= room else _ANY_ROW
    return _ANY_ROW


def check_output(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError unless combine can write here: a contiguous tensor of this shape, or None."""
    if out is None:
        return
    if not isinstance(out, torch.Tensor) or out.device.type != device.type:
        came = f"device={out.device}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(f"output must be a {device.type.upper()} tensor, got {came}")
    if not out.is_contiguous():
        raise ValueError(f"output must be contiguous, got stride={out.stride()}")
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"output is {list(out.shape)} {out.dtype}, expected {list(shape)} {dtype}")
