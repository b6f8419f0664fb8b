"""A placement over iterations of recorded routing: none, static, and online."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from putget.balancer import LoadHistory, Placement, rebalance
from putget.balancer.schedule import Batch, batches
from putget.balancer.worth import Pace, Tasks, moved_experts, paying_batches

Ids = np.ndarray[Any, np.dtype[Any]]
WAYS = ("contiguous", "static", "online")


@dataclass(frozen=True)
class Group:
    """Ranks, hosts, slots and experts: what `rebalance` asks for."""

    num_experts: int
    num_replicas: int
    num_groups: int
    num_nodes: int
    ep_size: int

    def plan(self, load: Any, **options: Any) -> Placement:
        """A placement for a load, [num_layers, num_experts]."""
        return rebalance(load, self.num_replicas, self.num_groups, self.num_nodes, self.ep_size, **options)

    def contiguous(self, num_layers: int) -> Placement:
        """Experts in their order; slots beyond them begin again."""
        slots = np.arange(self.num_replicas) % self.num_experts
        return Placement.of(np.tile(slots, (num_layers, 1)), self.num_experts)


@dataclass(frozen=True)
class Cost:
    """A layer's time: the rows of the hottest rank come over its link, then its experts work on them.

    Experts that move take their share of the same link.
    """

    row_bytes: int
    link_gbps: float
    row_ns: float

    def step_us(self, rows: float, moved_bytes: float = 0.0) -> float:
        """rows * (row_bytes / link_gbps + row_ns) + moved_bytes / link_gbps, which comes in ns."""
        return (rows * (self.row_bytes / self.link_gbps + self.row_ns) + moved_bytes / self.link_gbps) / 1e3

    def moved_over_rows(self, moved_bytes: float, rows: float) -> float:
        """The time of bytes that move, over that of some rows."""
        return self.step_us(0, moved_bytes) / self.step_us(rows)


@dataclass(frozen=True)
class Mover:
    """How fast experts move, as the options of ``putget.balancer.Balancer`` say.

    Attributes:
        expert_bytes: of an expert.
        most_bytes: that a rank puts in an iteration, and checks in an iteration.
        cells: experts that come to a rank in one batch.
    """

    expert_bytes: int
    most_bytes: int
    cells: int = 2


class Moving:
    """Experts on their way to a plan, batch by batch."""

    def __init__(self, mover: Mover, ep_size: int) -> None:
        self._mover, self._ep_size = mover, ep_size
        self._queue: Iterator[Batch] = iter(())
        self._batch: Batch | None = None
        self._left = 0  # bytes of the batch, of the rank with most of them

    def __bool__(self) -> bool:
        return self._batch is not None

    def begin(self, current: Placement, target: Placement, gain: NDArray[np.float64]) -> None:
        """From one placement to another, the layers that gain most first."""
        order = np.argsort(-gain, kind="stable").tolist()
        self.follow(batches(current, target, self._ep_size, self._mover.cells, order))

    def follow(self, queue: Iterator[Batch]) -> None:
        """Moves these batches, one after the other."""
        self._queue = queue
        self._post()

    def iterate(self) -> tuple[int, Batch | None]:
        """One iteration: bytes that a rank moves at most, and the batch that all ranks take at its end.

        The bytes of a batch travel in iterations behind the one that posted it. The statistics of the next round tell
        all ranks that they have come.
        """
        if self._batch is None:
            return 0, None
        moved = min(self._left, self._mover.most_bytes)
        self._left -= moved
        if moved > 0:
            return moved, None
        done = self._batch
        self._post()
        return 0, done

    def _post(self) -> None:
        self._batch = next(self._queue, None)
        if self._batch is not None:
            self._left = moved_experts(self._batch, self._ep_size) * self._mover.expert_bytes


@dataclass
class Phase:
    """A task's iterations.

    Attributes:
        task: its name.
        ratios: max/mean of each iteration's batch, mean over layers, for each way.
        hottest: rows of the hottest rank, mean over layers, for each way.
        moves: experts that ranks took in each iteration, for the online plans.
        moved_bytes: bytes that a rank put or got at most in each iteration, for the online plans.
        own: max/mean of the whole task with a plan made from it.
        fits: the same for the online placement in force behind each iteration.
    """

    task: str
    ratios: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    hottest: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    moves: list[int] = field(default_factory=list)
    moved_bytes: list[int] = field(default_factory=list)
    own: float = 0.0
    fits: list[float] = field(default_factory=list)


def count(ids: Ids, num_experts: int) -> NDArray[np.int64]:
    """Tokens of each expert: [layers, tokens, top_k] to [layers, num_experts]. -1 is nobody's.

    Raises:
        ValueError: An id is num_experts or above.
    """
    if int(ids.max()) >= num_experts:
        raise ValueError(f"the routing file has expert {int(ids.max())}; --num_experts is {num_experts}")
    found = [np.bincount(layer.ravel().astype(np.int64) + 1, minlength=num_experts + 1)[1:] for layer in ids]
    return np.stack(found)


def simulate(
    tasks: dict[str, Ids],
    group: Group,
    *,
    iterations: int,
    tokens: int,
    interval: int,
    history: LoadHistory,
    mover: Mover,
    max_moves: int | None = None,
    cost: Cost | None = None,
) -> list[Phase]:
    """Runs the tasks one after the other.

    The static plan is made from the whole first task. Online begins with it, adds each iteration's counts to `history`,
    and plans anew every `interval` iterations, unless experts of the plan before are still on their way. Experts move
    batch by batch, as those of ``putget.balancer.Balancer`` do; a batch is in force in the iteration behind the one in
    which all ranks took it. An expert's tokens are shared evenly by its replicas.

    Args:
        tasks: [layers, tokens, top_k] of each task, of as many layers each; an iteration takes the next tokens, and
            begins again at the end.
        group: what to plan for.
        iterations: of each task.
        tokens: of all ranks in an iteration.
        interval: iterations between plans.
        history: an empty one; it says how much the past counts.
        mover: how fast experts move.
        max_moves: of a layer and plan.
        cost: what moves cost beside the rows of an iteration; nothing if None.
    """
    static = online = group.plan(count(next(iter(tasks.values())), group.num_experts))
    plain = group.contiguous(static.num_layers)
    num_rows = tokens * next(iter(tasks.values())).shape[2] / group.ep_size
    moved_cost = 0.0 if cost is None else cost.moved_over_rows(mover.most_bytes / static.num_layers, num_rows)
    pace = Pace(mover.expert_bytes, mover.most_bytes, interval, moved_cost)
    moving = Moving(mover, group.ep_size)
    lately, window, length = Tasks(), np.zeros((static.num_layers, group.num_experts)), 0
    phases = []
    for task, ids in tasks.items():
        whole = count(ids, group.num_experts)
        phase = Phase(task)
        phase.own = float(group.plan(whole).imbalance(whole, group.ep_size).mean())
        for iteration in range(iterations):
            batch = ids[:, (iteration * tokens + np.arange(tokens)) % ids.shape[1]]
            load = count(batch, group.num_experts)
            for way, placement in zip(WAYS, (plain, static, online), strict=True):
                phase.ratios[way].append(float(placement.imbalance(load, group.ep_size).mean()))
                phase.hottest[way].append(float(placement.rank_loads(load, group.ep_size).max(axis=1).mean()))
            history.add(load)
            window, length = window + load, length + 1
            moved, taken = moving.iterate()
            phase.moved_bytes.append(moved)
            phase.moves.append(0 if taken is None else len(taken.transfers))
            if taken is not None:
                online = Placement.of(taken.slots, group.num_experts)
            if (iteration + 1) % interval == 0 and not moving:
                planned = group.plan(history.load, previous=online, max_moves=max_moves)
                lately.add(window, length / interval)
                window, length = np.zeros_like(window), 0
                paying = paying_batches(online, planned, group.ep_size, mover.cells, lately, history.load, pace)
                moving.follow(batch for batch, _ in paying)
            phase.fits.append(float(online.imbalance(whole, group.ep_size).mean()))
        phases.append(phase)
    return phases
