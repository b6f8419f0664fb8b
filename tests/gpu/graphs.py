"""A round captured in a CUDA graph: fixed tensors that new data is copied into before each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import putget
from tests.gpu.ranks import stream_of
from tests.harness import Rank
from tests.harness.cases import Case
from tests.harness.compare import Outcome


class GraphRound:
    """One dispatch, experts and combine of `batch` tokens on one rank, as a graph.

    The experts' rows are part of the data, as everywhere in these tests. The first call of `run` is eager, so that
    nothing is loaded or allocated by the capture that a peer might have to wait for.
    """

    def __init__(self, rank: Rank, a2a: putget.AllToAll, case: Case, batch: int) -> None:
        place = rank.device
        shape, dtype = case.output
        self.rank, self.a2a, self.case, self.batch = rank, a2a, case, batch
        self.graph: torch.cuda.CUDAGraph | None = None
        self.arguments = (
            torch.full((batch, case.top_k), -1, dtype=torch.int32, device=place),
            torch.zeros(batch, case.top_k, device=place),
            *[torch.zeros(batch, *row, dtype=kind, device=place) for row, kind in case.payloads],
        )
        self._valid = torch.zeros(1, dtype=torch.int32, device=place)
        self._load = torch.zeros(case.num_experts, dtype=torch.int32, device=place)
        self._stats = torch.zeros(case.num_stats, dtype=torch.int32, device=place) if case.num_stats else None
        self._rows = torch.zeros(case.ep_size, case.max_tokens_per_rank, *shape, dtype=dtype, device=place)
        self._seen: dict[str, Any] = {}

    def record(self) -> None:
        """The round itself; every result is copied, because the next round overwrites it. Loads add up over rounds."""
        before = self._load.clone()
        received = self.a2a.dispatch(
            *self.arguments, num_valid_tokens=self._valid, expert_load=self._load, stats=self._stats
        )
        self._seen = {
            "topk_ids": received.topk_ids.clone(),
            "topk_weights": received.topk_weights.clone(),
            "payloads": tuple(rows.clone() for rows in received.payloads),
            "num_tokens": received.num_tokens.clone(),
            "target_ranks": self.a2a.target_ranks.clone(),
            "target_slots": self.a2a.target_slots.clone(),
            "expert_load": self._load - before,
            "stats": None if received.stats is None else received.stats.clone(),
        }
        self.a2a.combine_input.copy_(self._rows)
        self._seen["combined"] = self.a2a.combine()

    def capture(self, record: Callable[[], None] | None = None) -> None:
        """Captures `self.record`, or what calls it; no peer may be running a kernel that waits."""
        self.graph = capture(self.rank, record or self.record)

    def load(self, index: int) -> None:
        """Copies the data of the case's round `index` into the fixed tensors, on the current stream."""
        sent = self.case.sent(index, self.rank.rank)
        for fixed, new in zip(self.arguments, (sent.topk_ids, sent.topk_weights, *sent.payloads), strict=True):
            fixed.copy_(new)
        self._valid.fill_(self.batch if sent.num_valid_tokens is None else sent.num_valid_tokens)
        self._load.zero_()
        if self._stats is not None:
            numbers = self.case.stats(index, self.rank.rank)
            self._stats.copy_(torch.zeros_like(self._stats) if numbers is None else numbers)
        self._rows.copy_(self.case.expert_rows(index, self.rank.rank))
        table = self.case.rounds[index].table
        if table is not None:
            self.a2a.expert_to_rank.copy_(torch.tensor(table, dtype=torch.int32))

    def replay(self) -> None:
        assert self.graph is not None
        self.graph.replay()

    def outcomes(self, case: Case, rank: Rank | None = None) -> list[Outcome]:
        """Replays it with the data of each round of a case, for which ranks meet."""
        self.case, outcomes = case, []
        for index in range(len(case.rounds)):
            self.load(index)
            (rank or self.rank).meet()
            self.replay()
            outcomes.append(self.outcome())
        return outcomes

    def outcome(self) -> Outcome:
        """The result of the last run, on the CPU (synchronises)."""
        self.rank.wait()
        seen = {name: _to_cpu(value) for name, value in self._seen.items()}
        return Outcome(**seen, invalid=0)


def capture(rank: Rank, record: Any) -> torch.cuda.CUDAGraph:
    """Captures `record()` on a stream of the rank's own; what other threads do does not end the capture."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_stream(rank.device).synchronize()
    with torch.cuda.graph(graph, stream=stream_of(rank), capture_error_mode="thread_local"):
        record()
    return graph


def _to_cpu(value: Tensor | tuple[Tensor, ...] | None) -> Any:
    if value is None:
        return None
    return tuple(one.cpu() for one in value) if isinstance(value, tuple) else value.cpu()
