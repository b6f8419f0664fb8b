"""What a placement does over iterations of recorded routing: none, static, and online."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from putget.balancer import LoadHistory, Placement, rebalance

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
    """A step's time: the rows of the hottest rank come over its link, then its experts work on them."""

    row_bytes: int
    link_gbps: float
    row_ns: float

    def step_us(self, rows: float) -> float:
        """rows * row_bytes / link_gbps + rows * row_ns."""
        return rows * (self.row_bytes / self.link_gbps + self.row_ns) / 1e3


@dataclass
class Phase:
    """A task's iterations.

    Attributes:
        task: its name.
        ratios: max/mean of each iteration's batch, mean over layers, for each way.
        hottest: rows of the hottest rank, mean over layers, for each way.
        moves: experts that the online plans moved in each iteration.
        own: max/mean of the whole task with a plan made from it.
        fits: the same for the online placement in force behind each iteration.
    """

    task: str
    ratios: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    hottest: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    moves: list[int] = field(default_factory=list)
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
    max_moves: int | None = None,
) -> list[Phase]:
    """Runs the tasks one after the other.

    The static plan is made from the whole first task. Online begins with it, adds each iteration's counts to `history`,
    and plans anew every `interval` iterations. A plan is in force in the next iteration. An expert's tokens are shared
    evenly by its replicas.

    Args:
        tasks: [layers, tokens, top_k] of each task, of as many layers each; an iteration takes the next tokens, and
            begins again at the end.
        group: what to plan for.
        iterations: of each task.
        tokens: of all ranks in an iteration.
        interval: iterations between plans.
        history: an empty one; it says how much the past counts.
        max_moves: of a layer and plan.
    """
    static = online = group.plan(count(next(iter(tasks.values())), group.num_experts))
    plain = group.contiguous(static.num_layers)
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
            phase.moves.append(0)
            if (iteration + 1) % interval == 0:
                planned = group.plan(history.load, previous=online, max_moves=max_moves)
                phase.moves[-1] = int(planned.moves_from(online, group.ep_size).sum())
                online = planned
            phase.fits.append(float(online.imbalance(whole, group.ep_size).mean()))
        phases.append(phase)
    return phases
