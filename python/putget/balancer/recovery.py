"""A placement after the loss of ranks: tables without their slots, and experts from the host store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from putget.balancer.placement import Ints, Placement
from putget.errors import PutgetError
from putget.experts.blobs import ExpertBlobs
from putget.experts.store import HostStore
from putget.group.communicator import Communicator


def recover(
    placement: Placement,
    lost: Sequence[int],
    comm: Communicator,
    store: HostStore | None,
    blobs: Sequence[ExpertBlobs],
    plan: Callable[[], Placement],
    timeout_s: float,
) -> tuple[Placement, Placement]:
    """Brings back what is lost, and says what is to be done. Collective among the other ranks.

    Args:
        placement: in force before.
        lost: ranks.
        comm: the group.
        store: where lost experts come from, or None.
        blobs: the experts of this rank, for each layer.
        plan: a placement without the lost ranks.
        timeout_s: deadline in seconds.

    Returns:
        What is in force now, and what to move towards.

    Raises:
        PutgetError: An expert is lost, and the store does not have what its layer needs. No slot has changed on any
            rank.
        PeerTimeout: A rank did not come in time.
    """
    num_gpus = comm.size
    each = placement.num_replicas // num_gpus
    slots = placement.physical_to_logical.copy()
    for rank in lost:
        slots[:, rank * each : (rank + 1) * each] = -1
    gone = _gone(slots, placement.num_experts)
    if gone and store is None:
        layer, expert = gone[0]
        raise PutgetError(
            f"ranks {list(lost)} had the only replica of expert {expert} of layer {layer}, one of {len(gone)} experts "
            "lost, and there is no host store: the placement stays. Give more slots or a HostStore, or go "
            "on without them: layer.degraded = True on every rank"
        )
    target = plan()
    wanted = target.physical_to_logical
    here = slots.copy()
    layers = sorted({layer for layer, _ in gone})
    here[layers] = wanted[layers]
    mine = slice(comm.rank * each, (comm.rank + 1) * each)
    loads = [
        (layer, slot, int(here[layer, mine][slot]))
        for layer in layers
        for slot in np.flatnonzero(here[layer, mine] != slots[layer, mine]).tolist()
    ]
    members = [rank for rank in range(num_gpus) if rank not in lost]
    reason = "" if store is None else _missing(store, loads)
    for rank, said in sorted(said_by_all(comm, "recovery", reason, members, timeout_s).items()):
        if said:
            raise PutgetError(f"rank {rank} cannot bring back what ranks {list(lost)} had: {said}")
    for layer, slot, expert in loads:
        assert store is not None
        store.load(layer, expert, blobs[layer], slot, verify=False)
    return Placement.of(here, placement.num_experts), target


def said_by_all(comm: Communicator, what: str, value: Any, members: Sequence[int], timeout_s: float) -> dict[int, Any]:
    """The word of each member, by rank: JSON. Collective among them.

    Raises:
        PeerTimeout: A rank did not come in time.
    """
    return comm.exchange_among(what, value, timeout_s, members=members, phase="set_active_ranks")


def _gone(slots: Ints, num_experts: int) -> list[tuple[int, int]]:
    """Layer and number of every expert that no slot holds."""
    held = np.zeros((len(slots), num_experts + 1), bool)
    held[np.arange(len(slots))[:, None], slots] = True  # -1 is the last one
    return [(int(layer), int(expert)) for layer, expert in np.argwhere(~held[:, :-1])]


def _missing(store: HostStore, loads: Sequence[tuple[int, int, int]]) -> str:
    """Why an expert cannot be had; empty if all can."""
    for layer, _, expert in loads:
        try:
            store.view(layer, expert)
        except (ValueError, PutgetError) as error:
            return str(error)
    return ""
