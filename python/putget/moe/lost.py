"""Experts that a layer has lost with their ranks: which, since when, and whether the caller goes on without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from putget.alltoall import AllToAll
from putget.errors import ExpertsLost
from putget.moe.placed import PlacedExperts


@dataclass(frozen=True)
class LayerMetrics:
    """How a layer is on this rank.

    Attributes:
        active_ranks: The ranks that take part in rounds.
        lost_ranks: The others.
        lost_experts: Experts that lie on lost ranks alone: no token gets them.
        partly_lost_experts: Experts with replicas on lost and on active ranks, by the placement in force: tokens that
            are sent to the former miss them.
        lost_since: When the group went on without the first of these experts, in seconds of ``time.time()``; None where
            none is lost.
        degraded: Whether the caller goes on without them.
        degraded_rounds: Rounds that this rank has begun without them, replays of graphs apart.
    """

    active_ranks: tuple[int, ...]
    lost_ranks: tuple[int, ...]
    lost_experts: tuple[int, ...]
    partly_lost_experts: tuple[int, ...]
    lost_since: float | None
    degraded: bool
    degraded_rounds: int


@dataclass(frozen=True)
class Loss:
    """The lost part of a layer.

    Attributes:
        whole: Experts that are on lost ranks alone.
        partly: Experts that are on some, too.
        ranks: Those ranks.
        since: When the first of them was left out, in seconds of ``time.time()``; None where nothing is lost.
    """

    whole: tuple[int, ...] = ()
    partly: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    since: float | None = None

    @staticmethod
    def of(places: Sequence[tuple[int, int]], inactive_since: Mapping[int, float]) -> Loss:
        """Finds it.

        Args:
            places: Expert and rank, of each place that an expert has.
            inactive_since: When each rank was left out that is not active.
        """
        kept = {expert for expert, rank in places if rank not in inactive_since}
        gone = {expert for expert, rank in places if rank in inactive_since}
        ranks = {rank for _, rank in places if rank in inactive_since}
        return Loss(
            tuple(sorted(gone - kept)),
            tuple(sorted(gone & kept)),
            tuple(sorted(ranks)),
            min((inactive_since[rank] for rank in ranks), default=None),
        )


class LostExperts:
    """The losses of a layer, and whether its rounds go on.

    Args:
        a2a: The layer's.
        placed: Its slots; None where an expert lies where ``a2a.expert_to_rank`` says.
        degraded: Whether rounds go on without lost experts.
    """

    def __init__(self, a2a: AllToAll, placed: PlacedExperts | None, degraded: bool) -> None:
        self._a2a, self._placed, self._degraded = a2a, placed, degraded
        self._owners: list[int] = a2a.expert_to_rank.tolist()
        self._allowed: object = None  # the active ranks with which rounds go on; a mask is a tuple of its own
        self._loss = Loss()
        self._rounds = 0

    @property
    def degraded(self) -> bool:
        """Whether rounds go on without lost experts."""
        return self._degraded

    @degraded.setter
    def degraded(self, value: bool) -> None:
        self._degraded = bool(value)
        self.look_again()

    def look_again(self) -> None:
        """Experts may lie elsewhere from now on."""
        self._allowed = None

    def begin_round(self) -> None:
        """Raises ExpertsLost where an expert is lost and the caller has not accepted it."""
        if self._a2a.active_ranks is not self._allowed:
            self.require()
        if self._loss.since is not None:
            self._rounds += 1

    def require(self) -> None:
        """Likewise, without a round."""
        loss = self._find()
        if loss.since is not None and not self._degraded:
            raise ExpertsLost(loss.whole, loss.partly, loss.ranks, loss.since)
        self._loss, self._allowed = loss, self._a2a.active_ranks

    def metrics(self) -> LayerMetrics:
        """The report."""
        loss, active = self._find(), self._a2a.active_ranks
        return LayerMetrics(
            active_ranks=tuple(rank for rank, is_active in enumerate(active) if is_active),
            lost_ranks=tuple(rank for rank, is_active in enumerate(active) if not is_active),
            lost_experts=loss.whole,
            partly_lost_experts=loss.partly,
            lost_since=loss.since,
            degraded=self._degraded,
            degraded_rounds=self._rounds,
        )

    def _find(self) -> Loss:
        inactive_since = self._a2a.workspace.inactive_since
        if not inactive_since:
            return Loss()
        if self._placed is not None:
            return Loss.of(self._placed.places(), inactive_since)
        table = self._a2a.expert_to_rank
        if table.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self._owners = table.tolist()
        return Loss.of(list(enumerate(self._owners)), inactive_since)
