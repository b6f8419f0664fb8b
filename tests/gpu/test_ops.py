"""Piecewise CUDA graphs: the operators of dispatch and combine in graphs of their own, with eager work between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import putget
from putget.ops import Traced
from tests.gpu.graphs import GraphRound, capture
from tests.gpu.ranks import Ranks
from tests.gpu.test_graphs import CAPACITY, case_of, open_object, padded_rounds
from tests.harness import Rank
from tests.harness.cases import Case
from tests.harness.compare import Outcome, check_round


class PiecewiseRound(GraphRound):
    """A round in two graphs; between them runs what is not captured, as engines cut a model at its attention."""

    def __init__(self, rank: Rank, a2a: putget.AllToAll, case: Case, batch: int) -> None:
        super().__init__(rank, a2a, case, batch)
        shape, dtype = case.output
        self.traced = Traced(a2a)
        self.pieces: list[torch.cuda.CUDAGraph] = []
        self._flat_rows = torch.zeros(case.max_tokens_per_rank * case.ep_size, *shape, dtype=dtype, device=rank.device)

    def first(self) -> None:
        """The piece with dispatch."""
        rows = self.traced.dispatch(*self.arguments, num_valid_tokens=self._valid)
        self._seen = {
            "topk_ids": self._by_source(rows.topk_ids),
            "topk_weights": self._by_source(rows.topk_weights),
            "payloads": tuple(self._by_source(payload) for payload in rows.payloads),
            "num_tokens": rows.num_tokens,
            "target_ranks": self.a2a.target_ranks.clone(),
            "target_slots": self.a2a.target_slots.clone(),
        }

    def between(self) -> None:
        """Calls that are not captured."""
        self._flat_rows.copy_(self._rows.transpose(0, 1).flatten(0, 1))

    def second(self) -> None:
        """The piece with combine."""
        self._seen["combined"] = self.traced.combine(self._flat_rows, self.batch)

    def record(self) -> None:
        self.first()
        self.between()
        self.second()

    def capture(self) -> None:
        self.pieces = [capture(self.rank, self.first), capture(self.rank, self.second)]

    def replay(self) -> None:
        self.pieces[0].replay()
        self.between()
        self.pieces[1].replay()

    def _by_source(self, flat: Tensor) -> Tensor:
        return flat.view(-1, self.case.ep_size, *flat.shape[1:]).transpose(0, 1)


def prepare(rank: Rank, case: Case, batches: tuple[int, ...]) -> None:
    """A body: a round in pieces per batch size, each run once eagerly."""
    rank.state["graphs"] = {batch: PiecewiseRound(rank, rank.state["a2a"], case, batch) for batch in batches}
    for graph in rank.state["graphs"].values():
        graph.record()
    torch.cuda.current_stream(rank.device).synchronize()


def capture_all(rank: Rank) -> None:
    """A body for one rank at a time: emulated ranks share one allocator, which knows one capture."""
    for graph in rank.state["graphs"].values():
        graph.capture()


def replay(rank: Rank, case: Case, index: int) -> Outcome:
    """A body: new data into this rank's pieces of the round's batch size, then both pieces."""
    graph: Any = rank.state["graphs"][case.rounds[index].num_tokens[rank.rank]]
    graph.load(index)
    rank.meet()
    graph.replay()
    rank.meet()
    return graph.outcome()


def test_pieces_in_graphs_of_their_own(ranks: Ranks) -> None:
    batches = (1, 4, CAPACITY)
    case = case_of(ranks.size, padded_rounds(ranks.size, 8, batches))
    ranks.call(open_object, "a2a", case)
    ranks.call(prepare, case, batches)
    for rank in range(ranks.size):
        ranks.call(capture_all, ranks=[rank])
    for index in range(len(case.rounds)):
        check_round(case, index, ranks.call(replay, case, index), check=False)
