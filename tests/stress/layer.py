"""One object of the stress run: makes a round, plays it, and counts on the device every word that is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import putget
from tests.stress.plan import COMBINE, RELEASE
from tests.stress.words import mix, small

# One counter per kind of mistake; the report names them.
CHECKS = ("num_tokens", "topk_ids", "topk_weights", "words", "bytes", "combined")


@dataclass(frozen=True)
class Shape:
    """A layer's rows: `columns` int32 words, `odd_bytes` uint8, `outputs` numbers of the output's dtype."""

    columns: int
    odd_bytes: int
    outputs: int
    output_dtype: torch.dtype

    @property
    def payloads(self) -> list[putget.Payload]:
        return [putget.Payload((self.columns,), torch.int32), putget.Payload((self.odd_bytes,), torch.uint8)]

    @property
    def output(self) -> putget.Payload:
        return putget.Payload((self.outputs,), self.output_dtype)


# Rows with accesses of 16 bytes, and rows that allow single bytes only.
SHAPES = (Shape(32, 5, 16, torch.float32), Shape(9, 11, 7, torch.bfloat16))


@dataclass(frozen=True)
class Counters:
    """Tensors on the device that all layers of a rank share.

    Attributes:
        clock: [1] int64, the current round; advanced at the end of every round, in graphs too.
        wrong: [len(CHECKS)] int64, mistakes so far.
        first_wrong: [1] int64, the first round with a mistake, -1 before.
    """

    clock: Tensor
    wrong: Tensor
    first_wrong: Tensor

    @staticmethod
    def make(device: torch.device) -> Counters:
        return Counters(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(len(CHECKS), dtype=torch.int64, device=device),
            torch.full((1,), -1, dtype=torch.int64, device=device),
        )


class Layer:
    """Plays rounds of one AllToAll.

    Args:
        a2a: the object.
        index: which of SHAPES its rows have.
        limits: (max_tokens_per_rank, top_k, num_experts), as in the constructor.
        sizes: [rounds, ep_size] int32 on the device, the tokens of every rank in every round.
        counters: where mistakes go.
    """

    def __init__(
        self, a2a: putget.AllToAll, index: int, limits: tuple[int, int, int], sizes: Tensor, counters: Counters
    ) -> None:
        self.a2a, self.index, self.shape = a2a, index, SHAPES[index]
        max_tokens, self.top_k, self.num_experts = limits
        self.me, self.ep_size = a2a.ep_rank, a2a.ep_size
        self._sizes, self._counters = sizes, counters

        def count(n: int, *shape: int) -> Tensor:
            return torch.arange(n, dtype=torch.int32, device=sizes.device).reshape(shape)

        # Index tensors of three dimensions, rank or source first, token second, column last; they broadcast.
        self._ranks = count(self.ep_size, -1, 1, 1)
        self._tokens = count(max_tokens, 1, -1, 1)
        self._k = count(self.top_k, 1, 1, -1)
        self._columns = count(self.shape.columns, 1, 1, -1)
        self._odd_bytes = count(self.shape.odd_bytes, 1, 1, -1)
        self._outputs = count(self.shape.outputs, 1, 1, -1)

    def play(self, batch: int, max_rows: int | None, ending: int, padded: bool, plant: str | None = None) -> None:
        """One round: arguments, dispatch, checks, experts, combine, checks. Only launches.

        Args:
            batch: tokens of this rank's call; at least its size in this round, equal unless `padded`.
            max_rows: slots per source that this rank asks for.
            ending: COMBINE, RELEASE or LEAVE_OPEN.
            padded: pass num_valid_tokens.
            plant: "received" or "combined": spoil these rows before they are checked, to see that the checks work.
        """
        number = self._counters.clock.to(torch.int32)
        sizes = self._sizes.index_select(0, self._counters.clock).reshape(-1)  # [ep_size]
        ids = self._ids(number, sizes)
        own = slice(self.me, self.me + 1)
        mine = self._tokens[:, :batch]
        received = self.a2a.dispatch(
            ids[self.me, :batch].contiguous(),
            self._weights(number)[self.me, :batch].contiguous(),
            self._words(number, self._ranks[own], mine)[0],
            self._bytes(number, self._ranks[own], mine)[0],
            max_rows=max_rows,
            num_valid_tokens=sizes[own] if padded else None,
        )
        if plant == "received":
            received.payloads[0].add_(1)
        targets = self._targets(ids)
        comes_here = targets[:, :, self.me]
        token, in_use = self._arrivals(comes_here, received.topk_ids.shape[1])
        mistakes = self._check_received(number, received, ids, token, in_use)
        mistakes[0] = (received.num_tokens != comes_here.sum(1)).sum()
        if ending == COMBINE:
            mistakes.append(self._combine(number, targets[self.me, :batch], token, in_use, plant == "combined"))
        else:
            mistakes.append(torch.zeros_like(mistakes[0]))
            if ending == RELEASE:
                self.a2a.release()
        self._count(torch.stack(mistakes))

    def _ids(self, number: Tensor, sizes: Tensor) -> Tensor:
        """[ep_size, max_tokens, top_k] int32, what every rank sends; -1 beyond its size, and now and then before."""
        h = mix(number, self._ranks, self._tokens, self._k, 1 + self.index)
        ids = torch.where(small(h >> 8, 16) == 0, -1, small(h, self.num_experts))
        return torch.where(self._tokens < sizes[:, None, None], ids, -1)

    def _weights(self, number: Tensor) -> Tensor:
        """[ep_size, max_tokens, top_k] float32."""
        return small(mix(number, self._ranks, self._tokens, self._k, 11 + self.index), 1 << 20).float()

    def _words(self, number: Tensor, src: Tensor, token: Tensor) -> Tensor:
        return mix(number, src, token, self._columns, 21 + self.index)

    def _bytes(self, number: Tensor, src: Tensor, token: Tensor) -> Tensor:
        return (mix(number, src, token, self._odd_bytes, 31 + self.index) & 0xFF).to(torch.uint8)

    def _answers(self, number: Tensor, expert_rank: Tensor | int, src: Tensor | int, token: Tensor) -> Tensor:
        """The answers of a rank's experts: integers so small that every sum of them is exact in the output's dtype."""
        bound = 1 << 16 if self.shape.output_dtype == torch.float32 else 16
        return small(mix(number, expert_rank * 256 + src, token, self._outputs, 41 + self.index), bound)

    def _targets(self, ids: Tensor) -> Tensor:
        """[ep_size, max_tokens, ep_size] bool: source, token, rank that owns one of its experts."""
        owner = self.a2a.expert_to_rank[ids.clamp(min=0).long()]
        owner = torch.where(ids >= 0, owner, -1)
        return (owner[..., None] == self._ranks.reshape(1, 1, 1, -1)).any(2)

    def _arrivals(self, comes_here: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
        """The token in every slot of this rank, [ep_size, max_rows, 1] int32, and whether the slot is used."""
        slot = comes_here.cumsum(1) - 1
        slot = torch.where(comes_here & (slot < max_rows), slot, max_rows)  # one more column takes what has no slot
        token = torch.zeros(self.ep_size, max_rows + 1, dtype=torch.int32, device=slot.device)
        token.scatter_(1, slot, self._tokens[..., 0].expand_as(slot).contiguous())
        places = torch.arange(max_rows, device=slot.device)
        return token[:, :max_rows, None], (places < comes_here.sum(1, keepdim=True))[..., None]

    def _check_received(
        self, number: Tensor, received: putget.Received, ids: Tensor, token: Tensor, in_use: Tensor
    ) -> list[Tensor]:
        """Mistakes in the order of CHECKS; the first is left to the caller."""
        at = token.long().expand(-1, -1, self.top_k)
        words = self._words(number, self._ranks, token)
        odd_bytes = self._bytes(number, self._ranks, token)
        differs = (
            received.topk_ids != torch.where(in_use, ids.gather(1, at), -1),
            (received.topk_weights != self._weights(number).gather(1, at)) & in_use,
            (received.payloads[0] != words) & in_use,
            (received.payloads[1] != odd_bytes) & in_use,
        )
        return [torch.zeros_like(self._counters.wrong[0]), *(wrong.sum() for wrong in differs)]

    def _combine(self, number: Tensor, targets: Tensor, token: Tensor, in_use: Tensor, plant: bool) -> Tensor:
        """Mistakes in the combined rows. `targets`: [batch, ep_size] bool, where this rank's tokens went."""
        dtype = self.shape.output_dtype
        rows = self._answers(number, self.me, self._ranks, token).to(dtype)
        # Nobody may read a slot without a row: it holds what no sum forgives.
        self.a2a.combine_input.copy_(torch.where(in_use, rows, torch.nan))
        mine = self._tokens[:, : targets.shape[0]]
        addend = small(mix(number, mine, self._outputs, 51, self.me), 16)[0].to(dtype)
        combined = self.a2a.combine(addend=addend)
        if plant:
            combined.add_(1)
        answers = self._answers(number, self._ranks, self.me, mine)  # [ep_size, batch, outputs]
        wanted = (answers * targets.t()[..., None]).sum(0).float() + addend.float()
        return (combined != wanted.to(dtype)).sum()

    def _count(self, mistakes: Tensor) -> None:
        clock, first = self._counters.clock, self._counters.first_wrong
        self._counters.wrong.add_(mistakes)
        first.copy_(torch.where((mistakes.sum() > 0) & (first < 0), clock, first))
        clock.add_(1)
