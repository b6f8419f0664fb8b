"""A report on recorded routing: how uneven it is, how alike its tasks are, how much is left in small batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from putget.balancer import Placement, ReplicaChoice
from putget_bench.balance_simulation import Group, Ids, count

CHOICES = ("round_robin", "balanced")
_PLACES = 4  # of a task where small batches are taken
_LAYERS = 8  # at most, from which they are


@dataclass(frozen=True)
class TaskReport:
    """One task.

    Attributes:
        task: its name.
        tokens: recorded ones.
        load: [layers, experts] tokens of each expert.
        hottest: tokens of a layer's hottest expert over those of a mean one; mean over layers.
        contiguous: [layers] max/mean of the ranks' loads, if experts lie in their order.
        planned: the same with a plan made from each task, by its name.
        batches: max/mean of batches of some tokens with the plan of the task, by choice and tokens of a batch.
    """

    task: str
    tokens: int
    load: NDArray[np.int64]
    hottest: float
    contiguous: NDArray[np.float64]
    planned: dict[str, NDArray[np.float64]]
    batches: dict[str, dict[int, float]]


def report(tasks: dict[str, Ids], group: Group, sizes: tuple[int, ...]) -> list[TaskReport]:
    """Looks at every task.

    Args:
        tasks: [layers, tokens, top_k] of each task, of as many layers each.
        group: what to plan for.
        sizes: tokens of all ranks in a small batch; a task with fewer tokens leaves it out.
    """
    loads = {task: count(ids, group.num_experts) for task, ids in tasks.items()}
    plans = {task: group.plan(load) for task, load in loads.items()}
    found = []
    for task, ids in tasks.items():
        load = loads[task]
        found.append(
            TaskReport(
                task,
                ids.shape[1],
                load,
                float((load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-9)).mean()),
                group.contiguous(len(load)).imbalance(load, group.ep_size),
                {other: plan.imbalance(load, group.ep_size) for other, plan in plans.items()},
                {how: _batches(ids, plans[task], group.ep_size, how, sizes) for how in CHOICES},
            )
        )
    return found


def _batches(ids: Ids, plan: Placement, ep_size: int, how: str, sizes: tuple[int, ...]) -> dict[int, float]:
    """max/mean of consecutive tokens, mean over some layers and places; one caller sees the whole batch."""
    layers = np.unique(np.linspace(0, len(ids) - 1, _LAYERS).astype(int)).tolist()
    ratios: dict[int, list[float]] = {size: [] for size in sizes if size <= ids.shape[1]}
    for layer in layers:
        choose = ReplicaChoice(plan, layer, how=how, ep_size=ep_size)
        for size, found in ratios.items():
            for first in np.linspace(0, ids.shape[1] - size, _PLACES).astype(int).tolist():
                batch: Any = ids[layer, first : first + size]
                slots = choose(torch.from_numpy(np.ascontiguousarray(batch, np.int32)))
                ranks = slots[slots >= 0] // (plan.num_replicas // ep_size)
                loads = torch.bincount(ranks, minlength=ep_size)
                found.append(float(loads.max() / loads.double().mean().clamp(min=1e-9)))
    return {size: float(np.mean(found)) for size, found in ratios.items()}
