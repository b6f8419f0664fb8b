"""Whether a move of experts pays: what it gains while loads last, what it loses when they change, what it costs.

A task is a time in which loads are alike. Loads are looked at window by window. A window that is not like the ones
before it begins another task. How long tasks have lasted lately says how long the present one will.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from putget.balancer.placement import Ints, Placement
from putget.balancer.schedule import Batch, batches

Loads = NDArray[np.float64]
_ALIKE = 0.7  # correlation of the loads of two windows of one task, at least
_KEPT = 4  # windows of the present task, tasks before it, and times that tasks have lasted
_FIRST_LASTS = 3  # intervals from which on the time of the first task counts, whose beginning nobody saw
_UNKNOWN_LASTS = 64  # intervals that a task is expected to last before another has ended
_OUTLIVES = 3  # times its age, that a task is expected to last which has lasted longer than each before it
_LONGEST_PLAN = 4  # intervals, after which a new plan is made from newer loads


@dataclass(frozen=True)
class Pace:
    """How fast experts move.

    Attributes:
        expert_bytes: of the largest expert.
        most_bytes: that a rank puts in an iteration; None: a batch takes one iteration.
        interval: iterations between plans.
        cost: what an iteration costs in which experts move, in max/mean of one layer.
    """

    expert_bytes: int
    most_bytes: int | None
    interval: int
    cost: float

    def iterations(self, batch: Batch, num_gpus: int) -> int:
        """From the iteration in which a batch is posted until it is in force."""
        if self.most_bytes is None:
            return 2
        return -(-moved_experts(batch, num_gpus) * self.expert_bytes // self.most_bytes) + 1


def moved_experts(batch: Batch, num_gpus: int) -> int:
    """Experts that a rank puts or gets for a batch, at most."""
    each = batch.slots.shape[1] // num_gpus
    ranks = np.array([[one.src // each, one.dst // each] for one in batch.transfers], np.int64).reshape(-1, 2)
    return max((int(np.bincount(ends).max()) for ends in ranks.T if len(ends)), default=0)


class Tasks:
    """The tasks of the last windows. Times are in intervals between plans."""

    def __init__(self) -> None:
        self._windows: deque[Loads] = deque(maxlen=_KEPT)  # of the present task
        self._before: deque[Loads] = deque(maxlen=_KEPT)  # mean window of each task before it
        self._times: deque[float] = deque(maxlen=_KEPT)  # that tasks before it have lasted
        self._mean: Loads | None = None
        self._is_first = True
        self._latest = 0.0  # the time of the last window
        self.age = 0.0

    def add(self, load: Loads, time: float) -> None:
        """Adds a window, float64 [num_layers, num_experts] tokens."""
        if self._mean is not None and not are_alike(self._mean, load):
            if not self._is_first or self.age >= _FIRST_LASTS:
                self._times.append(self.age)
            self._before.append(self._mean)
            self._windows.clear()
            self._mean, self.age, self._is_first = None, 0.0, False
        self._mean = load if self._mean is None else (self._mean + load) / 2
        self._windows.append(load)
        self.age, self._latest = self.age + time, time

    @property
    def lasts(self) -> float:
        """How long the present task is expected to last in all: as those before it that lasted as long as it has.

        Its last window does not count in that: it may have the beginning of the next task in it.
        """
        if not self._times:
            return max(float(_UNKNOWN_LASTS), _OUTLIVES * self.age)
        longer = [time for time in self._times if time >= self.age - self._latest]
        return sum(longer) / len(longer) if longer else _OUTLIVES * self.age

    def worth(self, late: float, since: float, now: Loads, before: Loads) -> Loads:
        """The worth of changes.

        Args:
            late: intervals from the beginning of the present task until they are in force.
            since: intervals in which the next task corrects as much: a first one, and the batches of a plan so far.
            now: what each gains in an interval of this task.
            before: the same in the tasks before it.
        """
        wrong = since if 2 * since <= self.lasts else self.lasts
        return (self.lasts - late) * now + wrong * before

    def gains(self, before: Placement, after: Placement, num_gpus: int, layers: Sequence[int]) -> NDArray[np.float64]:
        """The gain of a change of placement in max/mean: float64 [2, layers], in the present task and in those before.

        Args:
            before: the placement of these layers alone.
            after: the other one.
            num_gpus: ranks.
            layers: which of the windows' layers they are.
        """
        found = np.zeros((2, len(layers)))
        # A single task before this one says little of the next: another, for which both are alike, stands beside it.
        unseen = 1 if len(self._before) == 1 else 0
        for mean, windows, more in zip(found, (self._windows, self._before), (0, unseen), strict=True):
            for load in windows:
                part = load[list(layers)]
                gain = before.imbalance(part, num_gpus) - after.imbalance(part, num_gpus)
                mean += gain / (len(windows) + more)
        return found


def are_alike(one: Loads, other: Loads) -> bool:
    """Whether two windows may be of one task: by the correlation of their loads, without what chance does to counts.

    Windows with too few tokens to tell are alike.
    """
    parts = []
    for load in (one, other):
        total = load.sum(axis=1, keepdims=True)
        share = load / np.where(total > 0, total, 1)
        centred = share - share.mean(axis=1, keepdims=True)
        chance = (share * (1 - share) / np.where(total > 0, total, np.inf)).sum()
        parts.append((centred, float((centred**2).sum() - chance), float(chance)))
    (first, first_size, first_chance), (second, second_size, second_chance) = parts
    if first_size <= first_chance or second_size <= second_chance:
        return True
    return float((first * second).sum()) >= _ALIKE * math.sqrt(first_size * second_size)


def paying_batches(
    current: Placement, target: Placement, num_gpus: int, cells: int, tasks: Tasks, load: Loads, pace: Pace
) -> Iterator[tuple[Batch, float]]:
    """The batches from one placement to another that pay, and the intervals that each takes, the best layers first.

    A batch gains from when it is in force to the end of the task. The next task begins with it, and its first plan
    corrects it after an interval and as many batches as there are in this plan up to it, or not at all where that is
    behind the middle of a task: so long it loses what it would have lost in the tasks before. The plan ends with the
    first batch whose gain does not exceed its loss and its cost, or which would be in force when the task has ended.

    The same arguments give the same batches on every rank.
    """
    every = range(current.num_layers)
    if tasks.age == 0:  # nothing is known of loads
        for batch in batches(current, target, num_gpus, cells):
            yield batch, pace.iterations(batch, num_gpus) / pace.interval
        return
    now, before = tasks.gains(current, target, num_gpus, every)
    least = 1 / pace.interval  # that any batch takes
    worth = tasks.worth(tasks.age + least, 1 + least, now, before)
    order = [layer for layer in np.argsort(-worth, kind="stable").tolist() if worth[layer] > 0]
    spent, slots = 0.0, current.physical_to_logical
    for batch in batches(current, target, num_gpus, cells, order, load):
        time = pace.iterations(batch, num_gpus) / pace.interval
        late = tasks.age + spent + time
        now, before = tasks.gains(*_parts(slots, batch, current.num_experts), num_gpus, batch.layers)
        worth = tasks.worth(late, 1 + spent + time, now, before)
        if spent >= _LONGEST_PLAN or late >= tasks.lasts or worth.sum() <= pace.cost * time * current.num_layers:
            return
        spent, slots = spent + time, batch.slots
        yield batch, time


def _parts(slots: Ints, batch: Batch, num_experts: int) -> tuple[Placement, Placement]:
    layers = list(batch.layers)
    return Placement.of(slots[layers], num_experts), Placement.of(batch.slots[layers], num_experts)
