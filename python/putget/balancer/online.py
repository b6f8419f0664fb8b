"""Keeps placements right while rounds go on: gathers loads, plans, moves experts, and changes tables on all ranks."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from putget._arguments import as_kind, as_list, check_int, check_seconds, shown
from putget.balancer.gathering import LoadGathering
from putget.balancer.history import LoadHistory
from putget.balancer.migrate import Landing, LandingProgress, Move, check_most_bytes, check_mover
from putget.balancer.options import MoveOptions, PlanOptions
from putget.balancer.placement import Placement
from putget.balancer.planner import rebalance
from putget.balancer.recovery import recover, said_by_all
from putget.balancer.schedule import Batch
from putget.balancer.worth import Pace, Tasks, paying_batches
from putget.errors import PutgetError
from putget.experts.blobs import ExpertBlobs
from putget.experts.slots import ExpertSlots, tagged
from putget.experts.store import HostStore
from putget.group.communicator import Communicator, collective
from putget.memory.workspace import resolve_device

logger = logging.getLogger("putget")

Loads: TypeAlias = NDArray[np.float64]
# Cost, in max/mean, of an iteration in which experts move: measured, docs/guides/balancer.md.
_MOVES_COST = 0.02


@dataclass(frozen=True)
class BalancedLayer:
    """The part of a layer that a `Balancer` needs; an engine's own layers give it by hand.

    Attributes:
        blobs: the experts of this rank's slots.
        expert_load: int32 [num_experts] on the device, to which this rank's tokens add.
        table: contiguous, on the device: what kernels of the layer look up to turn experts into slots.
        table_of: what `table` holds with a placement, for one of its layers: a tensor like it, on the CPU.
        on_placed: the host calls it with a placement and the layer's number in it when it knows that the placement is
            in force; or None.
        tell: gives the layer what its dispatch tells, and takes back what all ranks have told; or None: the caller does
            it by `Balancer.stats` and `Balancer.hear`.
        num_stats: numbers in the statistics of its dispatch.
    """

    blobs: ExpertBlobs
    expert_load: Tensor
    table: Tensor
    table_of: Callable[[Placement, int], Tensor]
    on_placed: Callable[[Placement, int], None] | None = None
    tell: Callable[[LoadGathering | None], None] | None = None
    num_stats: int = 0


class HasBalancedLayer(Protocol):
    """``putget.moe.ExpertParallelMoE``, or whatever describes itself."""

    def balanced(self) -> BalancedLayer:
        """The part of it that a `Balancer` needs."""


class Balancer:
    """Keeps the experts of some layers where they are needed, while the layers serve. Construction is collective.

    In every iteration each rank runs its rounds, then `step`. The ranks tell each other their loads in the statistics
    of one round, so all have the same sums, and plan the same without a collective. Moves go in batches through a
    `Landing`. When every rank has told that a batch is there, all of them take it behind the same round: the bytes come
    into their slots, and the tables change. No kernel waits for a host, and no round waits for a move.

    On CUDA `step` enqueues one kernel, and may be captured. The host's part of it is `poll`: it plans and posts, in
    its own time. While a graph is replayed the host calls `poll` now and then.

    Several passes in an iteration (drafts and their check) count together: loads add up, and there is one `step`. All
    layers have the same numbers of experts and slots; a draft layer with other numbers has a `Balancer` of its own.

    Args:
        comm: the group; its ranks map each other's memory.
        layers: `ExpertParallelMoE` with slots and ``count_experts=True``, or `BalancedLayer`, in the placement's order.
        placement: the placement in force, which the layers have; the same on all ranks.
        carrier: index of the layer whose dispatch tells the statistics. It runs in every iteration.
        num_stats: numbers of a rank in the statistics, at least 3; those of the carrier's ``AllToAll`` if None.
        plan: when it plans, and what a plan may cost.
        moves: how experts move.
        store: where experts come from that have died with their ranks; see `save`.
        slots: what is in force in the slots, where an update of weights writes them, too. While an update has them, no
            move begins. `store` then has the sizes of its `layers`.
        device: where the layers are.
        timeout_s: deadline of set-up, and of each stage of `set_active_ranks`, in seconds.

    Raises:
        ValueError: An argument is wrong, here or on another rank, or differs between ranks.
        BackendUnavailable, PeerTimeout, PutgetError: As `Landing`.

    Attributes:
        num_moves: experts that came to another rank, on all ranks together.
        moved_bytes: their bytes.
    """

    @collective
    def __init__(
        self,
        comm: Communicator,
        layers: Sequence[HasBalancedLayer | BalancedLayer],
        placement: Placement,
        *,
        carrier: int = 0,
        num_stats: int | None = None,
        plan: PlanOptions | None = None,
        moves: MoveOptions | None = None,
        store: HostStore | None = None,
        slots: ExpertSlots | None = None,
        device: str | torch.device = "cuda",
        timeout_s: float = 30.0,
    ) -> None:
        try:
            place = resolve_device(device)
            plan = as_kind("plan", PlanOptions() if plan is None else plan, PlanOptions)
            moves = as_kind("moves", MoveOptions() if moves is None else moves, MoveOptions)
            if store is not None:
                as_kind("store", store, HostStore)
            self._layers = _layers(layers, placement, comm.size)
            check_int("carrier", carrier, 0, len(self._layers) - 1)
            check_most_bytes(moves.most_bytes)
            check_mover(moves.mover)
            check_seconds("timeout_s", timeout_s)
            self._carrier = self._layers[carrier]
            told = self._carrier.num_stats if num_stats is None else num_stats
            self._gathering = LoadGathering(
                [layer.expert_load for layer in self._layers], comm.size, told, plan.interval, place
            )
            self._slots = slots
            self._blobs = [layer.blobs for layer in self._layers]
            if slots is not None:
                self._blobs = tagged(slots, self._blobs)
                _check_experts(slots, placement, comm)
            _check_store(store, self._blobs, placement)
            names = ("num_groups", "num_nodes", "max_moves", "min_gain")
            limits: dict[str, Any] = {name: getattr(plan, name) for name in names}
            self._plan_options = limits
            self._history = LoadHistory(decay=0.5) if plan.history is None else plan.history
            rebalance(_loads(self._history, placement), *self._sizes(placement, comm.size), **self._limits(placement))
        except (ValueError, PutgetError) as error:
            comm.refuse(str(error))
            raise
        digest = hashlib.sha256(placement.physical_to_logical.tobytes()).hexdigest()[:16]
        said = {"placement": digest, "carrier": carrier, "interval": plan.interval, **limits}
        comm.compare("Balancer", said, timeout_s)
        self._comm, self._moves, self._store = comm, moves, store
        self._timeout_s = timeout_s
        self._active = [True] * comm.size
        self._placement = placement
        self._landing = Landing(
            comm,
            self._blobs,
            cells=moves.cells,
            num_sms=moves.num_sms,
            mover=moves.mover,
            device=place,
            timeout_s=timeout_s,
            tables=[layer.table for layer in self._layers],
            gathering=self._gathering,
            slots=slots,
        )
        self._before = copy.deepcopy(self._history)
        self._windows = self._first_window = 0
        self._posted: Batch | None = None
        self._queue: Iterator[tuple[Batch, float]] = iter(())
        self._spent = 0.0  # intervals that the last plan's batches take
        self._tasks = Tasks()
        self._tasks_before = Tasks()
        self._pace = Pace(
            max(layer.blobs.slot_bytes for layer in self._layers),
            moves.most_bytes if moves.mover == "kernel" else None,
            plan.interval,
            _MOVES_COST,
        )
        self._waiting: Batch | None = None  # the next of the queue
        self._planner = ThreadPoolExecutor(1, "putget-balancer") if plan.in_thread else None
        self._planning: Future[Placement] | None = None
        self._is_planned = True  # the host has done with the last window, and has said so
        self._is_halted = False  # an expert is lost, until a call brings it back
        self.num_moves = self.moved_bytes = 0
        if self._carrier.tell is not None:
            self._carrier.tell(self._gathering)

    # --- an iteration -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Tensor:
        """int32 [num_stats] on the device: what the carrier's dispatch tells, ``dispatch(..., stats=)``."""
        return self._gathering.stats

    def hear(self, told: Tensor) -> None:
        """Keeps what all ranks told in a round, ``received.stats``, for `step`. The carrier's dispatch calls it.

        On CUDA it enqueues one copy. Of several rounds in an iteration the last one counts.

        Args:
            told: int32 [ep_size, num_stats] on the device.
        """
        self._gathering.hear(told)

    def move(self) -> None:
        """Puts and checks up to `most_bytes` more, anywhere in an iteration. `step` does it once; more moves faster."""
        self._landing.move(self._moves.most_bytes)

    def step(self) -> None:
        """Ends an iteration, behind its last round. All ranks call it, and none leaves one out.

        On CUDA it enqueues one kernel on the current stream. If nothing is being captured, it also calls `poll`.

        Raises:
            PutgetError: Bytes that came differ from those that were sent. No rank takes their batch.
        """
        self._landing.step(self._moves.most_bytes)
        if self._gathering.stats.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self.poll()

    def poll(self) -> None:
        """The host's part: notes what has been taken, has a new window's loads planned from, posts the next batch.

        It waits for nothing, and calls no CUDA function. Ranks may call it as often as they like.

        Raises:
            PutgetError: As `step`.
        """
        progress = self._note_taken()
        if self._is_halted:
            return
        if self._is_planned and not self.is_moving and progress.gathered > self._windows - self._first_window:
            self._plan()
        if self._planning is not None and self._planning.done():
            target, self._planning = self._planning.result(), None
            self._aim_at(target)
        if self._posted is None and self._waiting is not None and self._post(self._waiting):
            self._posted = self._waiting
            self._next_batch()
        if not self.is_moving and not self._is_planned:
            self._is_planned = True
            self._landing.planned(self._windows - self._first_window)

    def _note_taken(self) -> LandingProgress:
        """How far the landing is; if its batch has been taken, the placement is the batch's."""
        progress = self._landing.progress()
        if self._posted is not None and progress.agreed == self._landing.batch:
            self._take(self._posted)
        return progress

    def _take(self, batch: Batch) -> None:
        self._posted = None
        self._placement = Placement.of(batch.slots, self._placement.num_experts)
        self.num_moves += len(batch.transfers)
        self.moved_bytes += sum(self._layers[one.layer].blobs.slot_bytes for one in batch.transfers)
        self._tell_layers(batch.layers)

    def _tell_layers(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            on_placed = self._layers[number].on_placed
            if on_placed is not None:
                on_placed(self._placement, number)

    def _plan(self) -> None:
        """Plans from one window more. What follows depends on the windows alone, which all ranks have."""
        self._before, self._tasks_before = copy.deepcopy((self._history, self._tasks))
        window = self._gathering.sums().astype(np.float64)
        self._history.add(window)
        self._tasks.add(window, max(1.0, self._spent))
        self._windows += 1
        self._is_planned = False
        load, placement = _loads(self._history, self._placement), self._placement
        if self._planner is None:
            self._aim_at(self._target(load, placement))
        else:
            self._planning = self._planner.submit(self._target, load, placement)

    def _target(self, load: Loads, placement: Placement) -> Placement:
        dead = [rank for rank, is_active in enumerate(self._active) if not is_active]
        sizes, limits = self._sizes(placement, self._comm.size), self._limits(placement)
        return rebalance(load, *sizes, **limits, dead_ranks=dead, host_store=self._store is not None)

    def _aim_at(self, target: Placement) -> None:
        load, size = _loads(self._history, self._placement), self._comm.size
        self._spent = 0.0
        self._queue = paying_batches(self._placement, target, size, self._moves.cells, self._tasks, load, self._pace)
        self._next_batch()

    def _next_batch(self) -> None:
        self._waiting, time = next(self._queue, (None, 0.0))
        self._spent += time

    def _post(self, batch: Batch) -> bool:
        each = self._placement.num_replicas // self._comm.size
        after = Placement.of(batch.slots, self._placement.num_experts)
        moves = [
            Move(one.layer, one.src // each, one.src % each, one.dst // each, one.dst % each) for one in batch.transfers
        ]
        tables = {number: self._layers[number].table_of(after, number) for number in batch.layers}
        return self._landing.post(moves, tables)

    def _sizes(self, placement: Placement, num_gpus: int) -> tuple[int, int, int, int]:
        options = self._plan_options
        return placement.num_replicas, options["num_groups"], options["num_nodes"], num_gpus

    def _limits(self, placement: Placement) -> dict[str, Any]:
        options = self._plan_options
        return {"previous": placement, "max_moves": options["max_moves"], "min_gain": options["min_gain"]}

    # --- about it -----------------------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """The placement in force, as far as this host knows: on the CPU the one of the next round."""
        return self._placement

    @property
    def is_moving(self) -> bool:
        """Whether a plan is being made, or experts are on their way to one."""
        return self._planning is not None or self._posted is not None or self._waiting is not None

    @property
    def windows(self) -> int:
        """Windows that this rank has planned from."""
        return self._windows

    @property
    def load(self) -> Loads | None:
        """Tokens of all ranks by expert, newer windows with more weight: float64 [num_layers, num_experts].

        None before the first window.
        """
        return None if self._history.is_empty else self._history.load

    def save(self) -> None:
        """Saves every expert in the host store: of its replicas, the first one's rank does.

        Between two rounds; it waits for the device. Once is enough, where no update of weights changes an expert's
        bytes; otherwise once for each version.

        Raises:
            ValueError: There is no store, or an update of weights has the slots.
        """
        if self._store is None:
            raise ValueError("this Balancer has no host store: give it store=")
        self._comm.synchronize(self._landing.landed.device)
        self._note_taken()  # a step may have changed slots since the host looked
        mover = self._landing.hold_slots()
        if mover is not None:
            raise ValueError(f"{mover} has the slots: save behind its commit")
        each = self._placement.num_replicas // self._comm.size
        first = self._placement.logical_to_physical[:, :, 0]
        try:
            for layer, expert in np.argwhere(first // each == self._comm.rank).tolist():
                slot = int(first[layer, expert]) % each
                self._store.save(layer, expert, self._blobs[layer], slot)
        finally:
            self._landing.release_slots()

    # --- ranks that are lost ------------------------------------------------------------------------------------------

    def set_active_ranks(self, mask: Sequence[bool]) -> None:
        """Goes on without some ranks. Collective among the members, behind ``AllToAll.set_active_ranks`` of the mask.

        The members agree on the last batch that any of them has taken, and all take it. Tables forget the slots of lost
        ranks at once. If all replicas of an expert were there, its layer is planned anew, and the members load what
        they lack from the host store before the call returns. Other layers are planned anew while rounds go on.

        Args:
            mask: one bool for each rank of the group. A rank that was left out before stays out.

        Raises:
            ValueError: The mask is of another form, or brings a rank back.
            PeerTimeout: A member did not come in time. Call it again without that member.
            PutgetError: The only replica of an expert is lost, and the host store does not have what its layer needs.
                The placement in force before stays in force, and nothing is planned until a call succeeds. Or an
                update of weights has the slots of a member: nothing has happened on any; call again when it has been
                aborted.
        """
        members = [bool(is_active) for is_active in mask]
        if len(members) != self._comm.size or not any(members):
            raise ValueError(f"mask is {list(mask)}, expected {self._comm.size} bools, one of them true")
        back = [rank for rank, is_active in enumerate(members) if is_active and not self._active[rank]]
        if back:
            raise ValueError(f"mask brings rank {back[0]} back, which has no placement any more: make a new Balancer")
        self._hold_all_slots(members)
        with self._landing.moving():
            self._go_on_among(members)
        if self._slots is not None and len(versions := self._slots.versions()) > 1:
            text = "rank %d: experts of versions %s are in force together: the host store was saved before an update"
            logger.warning(text, self._comm.rank, versions)

    def _go_on_among(self, members: list[bool]) -> None:
        """Leaves ranks out, and brings what they had to the others."""
        posted, batch = self._posted, self._landing.batch
        agreed = self._landing.set_active_ranks(members)
        self._active = members
        if posted is not None and agreed == batch:
            self._take(posted)
        self._posted = self._waiting = None
        self._queue = iter(())
        if self._planning is not None:
            wait([self._planning])
            self._planning = None
        self._agree_on_history(members)
        lost = [rank for rank, is_active in enumerate(members) if not is_active]
        self._is_planned = True
        try:
            plan = functools.partial(self._target, _loads(self._history, self._placement), self._placement)
            here, target = recover(self._placement, lost, self._comm, self._store, self._blobs, plan, self._timeout_s)
        except BaseException:
            self._is_halted = True
            raise
        self._is_halted = False
        self._placement = here
        for number, layer in enumerate(self._layers):
            self._landing.write_table(number, layer.table_of(here, number))
        self._tell_layers(range(len(self._layers)))
        self._aim_at(target)

    def _hold_all_slots(self, members: Sequence[bool]) -> None:
        """Takes the slots on all members, or raises PutgetError on all."""
        if self._slots is None:
            return
        ranks = [rank for rank, is_member in enumerate(members) if is_member]
        try:
            said = said_by_all(self._comm, "slots", self._landing.hold_slots(), ranks, self._timeout_s)
        except BaseException:
            self._landing.release_slots()
            raise
        for rank, mover in said.items():
            if mover is not None:
                self._landing.release_slots()
                raise PutgetError(f"rank {rank}: {mover} has the slots: abort it, then call set_active_ranks again")

    def _agree_on_history(self, members: Sequence[bool]) -> None:
        """A rank that has planned from a window that others have not seen whole forgets it."""
        ranks = [rank for rank, is_member in enumerate(members) if is_member]
        least = min(said_by_all(self._comm, "windows", self._windows, ranks, self._timeout_s).values())
        if least < self._windows:
            self._history, self._tasks = copy.deepcopy((self._before, self._tasks_before))
        self._windows = self._first_window = least

    def close(self) -> None:
        """Frees the object; the layers keep their placement. Needs no peer. Idempotent."""
        if self._planner is not None:
            self._planner.shutdown()
        if self._carrier.tell is not None:
            self._carrier.tell(None)
        self._landing.close()

    def __enter__(self) -> Balancer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loads(history: LoadHistory, placement: Placement) -> Loads:
    """The loads of the history, or zeros."""
    if history.is_empty:
        return np.zeros((placement.num_layers, placement.num_experts))
    return history.load


def _layers(
    layers: Sequence[HasBalancedLayer | BalancedLayer], placement: Placement, num_gpus: int
) -> list[BalancedLayer]:
    """The descriptions of the layers.

    Raises:
        ValueError: They do not fit the placement.
    """
    found = [_described(number, layer) for number, layer in enumerate(as_list("layers", layers))]
    if not isinstance(placement, Placement) or len(found) != placement.num_layers or not found:
        raise ValueError(f"placement is {shown(placement)}, expected a Placement of {len(found)} layers, one or more")
    if placement.num_replicas % num_gpus:
        raise ValueError(f"placement has {placement.num_replicas} slots, which do not divide by {num_gpus} ranks")
    for number, layer in enumerate(found):
        sizes = (layer.blobs.num_slots, layer.expert_load.numel())
        wanted = (placement.num_replicas // num_gpus, placement.num_experts)
        if sizes != wanted:
            raise ValueError(
                f"layers[{number}] has {sizes[0]} slots here and {sizes[1]} experts; the placement has {wanted[0]} "
                f"and {wanted[1]}"
            )
        table = layer.table_of(placement, number)
        if table.dtype != layer.table.dtype or not torch.equal(table.view(-1), layer.table.cpu().view(-1)):
            raise ValueError(f"layers[{number}] has another placement in force than layer {number} of placement")
    return found


def _described(number: int, layer: HasBalancedLayer | BalancedLayer) -> BalancedLayer:
    if isinstance(layer, BalancedLayer):
        return layer
    if isinstance(layer, type) or not callable(getattr(layer, "balanced", None)):
        raise ValueError(
            f"layers[{number}] is {shown(layer)}, expected a BalancedLayer or a layer that describes itself"
        )
    return as_kind(f"layers[{number}].balanced()", layer.balanced(), BalancedLayer)


def _check_experts(slots: ExpertSlots, placement: Placement, comm: Communicator) -> None:
    """Raises ValueError unless the slots hold the experts that the placement says."""
    each = placement.num_replicas // comm.size
    held = placement.physical_to_logical[:, comm.rank * each :][:, :each].tolist()
    for number, wanted in enumerate(held):
        if slots.experts(number) != wanted:
            raise ValueError(
                f"slots have experts {slots.experts(number)} in layer {number}; the placement has {wanted} here"
            )


def _check_store(store: HostStore | None, layers: Sequence[ExpertBlobs], placement: Placement) -> None:
    if store is None:
        return
    wanted = tuple(blobs.slot_bytes for blobs in layers)
    if tuple(store.expert_bytes) != wanted or store.num_experts != placement.num_experts:
        raise ValueError(
            f"store has {store.num_experts} experts of {list(store.expert_bytes)} bytes in its layers; the layers have "
            f"{placement.num_experts} of {list(wanted)}"
        )
