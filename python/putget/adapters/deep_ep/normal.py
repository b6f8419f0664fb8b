"""Rounds of whole tokens with DeepEP's freedom: a layout outlives its round, and can be combined and sent again.

Every rank is an "expert" here, and a token goes to each of its ranks once. DeepEP's calls stand alone; putget's combine
ends the round of a dispatch. Where a combine has no such round, a dispatch of routes without rows goes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from putget import Communicator, Payload, Received
from putget.adapters.deep_ep.rounds import MAX_RANKS, Lanes, Ticket
from putget.adapters.rounds import Rounds
from putget.adapters.shared import SharedWorkspace, engine_workspace_bytes
from putget.moe.compact import Compact, take_rows

Make = Callable[[int, Mapping[str, int]], SharedWorkspace]


@dataclass
class Layout:
    """Where tokens of one dispatch have gone, and where the received rows are.

    Attributes:
        ids: [num_tokens, ep_size] int32: the ranks of each token, -1 elsewhere.
        places: Where the received rows are.
        capacity: Most tokens that one rank sends.
        hidden: Elements of a row.
        ticket: The round that it was sent in last.
    """

    ids: torch.Tensor
    places: Compact
    capacity: int
    hidden: int
    ticket: Ticket


class NormalRounds:
    """Rounds of whole tokens of one buffer.

    Args:
        comm: The group.
        device: Where the rows live.
        make: Symmetric memory of so many bytes, with the arguments that they follow from; collective.
        capacity: What callers call the most tokens that one rank sends.
    """

    def __init__(self, comm: Communicator, device: torch.device, make: Make, capacity: str) -> None:
        self._comm = comm
        self._device = device
        self._make = make
        self._capacity = capacity
        self._lanes: dict[tuple[str, int, int], Lanes] = {}
        self._all = torch.arange(comm.size, dtype=torch.int32, device=device)

    def close(self) -> None:
        """Frees the memory."""
        while self._lanes:
            self._lanes.popitem()[1].close()

    def ids(self, is_token_in_rank: torch.Tensor) -> torch.Tensor:
        """[num_tokens, ep_size] int32: the ranks of each token, -1 elsewhere."""
        return torch.where(is_token_in_rank, self._all, -1)

    def put(
        self, ids: torch.Tensor, payloads: list[torch.Tensor], names: Sequence[str], capacity: int
    ) -> tuple[Ticket, Received]:
        """Sends each token to its ranks; the first payload is its row."""
        hidden = payloads[0].shape[1]
        lane = self._lanes_of("rows", capacity, hidden).begin()
        received = lane.rounds.dispatch(ids, None, payloads, names=names)
        return Ticket(lane, lane.number), received

    def counts(self, per_expert: torch.Tensor) -> torch.Tensor:
        """[local experts] int32: what all ranks together count for this rank's experts. A round of its own.

        Args:
            per_expert: [num_experts] of this rank's tokens.
        """
        num_local = per_expert.numel() // self._comm.size
        rounds = self._lanes_of("counts", 1, per_expert.numel()).begin().rounds
        received = rounds.dispatch(self._all[None], None, [per_expert.int()[None]], names=["num_tokens_per_expert"])
        first = self._comm.rank * num_local
        found = received.payloads[0][:, 0, first : first + num_local].sum(0).int()
        rounds.release()
        return found

    def sum_rows(self, layout: Layout, x: torch.Tensor, biases: Sequence[torch.Tensor]) -> torch.Tensor:
        """[num_tokens, hidden]: each token's rows from all its ranks, and up to two biases, rounded once.

        With two, rows travel as float32, in twice the bytes: putget's combine adds one tensor.
        """
        if len(biases) > 1:
            total = self.sum_weights(layout, x.float())
            for bias in biases:
                total += bias
            return total.to(x.dtype)
        lanes = self._lanes_of("rows", layout.capacity, layout.hidden)
        if not layout.ticket.is_open:
            lane = lanes.begin()
            layout.ticket = Ticket(lane, lane.number)
        rounds = layout.ticket.lane.rounds
        rounds.reopen(layout.ids, Payload((layout.hidden,), torch.bfloat16))
        return self._sum(rounds, layout, x, biases[0] if biases else None)

    def sum_weights(self, layout: Layout, weights: torch.Tensor) -> torch.Tensor:
        """[num_tokens, *] float32: each token's weights from all its ranks. A round of its own."""
        rounds = self._lanes_of("weights", layout.capacity, weights.shape[1]).begin().rounds
        rounds.reopen(layout.ids, Payload((weights.shape[1],), torch.float32))
        return self._sum(rounds, layout, weights, None)

    @staticmethod
    def _sum(rounds: Rounds, layout: Layout, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        take_rows(x.contiguous(), layout.places.position, rounds.combine_input())
        return rounds.combine(None, name="x", addend=bias)

    @staticmethod
    def again(layout: Layout, received: Received) -> list[torch.Tensor]:
        """The rows of a dispatch that went where an earlier one did, without gaps."""
        rows = [flat.new_empty(layout.places.rows.numel(), *flat.shape[1:]) for flat in received.flat.payloads]
        for flat, into in zip(received.flat.payloads, rows, strict=True):
            take_rows(flat, layout.places.rows, into)
        return rows

    def _lanes_of(self, kind: str, capacity: int, elements: int) -> Lanes:
        key = (kind, capacity, elements)
        if key not in self._lanes:
            self._lanes[key] = Lanes(lambda: self._rounds(kind, capacity, elements))
        return self._lanes[key]

    def _rounds(self, kind: str, capacity: int, elements: int) -> Rounds:
        output = Payload((elements,), torch.float32 if kind == "weights" else torch.bfloat16)
        dispatch_bytes = {"rows": 2 * elements + 12 * MAX_RANKS, "counts": 4 * elements, "weights": 16}[kind]
        ranks = self._comm.size
        num_bytes = engine_workspace_bytes(
            ep_size=ranks, max_tokens_per_rank=capacity, dispatch_bytes=dispatch_bytes, output=output
        )
        length = {"rows": "the length of rows of x", "counts": "num_experts", "weights": "the columns of topk_weights"}
        return Rounds(
            self._make(num_bytes, {self._capacity: capacity, length[kind]: elements}),
            num_experts=ranks,
            top_k=ranks,
            max_tokens_per_rank=capacity,
            output=output,
            expert_to_rank=tuple(range(ranks)),
        )
