"""Options of a balancer: how it plans, and how it moves experts."""

from __future__ import annotations

from dataclasses import dataclass

from putget._arguments import as_flag, as_kind
from putget.balancer.history import LoadHistory


@dataclass(frozen=True)
class PlanOptions:
    """When a `Balancer` plans, and what a plan may cost. Equal on all ranks, but for `in_thread`.

    Args:
        interval: the fewest iterations between two plans. A window's loads travel in so many iterations that
            ``num_stats - 2`` numbers in each are enough.
        history: how much the past counts, in windows; the last one with half of the weight in each next if None.
        num_groups: as for `rebalance`; so are `num_nodes`, `max_moves` and `min_gain`.
        num_nodes: hosts.
        max_moves: most experts that ranks get in a layer and plan.
        min_gain: least gain of max/mean of a layer that moves.
        in_thread: whether a thread of the balancer plans. If not, a `poll` takes as long as the planner does.

    Raises:
        ValueError: history or in_thread is of another type. The balancer checks the numbers.
    """

    interval: int = 32
    history: LoadHistory | None = None
    num_groups: int = 1
    num_nodes: int = 1
    max_moves: int | None = None
    min_gain: float | None = None
    in_thread: bool = True

    def __post_init__(self) -> None:
        as_flag("in_thread", self.in_thread)
        if self.history is not None:
            as_kind("history", self.history, LoadHistory)


@dataclass(frozen=True)
class MoveOptions:
    """How a `Balancer` moves experts.

    Args:
        cells: experts that the landing area of a rank has room for; a batch brings no more to one rank. Equal on all
            ranks.
        num_sms: SMs of `step`'s kernels.
        mover: who puts this rank's experts: "kernel", the kernels of `step`; "thread", a thread, on CUDA by the copy
            engine. No kernel waits for it.
        most_bytes: bytes that a `step` puts at most, and checks at most; a multiple of 16. A thread has no such bound.
    """

    cells: int = 2
    num_sms: int = 8
    mover: str = "kernel"
    most_bytes: int = 1 << 20
