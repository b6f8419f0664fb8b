"""One rank's rounds with FlashInfer's payloads: what travels as what, and rows by source rank."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from putget import Payload, Received
from putget.adapters.flashinfer.layout import METAINFO_INDEX, row_offsets, table_offsets
from putget.adapters.rounds import Rounds, unquantised_row
from putget.looks import kinds_of, looks_of
from putget.moe.by_source import BySource, fill_empty

_MOST_PAYLOADS = 8
# Kinds of dispatches whose plans one layer keeps: more differ by the slots that they look at, as prefills do.
_MOST_PLANS = 64
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
# The row that combine is prepared for where payloads do not say; the first combine says.
_ANY_ROW = Payload((8,), torch.bfloat16)


class Plan:
    """The part of a dispatch that is the same for all dispatches of rows of some kinds.

    Args:
        weights: Which payload travels as router weights.
        carried: Which travel as rows.
        routed: Which is the ids by which dispatch routes.
        filled: Which gets ``invalid`` in slots without a token.
        invalid: An expert id.
        places: Where each payload goes, [ep_size, rows, *]; None: it stays where it arrives.
        combine_offset: Where rows of combine begin in the rank's part.
    """

    def __init__(
        self,
        weights: int | None,
        carried: list[int],
        routed: int | None,
        filled: int | None,
        invalid: int,
        places: list[torch.Tensor] | None,
        combine_offset: int,
    ) -> None:
        self.weights, self.carried, self.routed = weights, carried, routed
        self.names = [f"input_payloads[{i}]" for i in carried]
        self.combine_offset = combine_offset
        self._filled, self._invalid, self._places = filled, invalid, places
        self._flat: weakref.ref[object] | None = None  # the rows for which the next two were made
        self._made: list[tuple[BySource | None, list[torch.Tensor]]] = []

    def deliver(self, received: Received, rows: int) -> list[torch.Tensor]:
        """One tensor [ep_size, rows, *] for each payload."""
        flat = received.flat
        if self._flat is None or self._flat() is not flat:
            self._made = made = [self._point(received, rows)]
            # They show the workspace, whose memory goes when it is closed.
            self._flat = weakref.ref(flat, lambda _: made.clear())
        ((copy, delivered),) = self._made
        if copy is not None:
            copy.run()
        return list(delivered)

    def _point(self, received: Received, rows: int) -> tuple[BySource | None, list[torch.Tensor]]:
        """Makes the copy that brings the rows to their places, and the tensors that are delivered."""
        flat = dict(zip(self.carried, received.flat.payloads, strict=True))
        if self.weights is not None:
            flat[self.weights] = received.flat.topk_weights
        if self.routed is not None:
            flat[self.routed] = received.flat.topk_ids
        found = [flat[i] for i in range(len(flat))]
        counts, word = received.num_tokens, self._invalid
        if self._places is not None:
            return BySource(counts, found, self._places, rows, filled=self._filled, word=word), self._places
        delivered = [tensor.view(counts.numel(), rows, *tensor.shape[1:]) for tensor in found]
        if self._filled is None:
            return None, delivered
        at = self._filled
        delivered[at] = torch.empty_like(delivered[at])
        copy = BySource(counts, [found[at]], [delivered[at]], rows, filled=0, word=word, in_order_of_arrival=True)
        return copy, delivered


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
        self._plans: dict[object, Plan] = {}
        self._called: object = None  # the form of the last dispatch
        self._planned: Plan  # for it
        self.received: Received | None = None
        self.stats: torch.Tensor | None = None  # [ep_size, num_stats] int32 of the last dispatch that was given some
        self._counts = torch.zeros(
            self._ep_size, dtype=torch.int32, device=rounds.shared.device
        )  # of the last dispatch
        self.combine_offset = self._tables[-1]  # where rows of combine begin in the part
        self._checked: object = None  # the form of the last rows for combine that passed their check
        self._row = _ANY_ROW  # of those

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
        looks = looks_of(payloads)
        call = (looks, rows, invalid, ids_index)
        if looks is None or call != self._called:
            self._called = None
            self._planned = self._plan_for(payloads, rows, invalid, ids_index)
        plan = self._planned
        if plan.routed is not None and payloads[plan.routed] is not ids:
            raise ValueError(
                f"input_payloads[{plan.routed}] is another tensor than token_selected_experts; with ids_are_routes "
                "it is the same one"
            )
        received = self.rounds.dispatch(
            ids,
            None if plan.weights is None else payloads[plan.weights],
            [payloads[i] for i in plan.carried],
            names=plan.names,
            max_rows=rows,
            stats=stats,
        )
        self._called = call
        self.stats = None if stats is None else received.stats
        self.received, self._counts = received, received.num_tokens
        self.combine_offset = plan.combine_offset
        return plan.deliver(received, rows)

    def _plan_for(self, payloads: Sequence[Any], rows: int, invalid: int, ids_index: int | None) -> Plan:
        """Finds or makes the plan of such rows; raises as ``dispatch``."""
        key = (kinds_of(payloads), rows, invalid, ids_index)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(payloads, rows, invalid, ids_index)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _plan(self, payloads: Sequence[Any], rows: int, invalid: int, ids_index: int | None) -> Plan:
        _check_number(payloads)
        if ids_index is not None:
            self.check("expert ids in input_payloads", payloads[ids_index])
        places, combine_offset = self._places(payloads, rows)
        weights, carried, routed = self._carried(payloads, ids_index)
        fills_ids = ids_index is not None and (routed is None or invalid != -1 or places is not None)
        return Plan(weights, carried, routed, ids_index if fills_ids else None, invalid, places, combine_offset)

    def prepare(self, ids: torch.Tensor, payloads: Sequence[Any]) -> None:
        """Makes what a dispatch of such rows needs. Collective at the first call.

        Raises:
            ValueError, PeerTimeout: As ``dispatch``.
        """
        rows, names = self._rows(ids, payloads, None)
        self.rounds.prepare(ids, None, rows, names=names)

    def require_made(
        self, ids: torch.Tensor, payloads: Sequence[Any], active: tuple[bool, ...], *, ids_index: int | None = None
    ) -> None:
        """Refuses a dispatch of such rows among some ranks alone, if none of all ranks came before.

        Raises:
            ValueError: It is one, or an argument is wrong; nothing has happened on any rank.
        """
        if not all(active):
            rows, names = self._rows(ids, payloads, ids_index)
            self.rounds.require_made(ids, rows, active, names=names)

    def _rows(
        self, ids: torch.Tensor, payloads: Sequence[Any], ids_index: int | None
    ) -> tuple[list[torch.Tensor], list[str]]:
        """The payloads that travel as rows, and their names."""
        self.check("token_selected_experts", ids)
        _check_number(payloads)
        _, carried, _ = self._carried(payloads, ids_index)
        return [payloads[i] for i in carried], [f"input_payloads[{i}]" for i in carried]

    def _carried(self, payloads: Sequence[Any], ids_index: int | None) -> tuple[int | None, list[int], int | None]:
        """Which payload travels as router weights, which travel as rows, and which comes with the routes.

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
        return weights, carried, routed

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
        whole = ids.contiguous()
        fill_empty(self._counts, whole, rows, invalid)
        if whole is not ids:
            ids.copy_(whole)

    def _places(self, payloads: Sequence[Any], rows: int) -> tuple[list[torch.Tensor] | None, int]:
        """Where the rows of each payload go in the part, by source rank, and where those of combine begin in it.

        None: they stay where they arrive.
        """
        tensors = [payload for payload in payloads if isinstance(payload, torch.Tensor) and payload.dim()]
        if self._part is None or len(tensors) < len(payloads):  # such a payload is refused by a check that names it
            return None, self._tables[-1]
        offsets, end = row_offsets(self._tables[-1], self._ep_size * rows, tensors)
        if end > self._part.numel():
            raise ValueError(
                f"the workspace has {self._part.numel()} bytes a rank, needed are {end} for {rows} rows of each of "
                f"{self._ep_size} ranks"
            )
        places = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            shape = (self._ep_size, rows, *tensor.shape[1:])
            place = self._part[offset : offset + math.prod(shape) * tensor.element_size()]
            places.append(place.view(tensor.dtype).view(shape))
        return places, end

    def combine(self, payload: Any, rows: int, *, low_precision: bool, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gets rows back and sums them. Rows of another kind than the last combine's take a round more, the first time.

        Args:
            payload: [ep_size, rows, *] or [ep_size * rows, *], in the order of what dispatch returned.
            rows: Those of the dispatch.
            low_precision: Whether they travel as FP8.
            out: Where to write.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            PeerTimeout: As ``AllToAll.combine``.
        """
        rounds = self.rounds
        call = (looks_of((payload,)), rows, rounds.max_rows)
        if call[0] is None or call != self._checked:
            self._checked = None
            flat = self._check_rows(payload, rows)
            self._row = Payload(tuple(flat.shape[1:]), flat.dtype)
            self._checked = call
        row = self._row
        if out is not None:
            check_output(out, (rounds.all_to_all.num_tokens, *row.shape), row.dtype, payload.device)
        if not rounds.takes(row, low_precision):
            if self._part is None:
                payload = payload.clone()  # it may lie where peers write in the round that follows
            rounds.reopen(rounds.routes(), row, max_rows=rows, low_precision=low_precision)
        combined = rounds.combine(payload, name="payload", out=out, by_source=self._part is not None)
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
