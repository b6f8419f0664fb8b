"""Rounds of one layer: rows in whatever recipe the engine chose come in, contiguous tensors go out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from putget import AllToAll, ExpertMajor, Payload, ProtocolMisuse, PutgetError, Received
from putget.adapters.placement import Table
from putget.adapters.shared import Recipe, SharedWorkspace, combine_dtype_of
from putget.looks import looks_of

# Element types with two values a byte.
_PACKED = {torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8)}
_ONE_BYTE = {torch.float8_e4m3fn, torch.float8_e5m2}
_WHOLE = {torch.bfloat16, torch.float16, torch.float32}
# Bytes of a row where a dispatch has no rows: those of one access.
_NOTHING_BYTES = 16


def unquantised_row(row: Payload) -> Payload:
    """The row that experts return for a dispatched row: bfloat16 for quantised ones.

    Raises:
        ValueError: This kind of row does not say; pass hidden_size.
    """
    if len(row.shape) == 1:
        (length,) = row.shape
        if row.dtype in _WHOLE:
            return row
        if row.dtype in _ONE_BYTE:
            return Payload((length,), torch.bfloat16)
        if row.dtype in _PACKED:
            return Payload((2 * length,), torch.bfloat16)
    raise ValueError(
        f"rows of {row} do not say what the experts return; known are bfloat16, float16, float32, float8 and packed "
        "4-bit rows. Pass hidden_size"
    )


def check_rows(name: str, value: Any, num_tokens: int, device: torch.device) -> Payload:
    """The kind of one tensor's rows.

    Raises:
        ValueError: It is not a contiguous tensor [num_tokens, ...] on the device; the message names it.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, expected a tensor")
    if value.dim() < 1 or value.shape[0] != num_tokens:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected {num_tokens} rows")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, expected {device}")
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {list(value.stride())}, expected a contiguous tensor")
    return Payload(tuple(value.shape[1:]), value.dtype)


class Rounds:
    """Dispatch and combine of one layer on memory that it shares with others.

    The all-to-all for a kind of rows is made at the first dispatch of that kind, which is collective: all ranks pass
    the same kinds of rows, also those with zero tokens.

    Args:
        shared: The memory.
        num_experts: Physical expert slots of all ranks together.
        top_k: Experts of a token.
        max_tokens_per_rank: Most tokens that one rank sends in one round.
        output: The row that experts return; None: what the first payload's rows stand for.
        expert_to_rank: Owner of each expert, as the engine places them (``putget.adapters.placement``); None: it is set
            before the first dispatch.
        combine_dtype: As given to ``putget.AllToAll``.
        num_stats: Likewise.
    """

    def __init__(
        self,
        shared: SharedWorkspace,
        *,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        output: Payload | None,
        expert_to_rank: Table | None,
        combine_dtype: torch.dtype | None = None,
        num_stats: int = 0,
    ) -> None:
        self.shared = shared
        self.num_experts = num_experts
        self.top_k = top_k
        self.max_tokens_per_rank = max_tokens_per_rank
        self.output = output
        self.expert_to_rank = expert_to_rank
        self.combine_dtype = combine_dtype
        self.num_stats = num_stats
        self.max_rows = 0
        self._by_rank: tuple[int, Table] | None = None  # while routes are dispatched: ranks are the experts
        self._combined = self._next_combined = output
        self._combine_dtype = combine_dtype
        self._nothing: torch.Tensor | None = None
        self._all_to_all: AllToAll | None = None
        self._zeros: torch.Tensor | None = None
        self._finish: Callable[[], None] | None = None  # of a start half
        self._kept: object = None  # tensors between the halves
        self._taken: object = None  # the form of the last rows for combine that passed their check
        self._taken_shape = torch.Size()
        self._begun: object = None  # the form of the last dispatch that passed its checks
        self._begun_to: Table | None = None  # the table of experts of that dispatch
        self._begun_on: AllToAll | None = None

    @property
    def is_open(self) -> bool:
        """Whether a dispatch waits for its combine."""
        return self.shared.open_round is self

    @property
    def all_to_all(self) -> AllToAll:
        """The all-to-all of the last dispatch.

        Raises:
            ProtocolMisuse: There was none.
        """
        if self._all_to_all is None:
            raise ProtocolMisuse("no dispatch came before")
        return self._all_to_all

    def dispatch(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        payloads: Sequence[torch.Tensor],
        *,
        names: Sequence[str],
        max_rows: int | None = None,
        stats: torch.Tensor | None = None,
    ) -> Received:
        """Puts the rows.

        Args:
            topk_ids: [num_tokens, top_k] int32 or int64.
            topk_weights: [num_tokens, top_k] float32; None sends zeros.
            payloads: Contiguous tensors [num_tokens, ...].
            names: What the caller calls them, for messages.
            max_rows: Slots of each source that this rank looks at.
            stats: [num_stats] int32, what this rank tells all.

        Returns:
            Views of what arrived; ``received.flat`` is what engines take.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: A round is open, of this layer or of another that shares the memory.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        a2a, weights = self._begin(topk_ids, topk_weights, payloads, names)
        received = a2a.dispatch(topk_ids, weights, *payloads, max_rows=max_rows, stats=stats)
        self._opened(a2a, max_rows)
        return received

    def require_made(
        self,
        topk_ids: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        active: tuple[bool, ...],
        *,
        names: Sequence[str],
    ) -> None:
        """Refuses a dispatch of such rows among some ranks alone: see ``SharedWorkspace.require_made``."""
        self.shared.require_made(self._recipe_of(topk_ids, payloads, names), active)

    def prepare(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        payloads: Sequence[torch.Tensor],
        *,
        names: Sequence[str],
    ) -> None:
        """Makes what a dispatch of such rows needs. Collective at the first call; arguments as ``dispatch``."""
        self._begin(topk_ids, topk_weights, payloads, names)

    def dispatch_start(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        payloads: Sequence[torch.Tensor],
        *,
        names: Sequence[str],
        max_rows: int | None = None,
    ) -> None:
        """The first half of ``dispatch``: see there, and ``AllToAll.dispatch_start``."""
        a2a, weights = self._begin(topk_ids, topk_weights, payloads, names)
        a2a.dispatch_start(topk_ids, weights, *payloads, max_rows=max_rows)
        self._opened(a2a, max_rows)

    def dispatch_finish(self) -> Received:
        """The second half of ``dispatch``."""
        try:
            return self.all_to_all.dispatch_finish()
        except BaseException as error:
            self._note_lost(error)
            raise

    def routes(self) -> torch.Tensor:
        """[num_tokens, top_k] int32, a copy: the ranks that the last dispatch sent each token to, -1 elsewhere.

        ``reopen`` takes them as long as this object lives.
        """
        return self.all_to_all.target_ranks.clone()

    def takes(self, output: Payload, low_precision: bool) -> bool:
        """Whether the open round's combine takes such rows."""
        return self.is_open and (self._combined, self._combine_dtype) == (output, combine_dtype_of(low_precision))

    def reopen(
        self, routes: torch.Tensor, output: Payload, *, max_rows: int | None = None, low_precision: bool = False
    ) -> None:
        """Opens the round of an earlier dispatch again, for a combine: a dispatch of routes without rows. Collective.

        Slots are the same, because they follow from the routes. Nothing happens where a round is open whose combine
        takes such rows.

        Args:
            routes: Of ``routes``, or ids of ranks in their form.
            output: The row that combine takes, also of later dispatches.
            max_rows: As for the dispatch.
            low_precision: Whether rows come back quantised, also of later dispatches.

        Raises:
            ValueError, ProtocolMisuse, PeerTimeout: As ``dispatch``.
        """
        if self.takes(output, low_precision):
            return
        self.release()
        self.output, self.combine_dtype = output, combine_dtype_of(low_precision)
        if self._nothing is None:
            self._nothing = torch.zeros(
                self.max_tokens_per_rank, _NOTHING_BYTES, dtype=torch.uint8, device=self.shared.device
            )
        ranks = self.shared.comm.size
        self._by_rank = (ranks, tuple(range(ranks)))
        try:
            self.dispatch(routes, None, [self._nothing[: len(routes)]], names=["rows"], max_rows=max_rows)
        finally:
            self._by_rank = None

    def later(self, finish: Callable[[], None], keep: object) -> Callable[[], None]:
        """Calls a finish half once, however often it is called itself; ``release`` calls it where nobody has.

        Args:
            finish: The half.
            keep: Tensors that must not be given up before it has run.
        """

        def once() -> None:
            if self._finish is once:
                self._finish = self._kept = None
                finish()

        self._finish = once
        self._kept = keep
        return once

    def _begin(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        payloads: Sequence[torch.Tensor],
        names: Sequence[str],
    ) -> tuple[AllToAll, torch.Tensor]:
        """Checks what is dispatched; the all-to-all for it, and weights."""
        self.require_closed()
        looks = looks_of((topk_ids, *payloads))
        sizes = (self.num_experts, self.top_k, self.max_tokens_per_rank, self.num_stats)
        setting = (*sizes, self._by_rank, self.output, self.combine_dtype, self.shared.closings)
        begun = (looks, setting)
        is_begun = looks is not None and begun == self._begun and self._begun_to is self.expert_to_rank
        if not is_begun or self.shared.unproven:
            self._begun = None
            recipe = self._recipe_of(topk_ids, payloads, names)
            self._begun_on, self._next_combined = self.shared.all_to_all(recipe), recipe.output
            self._begun, self._begun_to = begun, self.expert_to_rank
        assert self._begun_on is not None
        return self._begun_on, self._zero_weights(topk_ids.shape[0]) if topk_weights is None else topk_weights

    def _recipe_of(self, topk_ids: torch.Tensor, payloads: Sequence[torch.Tensor], names: Sequence[str]) -> Recipe:
        """The shape of the all-to-all for these; raises ValueError where an argument is wrong."""
        num_tokens = topk_ids.shape[0] if isinstance(topk_ids, torch.Tensor) and topk_ids.dim() == 2 else -1
        if num_tokens < 0:
            raise ValueError(f"expert ids: expected a tensor [num_tokens, {self.top_k}]")
        kinds = tuple(
            check_rows(name, rows, num_tokens, self.shared.device) for name, rows in zip(names, payloads, strict=True)
        )
        if not kinds:
            raise ValueError("no payload: expected at least one tensor of rows besides ids and weights")
        if self.expert_to_rank is None:
            raise ValueError("expert_to_rank is not known: the engine has not said which rank owns which expert")
        num_experts, owners = self._by_rank or (self.num_experts, self.expert_to_rank)
        output = unquantised_row(kinds[0]) if self.output is None else self.output
        return Recipe(
            num_experts,
            self.top_k,
            self.max_tokens_per_rank,
            kinds,
            output,
            owners,
            self.combine_dtype,
            0 if self._by_rank else self.num_stats,
        )

    def _opened(self, a2a: AllToAll, max_rows: int | None) -> None:
        self._all_to_all = a2a
        self._combined = self._next_combined
        self._combine_dtype = self.combine_dtype
        self.max_rows = self.max_tokens_per_rank if max_rows is None else max_rows
        self.shared.open_round = self

    def combine_input(self, max_rows: int | None = None, row: Payload | None = None) -> torch.Tensor:
        """[max_rows * ep_size, ...] in the workspace, in the order of ``received.flat``: experts may write here.

        Args:
            max_rows: What the caller believes that the last dispatch had.
            row: What the caller believes that this layer combines.

        Raises:
            ValueError: The caller is mistaken.
            ProtocolMisuse: No dispatch came before.
        """
        self.require_open("the combine input")
        combined = self._combined
        if max_rows not in (None, self.max_rows) or row not in (None, combined):
            raise ValueError(
                f"the combine input is asked for as {max_rows} rows a rank of {row}; the last dispatch gave "
                f"{self.max_rows}, and this layer combines rows of {combined}"
            )
        flat: torch.Tensor = self.all_to_all.combine_input.flat  # type: ignore[attr-defined]
        return flat

    def combine(
        self,
        rows: torch.Tensor | None,
        *,
        name: str,
        out: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
        by_source: bool = False,
        layout: ExpertMajor | None = None,
    ) -> torch.Tensor:
        """Gets the rows back and sums them: [num_tokens, ...].

        Args:
            rows: [max_rows * ep_size, ...] or [ep_size, max_rows, ...], in the order of the rows that dispatch
                returned; None: they were written to ``combine_input``.
            name: What the caller calls rows, for messages.
            by_source: The first dimension of [ep_size, max_rows, ...] is the source rank, as ``received`` has it.
            layout: What ``received.expert_major`` returned; rows are in its order then.
            out: Where to write.
            addend: [num_tokens, ...], added last.

        Raises:
            ValueError: Rows of another number, shape, dtype or layout; nothing has happened on any rank.
            ProtocolMisuse: No dispatch came before.
            PeerTimeout: As ``AllToAll.combine``.
        """
        self.require_open("combine")
        a2a = self.all_to_all
        taken = rows if rows is None or layout is not None else self._as_taken(rows, name, by_source)
        try:
            combined = a2a.combine(taken, layout=layout, out=out, addend=addend)
        except BaseException as error:
            self._note_lost(error)
            raise
        self.shared.open_round = None
        return combined

    def combine_start(self, rows: torch.Tensor | None, *, name: str) -> None:
        """The first half of ``combine``: see there, and ``AllToAll.combine_start``."""
        self.require_open("combine")
        flat = None if rows is None else self._as_taken(rows, name, by_source=False)
        try:
            self.all_to_all.combine_start(flat)
        except BaseException as error:
            self._note_lost(error)
            raise

    def combine_finish(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The second half of ``combine``; ``out`` and errors as there."""
        try:
            combined = self.all_to_all.combine_finish(out=out)
        except BaseException as error:
            self._note_lost(error)
            raise
        self.shared.open_round = None
        return combined

    def _note_lost(self, error: BaseException) -> None:
        """The round is lost with an error, also where the handler of a signal has ended its wait."""
        if isinstance(error, PutgetError) or self.shared.has_fault:
            self.shared.open_round = None

    def release(self) -> None:
        """Ends a round without combine, on all ranks alike; does nothing where none is open here."""
        if self._finish is not None:
            self._finish()
        if self.is_open:
            self.all_to_all.release()
            self.shared.open_round = None

    def require_open(self, what: str) -> None:
        """Raises ProtocolMisuse unless a dispatch of this layer waits for its combine.

        Other errors are those of ``SharedWorkspace.require_open``.
        """
        self.shared.require_open()
        if not self.is_open:
            raise ProtocolMisuse(f"{what}: no dispatch of this layer came before it")

    def require_closed(self) -> None:
        """Raises ProtocolMisuse while a round is open on this memory.

        Other errors are those of ``SharedWorkspace.require_open``.
        """
        self.shared.require_open()
        if self.is_open:
            raise ProtocolMisuse("dispatch: the last dispatch has not been combined yet")
        if self.shared.open_round is not None:
            raise ProtocolMisuse(
                "dispatch: another layer that shares this workspace has dispatched and not combined; layers whose "
                "rounds overlap need workspaces of their own"
            )

    def _zero_weights(self, num_tokens: int) -> torch.Tensor:
        if self._zeros is None:
            self._zeros = torch.zeros(
                self.max_tokens_per_rank, self.top_k, dtype=torch.float32, device=self.shared.device
            )
        return self._zeros[:num_tokens]

    def _as_taken(self, rows: Any, name: str, by_source: bool) -> torch.Tensor:
        """The rows in the shape by which combine takes them."""
        call = (looks_of((rows,)), by_source, self.max_rows, self._combined)
        if call[0] is None or call != self._taken:
            self._taken = None
            flat = self._as_flat(rows, name)
            lead = (self.shared.comm.size, self.max_rows) if by_source else flat.shape[:1]
            self._taken_shape = torch.Size((*lead, *flat.shape[1:]))
            self._taken = call
        taken: torch.Tensor = rows if rows.shape == self._taken_shape else rows.view(self._taken_shape)
        return taken

    def _as_flat(self, rows: Any, name: str) -> torch.Tensor:
        expected = self.combine_input()
        count, *shape = expected.shape
        if not isinstance(rows, torch.Tensor):
            raise ValueError(f"{name} is a {type(rows).__name__}, expected a tensor")
        by_rank = (self.shared.comm.size, self.max_rows, *shape)
        if tuple(rows.shape) not in (tuple(expected.shape), by_rank):
            raise ValueError(
                f"{name} has shape {list(rows.shape)}, expected {[count, *shape]} or {list(by_rank)}: one row for each "
                "row that the last dispatch returned, in the same order"
            )
        if rows.dtype != expected.dtype:
            raise ValueError(f"{name} has dtype {rows.dtype}, this layer combines {expected.dtype}")
        if rows.device != expected.device:
            raise ValueError(f"{name} is on {rows.device}, expected {expected.device}")
        if not rows.is_contiguous():
            raise ValueError(f"{name} has strides {list(rows.stride())}, expected the contiguous rows of dispatch")
        return rows.view(expected.shape)


def check_stats(stats: Any, num_stats: int, setting: str) -> None:
    """Raises ValueError unless these are the numbers that ranks tell each other: [num_stats] int32, or None."""
    if stats is None:
        return
    if not isinstance(stats, torch.Tensor) or tuple(stats.shape) != (num_stats,) or stats.dtype != torch.int32:
        came = f"{list(stats.shape)} {stats.dtype}" if isinstance(stats, torch.Tensor) else type(stats).__name__
        raise ValueError(f"eplb_local_stats is {came}, expected [{num_stats}] torch.int32: {setting} is {num_stats}")
