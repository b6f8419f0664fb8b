"""verl's checkpoint engine: actors write a version into memory of all rollout workers, which then load it.

verl hands over whole tensors, and its rollout workers load whole tensors. So each actor rank keeps a share of them on
the host, and each rollout worker has memory for all. A worker yields nothing before a version is complete in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from verl.checkpoint_engine.base import CheckpointEngine

from putget_transfer.adapters.options import Options
from putget_transfer.adapters.receiver import Receiver
from putget_transfer.adapters.rendezvous import Rendezvous, params_in
from putget_transfer.adapters.sender import GRACE_S, Sender
from putget_transfer.weights import Slots, UpdateFailed, checkpoint, record

NAME = "putget"
ENGINE = "verl"
_GIVE_UP_S = 10.0
"""How long a new session waits for a call that it has given up."""
_Result = TypeVar("_Result")


@dataclass
class _Settings:
    """Settings that all workers and actors have agreed on."""

    num_trainers: int
    num_workers: int
    commit: str = "paused"
    unused: list[str] = field(default_factory=list)
    delta_bytes: int = 0


@dataclass
class _Topology:
    """The topology that actors and rollout workers share, but for their rank."""

    session: str
    version: int
    rank: int
    num_trainers: int
    num_workers: int
    address: str
    port: int


@dataclass
class _Call:
    """A call that sends or receives a version.

    Attributes:
        name: Its name.
        end: When (of `time.monotonic`) its deadline ends.
        version: The version, once its thread has begun.
        cancelled: Nobody waits for it any more.
        given_up: It has to end as soon as it can.
        over: It has ended.
        turn: The actor's call before has gone through its weights.
        gathered: This one has.
        problem: Why it keeps no weights any more.
    """

    name: str
    end: float
    version: int = 0
    cancelled: bool = False
    given_up: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    turn: threading.Event | None = None
    gathered: threading.Event = field(default_factory=threading.Event)
    problem: Exception | None = None

    def __str__(self) -> str:
        return f"{self.name} of version {self.version}"

    def require(self) -> None:
        """Raise UpdateFailed where it has been given up."""
        if self.given_up:
            raise UpdateFailed(f"{self} was cancelled, and others take part now")

    def refusal(self) -> str:
        """Say why other calls are refused, and until when."""
        # Others may say so late what a version has come to.
        left = max(self.end + 2 * GRACE_S - time.monotonic(), 0.0)
        return f"{self} still runs; its deadline ends in {left:.0f} s"


_Work = Callable[[_Call, _Topology, Rendezvous], _Result]


class PutgetCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One actor's or rollout worker's engine. As long as the same ones take part, plan and memory stay."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        networks: str | None = None,
        master_address: str = "127.0.0.1",
        address: str | None = None,
        deadline_s: float = 300.0,
        delta_bytes: int = 0,
        device: str = "cpu",
    ) -> None:
        """Take verl's arguments, and those of `engine_kwargs`.

        Args:
            bucket_size: Bytes that are prepared at a time.
            is_master: Whether this is actor rank 0.
            networks: What it may travel over: some of "tcp", "host", "nvlink" and "verbs", with commas.
            master_address: Where the others reach actor rank 0.
            address: This machine's address for "tcp"; None is the one that leads to other machines.
            deadline_s: Time for an update.
            delta_bytes: Memory of each rollout worker for deltas; 0 is none.
            device: Where a rollout worker has memory for a version: "cpu" or "cuda:N".
        """
        self.bucket_size, self.is_master, self.networks = bucket_size, is_master, networks
        self.master_address, self.address, self.deadline_s = master_address, address, deadline_s
        self.delta_bytes, self.device = delta_bytes, device
        self.name = uuid.uuid4().hex
        self.store: Rendezvous | None = None
        self.topology: _Topology | None = None
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        # A call whose task was cancelled is here until its thread has ended. `guard` is for it and `topology`.
        self.running: _Call | None = None
        # Set when the last call has gone through its weights.
        self.gathered: threading.Event | None = None
        self.guard = threading.Lock()

    def prepare(self) -> dict[str, Any]:
        """Return what the others have to know."""
        if not self.is_master:
            return {"name": self.name}
        if self.store is None:
            self.store = Rendezvous.open(self.master_address, 0, holds=True, timeout_s=self.deadline_s)
        return {"name": self.name, "address": self.master_address, "port": self.store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give actors and rollout workers their ranks, and the version's number.

        Raises:
            ValueError: No actor is the master, or several are.
        """
        masters = [one for one in metadata[:actor_wg_world_size] if "port" in one]
        if len(masters) != 1:
            raise ValueError(f"metadata: {len(masters)} actors of {actor_wg_world_size} are the master; one is needed")
        # Another session where others take part: they plan anew.
        session = str(uuid.uuid5(uuid.NAMESPACE_OID, " ".join(one["name"] for one in metadata)))
        common = {
            "session": session,
            "version": time.time_ns(),
            "num_trainers": actor_wg_world_size,
            "num_workers": rollout_world_size,
            "address": masters[0]["address"],
            "port": masters[0]["port"],
        }

        def arguments(size: int) -> dict[str, list[Any]]:
            return {"rank": list(range(size)), **{name: [value] * size for name, value in common.items()}}

        return arguments(actor_wg_world_size), arguments(rollout_world_size)

    def init_process_group(self, **topology: Any) -> None:
        """Take the topology of the next version.

        Where others take part than before, a call of this rank that was cancelled is given up. It ends before this
        returns, so it reads and writes no tensors any more.

        Raises:
            ValueError: Others take part than before, and a call still runs that was not cancelled, or that has not come
                to a point where it can end: it connects to actor rank 0, writes, or waits for the caller's weights. The
                topology stays what it was; a cancelled call has been given up all the same.
        """
        found = _Topology(**topology)
        running = self.running
        if running is not None and running.cancelled and self._is_new(found):
            running.given_up = True
            running.over.wait(_GIVE_UP_S)
        with self.guard:
            if self._is_new(found):
                if self.running is not None:
                    raise ValueError(
                        f"init_process_group: {self.running.refusal()}. It is with others than take part now"
                    )
                self._close()
            self.topology = found

    def _is_new(self, topology: _Topology) -> bool:
        return self.topology is None or self.topology.session != topology.session

    def finalize(self) -> None:
        """Keep memory and plan: the next version needs them."""

    def _reached(self, topology: _Topology) -> Rendezvous:
        if self.store is None:
            self.store = Rendezvous.open(topology.address, topology.port, holds=False, timeout_s=self.deadline_s)
        return self.store.of(topology.session)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send a version. All actors call it.

        Returns:
            Bytes and seconds of this rank, for verl's metrics.

        Raises:
            ValueError: A call before still runs, maybe one that was cancelled: its bytes are still read. Where that is
                one for another version, this version has failed for all. The others gather from this rank, so it goes
                through its weights first.
            UpdateFailed: No rollout worker loads the version. Why is named.
        """

        def send(call: _Call, topology: _Topology, store: Rendezvous) -> dict[str, float]:
            return self._send(call, topology, store, weights)

        def refuse(call: _Call, topology: _Topology, store: Rendezvous) -> None:
            self._gather(call, weights, topology, store)

        return await self._in_thread("send_weights", "actor", send, refuse)

    async def _in_thread(
        self, name: str, role: str, work: _Work[_Result], refuse: _Work[None] | None = None
    ) -> _Result:
        """Do something in a thread, which goes on where the task is cancelled, or its coroutine closed."""
        call = _Call(name, time.monotonic() + self.deadline_s)
        try:
            return await asyncio.to_thread(self._alone, call, role, work, refuse)
        except BaseException:  # where the work itself has failed, it is over
            call.cancelled = True
            raise

    def _alone(self, call: _Call, role: str, work: _Work[_Result], refuse: _Work[None] | None) -> _Result:
        """Do something unless a call before is still at it: its thread goes on where its task was cancelled.

        `refuse` is done in place of `work` where others wait for what this rank does in a version.
        """
        with self.guard:
            topology, running = self.topology, self.running
            if topology is None:
                raise ValueError("init_process_group: it has to come before weights are sent or received")
            if running is None:
                self.running = call
            if running is None or running.version != topology.version:
                call.version = topology.version
                call.turn, self.gathered = self.gathered, call.gathered
        try:
            if running is not None:
                raise self._refused(call, topology, running, role, refuse)
            return work(call, topology, self._reached(topology))
        finally:
            call.gathered.set()
            if running is None:
                self.running = None
                call.over.set()

    def _refused(
        self, call: _Call, topology: _Topology, running: _Call, role: str, refuse: _Work[None] | None
    ) -> Exception:
        """Tell the others that this call is refused, unless they take part in the one that runs; return why."""
        refused = call.problem = ValueError(f"{call.name}: {running.refusal()}")
        if running.version != topology.version:
            # The others would wait for this rank until their deadline.
            with contextlib.suppress(UpdateFailed):
                store = self._reached(topology)
                _fail(store, topology, role, refused)
                if refuse is not None:
                    refuse(call, topology, store)
        return refused

    def _send(
        self, call: _Call, topology: _Topology, store: Rendezvous, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, float]:
        end = call.end
        try:
            self._gather(call, weights, topology, store)
            if call.problem is not None:
                raise call.problem
            call.require()
            if self.sender is None:
                engine = Options(networks=self.networks, address=self.address).engine("cpu")
                counts = topology.num_trainers, topology.num_workers
                self.sender = Sender(ENGINE, topology.rank, *counts, store, engine, deltas=self.delta_bytes > 0)
            if not self.sender.begun:
                # Also after a version that failed before all had planned: the engine keeps its address.
                self.sender.begin(self.tensors, end, watch=_watch(store, call), watermark_bytes=self.bucket_size)
            report = self.sender.send(topology.version, end, watch=call.require)
        except BaseException as error:
            _fail(store, topology, "actor", error)
            raise
        return {"putget/bytes": float(report.num_bytes), "putget/seconds": report.seconds}

    def _gather(
        self, call: _Call, weights: Iterable[tuple[str, torch.Tensor]], topology: _Topology, store: Rendezvous
    ) -> None:
        """Copy this rank's share to the host.

        verl's generator gathers, so each rank goes through all of it: also one that was refused, that could not copy a
        tensor, or that has been given up, because others are told so at other times, or not at all. Calls gather in
        their order, as they do on the others.
        """
        try:
            if call.turn is not None and not call.turn.wait(max(call.end - time.monotonic(), 0.0)):
                raise UpdateFailed(f"{call}: the call before still waits for its weights")
            for number, (name, tensor) in enumerate(weights):
                kept = call.problem is None and not call.given_up
                if kept and number % topology.num_trainers == topology.rank:
                    self._keep(call, name, tensor, topology, store)
        except Exception as error:
            call.problem = call.problem or error
        finally:
            call.gathered.set()

    def _keep(self, call: _Call, name: str, tensor: torch.Tensor, topology: _Topology, store: Rendezvous) -> None:
        try:
            if name not in self.tensors:
                self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.tensors[name].copy_(tensor)
        except Exception as error:
            call.problem = error
            # The next gather may fail as well, or stand still.
            with contextlib.suppress(UpdateFailed):
                _fail(store, topology, "actor", error)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a version, once it is complete in all rollout workers.

        Raises:
            ValueError: A call before still runs, maybe one that was cancelled. Where that is one for another version,
                this version has failed for all.
            UpdateFailed: It is not. Why is named.
        """
        found = await self._in_thread("receive_weights", "worker", self._receive)
        for name, tensor in found.items():
            yield name, tensor

    def _receive(self, call: _Call, topology: _Topology, store: Rendezvous) -> dict[str, torch.Tensor]:
        end = call.end
        if self.receiver is None:
            self._begin(topology, store, store.take({"params": "actor 0"}, end, _watch(store, call))[0])
        receiver = self.receiver
        if receiver is None:
            raise ValueError("receive_weights: this worker has been closed")
        receiver.begin(topology.version, max(end - time.monotonic(), 0.0))
        try:
            (outcome,) = store.take({f"end/{topology.version}": "actor 0"}, end + 2 * GRACE_S, call.require)
        except UpdateFailed as error:
            receiver.give_up(str(error))
            raise
        receiver.finish()
        if outcome:
            raise UpdateFailed(outcome)
        return self.tensors

    def _begin(self, topology: _Topology, store: Rendezvous, described: Any) -> None:
        params = params_in(described)
        self.tensors = {
            param.name: torch.empty(param.shape, dtype=getattr(torch, param.dtype), device=self.device)
            for param in params
        }
        slots: Slots = record(self.tensors, checkpoint(params))
        engine = Options(networks=self.networks, address=self.address).engine(self.device)
        settings = _Settings(topology.num_trainers, topology.num_workers, delta_bytes=self.delta_bytes)
        self.receiver = Receiver(ENGINE, topology.rank, store, engine, params, slots, settings, move=lambda: None)

    def _close(self) -> None:
        """Give up the session."""
        if self.sender is not None:
            self.sender.close()
        if self.receiver is not None:
            self.receiver.shutdown()
        self.sender = self.receiver = None
        self.tensors = {}
        if not self.is_master:
            self.store = None


def _fail(store: Rendezvous, topology: _Topology, role: str, error: BaseException) -> None:
    """Tell all others that a version has failed here."""
    problem = f"{role} {topology.rank}: {error}"
    store.put(f"failed/{topology.version}", problem)
    if role == "actor" and topology.rank == 0:
        store.put(f"end/{topology.version}", problem)


def _watch(store: Rendezvous, call: _Call) -> Callable[[], None]:
    """Return what ends a wait when an actor has failed, or the call is given up."""

    def watch() -> None:
        call.require()
        if store.has(f"failed/{call.version}"):
            raise UpdateFailed(store.take({f"failed/{call.version}": "an actor"}, call.end)[0])

    return watch
