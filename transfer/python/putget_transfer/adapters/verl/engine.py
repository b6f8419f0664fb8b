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
    """A call that sends or receives a version."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name} of version {self.version}"


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

        Raises:
            ValueError: Others take part than before, and a call still runs, maybe one that was cancelled. The topology
                stays what it was.
        """
        found = _Topology(**topology)
        with self.guard:
            if self.topology is None or self.topology.session != found.session:
                if self.running is not None:
                    raise ValueError(f"init_process_group: {self.running} still runs, with others than take part now")
                self._close()
            self.topology = found

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
                one for another version, this version has failed for all.
            UpdateFailed: No rollout worker loads the version. Why is named.
        """

        def send(topology: _Topology, store: Rendezvous) -> dict[str, float]:
            return self._send(topology, store, weights)

        return await asyncio.to_thread(self._alone, "send_weights", "actor", send)

    def _alone(self, name: str, role: str, work: Callable[[_Topology, Rendezvous], _Result]) -> _Result:
        """Do something unless a call before is still at it: its thread goes on where its task was cancelled."""
        with self.guard:
            topology, running = self.topology, self.running
            if topology is None:
                raise ValueError("init_process_group: it has to come before weights are sent or received")
            if running is None:
                self.running = _Call(name, topology.version)
        if running is not None:
            refused = ValueError(f"{name}: {running} still runs")
            if running.version != topology.version:
                # The others would wait for this rank until their deadline.
                with contextlib.suppress(UpdateFailed):
                    _fail(self._reached(topology), topology, role, refused)
            raise refused
        try:
            return work(topology, self._reached(topology))
        finally:
            self.running = None

    def _send(
        self, topology: _Topology, store: Rendezvous, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, float]:
        end = time.monotonic() + self.deadline_s
        watch = _watch(store, topology.version, end)
        try:
            self._keep(weights, topology)
            if self.sender is None:
                engine = Options(networks=self.networks, address=self.address).engine("cpu")
                counts = topology.num_trainers, topology.num_workers
                self.sender = Sender(ENGINE, topology.rank, *counts, store, engine, deltas=self.delta_bytes > 0)
            if not self.sender.begun:
                # Also after a version that failed before all had planned: the engine keeps its address.
                self.sender.begin(self.tensors, end, watch=watch, watermark_bytes=self.bucket_size)
            report = self.sender.send(topology.version, end)
        except BaseException as error:
            _fail(store, topology, "actor", error)
            raise
        return {"putget/bytes": float(report.num_bytes), "putget/seconds": report.seconds}

    def _keep(self, weights: Iterable[tuple[str, torch.Tensor]], topology: _Topology) -> None:
        """Copy this rank's share to the host; verl's generator gathers, so each rank goes through all of it."""
        for number, (name, tensor) in enumerate(weights):
            if number % topology.num_trainers != topology.rank:
                continue
            if name not in self.tensors:
                self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.tensors[name].copy_(tensor)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a version, once it is complete in all rollout workers.

        Raises:
            ValueError: A call before still runs, maybe one that was cancelled. Where that is one for another version,
                this version has failed for all.
            UpdateFailed: It is not. Why is named.
        """
        found = await asyncio.to_thread(self._alone, "receive_weights", "worker", self._receive)
        for name, tensor in found.items():
            yield name, tensor

    def _receive(self, topology: _Topology, store: Rendezvous) -> dict[str, torch.Tensor]:
        end = time.monotonic() + self.deadline_s
        if self.receiver is None:
            watch = _watch(store, topology.version, end)
            self._begin(topology, store, store.take({"params": "actor 0"}, end, watch)[0])
        receiver = self.receiver
        if receiver is None:
            raise ValueError("receive_weights: this worker has been closed")
        receiver.begin(topology.version, max(end - time.monotonic(), 0.0))
        (outcome,) = store.take({f"end/{topology.version}": "actor 0"}, end + 2 * GRACE_S)
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


def _watch(store: Rendezvous, version: int, end: float) -> Callable[[], None]:
    """Return what ends a wait when an actor has failed."""

    def watch() -> None:
        if store.has(f"failed/{version}"):
            raise UpdateFailed(store.take({f"failed/{version}": "an actor"}, end)[0])

    return watch
