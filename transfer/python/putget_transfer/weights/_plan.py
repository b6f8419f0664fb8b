"""Schedules: who writes which bytes to whom, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from putget_transfer.weights import _native
from putget_transfer.weights._model import Param, Slots, merge


def plan(
    params: Sequence[Param] | Sequence[Sequence[Param]],
    slots: Sequence[Slots],
    *,
    replicas: int = 1,
    task_bytes: int = 32 << 20,
    unused: Iterable[str] = (),
) -> _native.Schedule:
    """Plan an update. The same arguments give the same schedule, so each rank may plan for itself.

    Bytes are balanced over the trainer ranks that hold copies of a shard. Each byte of a slot is written once. A
    parameter goes *direct*, from the shards that hold what a slot needs, or *gathered*, where blocks of 128 x 128 cross
    shards or where pieces would be tiny: then its holders bring it together and share the writing.

    Args:
        params: The parameters, or a list of them for each trainer rank (`describe`).
        slots: The slots of each rank of one replica (`record`).
        replicas: How many replicas there are. Rollout rank r of replica n is n * len(slots) + r.
        task_bytes: What a rank prepares at a time, at most, but for what cannot be cut.
        unused: Parameters that no slot needs.

    Raises:
        ValueError: Names that only one side has, shapes or types that do not fit, shards that leave something out,
            slots that overlap. All is named.
    """
    lists = [[param] if isinstance(param, Param) else param for param in params]
    ranks = [(rank.memory, list(rank)) for rank in slots]
    return _native.make(merge(lists), ranks, replicas, task_bytes, set(unused))
