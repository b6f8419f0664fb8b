"""The half that lives in trainers: a version leaves a model for all schedulers of SGLang."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from putget_transfer.adapters.options import Options
from putget_transfer.adapters.rendezvous import Rendezvous
from putget_transfer.adapters.sender import Sender
from putget_transfer.adapters.sglang.weights import LOADER
from putget_transfer.adapters.sglang.weights.client import Client, called
from putget_transfer.adapters.sglang.weights.worker import ENGINE
from putget_transfer.weights import Report, UpdateFailed


@dataclass
class TrainerInit:
    """How a trainer rank begins; all ranks have the same, but for `rank`.

    Attributes:
        rank: This rank. Rank 0 reaches the servers.
        tp_sizes: Tensor-parallel ranks of each server, in the order of the clients.
        num_trainers: Trainer ranks.
        master_address: Where schedulers and trainer ranks reach rank 0.
        master_port: Its port; 0 is any, with one trainer rank only.
        deadline_s: Time for an update, and for the start.
        networks: What it may travel over: some of "tcp", "host", "nvlink" and "verbs", with commas. None: "tcp" for a
            CPU, "nvlink,verbs" for a GPU.
        address: This machine's address for "tcp"; None is the one that leads to other machines.
        worker_address: The schedulers' address for "tcp"; None is the one that leads to other machines.
        device: Where bytes are prepared: "cpu" or "cuda:N".
        watermark_bytes: Memory for prepared bytes.
        quantised: Names of parameters that SGLang has in FP8, in blocks of 128 x 128.
        scale: "float32" or "ue8m0".
        unused: Names that no scheduler needs.
        delta_bytes: Memory of each scheduler for deltas; 0 is none.
    """

    rank: int
    tp_sizes: list[int]
    num_trainers: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    deadline_s: float = 300.0
    networks: str | None = None
    address: str | None = None
    worker_address: str | None = None
    device: str = "cpu"
    watermark_bytes: int = 256 << 20
    quantised: list[str] = field(default_factory=list)
    scale: str = "float32"
    unused: list[str] = field(default_factory=list)
    delta_bytes: int = 0

    def check(self, clients: Sequence[Client]) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: It is named.
        """
        if not 0 <= self.rank < self.num_trainers:
            raise ValueError(f"TrainerInit: rank {self.rank} of {self.num_trainers} trainers came")
        if not self.tp_sizes or min(self.tp_sizes) < 1:
            raise ValueError(f"TrainerInit: tp_sizes {self.tp_sizes} came; each server has at least one rank")
        if self.num_trainers > 1 and not self.master_port:
            raise ValueError("TrainerInit: master_port 0 came; several trainer ranks need one that all know")
        if self.rank == 0 and len(clients) != len(self.tp_sizes):
            raise ValueError(f"clients: {len(clients)} came; tp_sizes has {len(self.tp_sizes)} servers")
        for client in clients if self.rank == 0 else ():
            server = client("/server_info")
            known = server.get("custom_weight_loader") or []
            if LOADER not in known:
                raise ValueError(f"clients: a server has the weight loaders {known}; start it with {LOADER}")
            if server["enable_eplb"]:  # an expert would land where it was when its slot was recorded
                raise ValueError("clients: a server has --enable-eplb; SGLang would move experts while versions land")


class Trainer:
    """A trainer rank. Its model is a module or tensors by name; DTensor and FSDP2 are divided over the ranks."""

    def __init__(self, init: TrainerInit, model: Any, clients: Sequence[Client] = (), group: Any = None) -> None:
        """Plan with all schedulers. All trainer ranks do so at the same time.

        Args:
            init: How to begin.
            model: What is sent.
            clients: The servers, on rank 0.
            group: A gloo process group of the trainers; None: no barrier between mesh groups.

        Raises:
            ValueError: Settings that cannot be, a server without the loader, or parameters that do not fit.
            UpdateFailed: Schedulers or trainer ranks are missing by the deadline, or have failed; they are named.
        """
        init.check(clients)
        self.init, self.clients, self.rank, self.version = init, list(clients), init.rank, 0
        self.num_sent = 0
        self.calls = ThreadPoolExecutor(max(len(self.clients), 1), thread_name_prefix="putget SGLang client")
        end = time.monotonic() + init.deadline_s
        self.rendezvous = Rendezvous.open(
            init.master_address, init.master_port, holds=init.rank == 0, timeout_s=init.deadline_s
        )
        self.sender = Sender(
            ENGINE,
            init.rank,
            init.num_trainers,
            sum(init.tp_sizes),
            self.rendezvous,
            Options(networks=init.networks, address=init.address).engine(init.device),
            deltas=init.delta_bytes > 0,
        )
        try:
            self.sender.begin(
                model,
                end,
                unused=init.unused,
                told=lambda: self._all(self._workers(), flush_cache=False),
                group=group,
                watermark_bytes=init.watermark_bytes,
                device=init.device,
            )
        except BaseException:
            self.shutdown()
            raise

    def _workers(self) -> list[list[dict[str, Any]]]:
        """Return the first call of each scheduler, by server."""
        init = self.init
        common = {
            "address": init.master_address,
            "port": self.rendezvous.port,
            "num_trainers": init.num_trainers,
            "num_workers": sum(init.tp_sizes),
            "deadline_s": init.deadline_s,
            "networks": init.networks,
            "own_address": init.worker_address,
            "quantised": list(init.quantised),
            "scale": init.scale,
            "unused": list(init.unused),
            "delta_bytes": init.delta_bytes,
        }
        calls, first = [], 0
        for size in init.tp_sizes:
            calls.append([{"call": "init", "init": {"rank": first + at, **common}} for at in range(size)])
            first += size
        return calls

    def _all(self, calls: Sequence[Sequence[dict[str, Any]]], **options: Any) -> None:
        """Carry out a call in all servers while each of them stands still."""

        def one(client: Client, own: Sequence[dict[str, Any]]) -> None:
            client("/pause_generation", {"mode": "retract"})
            try:
                called(client, own, **options)
            finally:
                client("/continue_generation", {})

        running = [self.calls.submit(one, client, own) for client, own in zip(self.clients, calls, strict=True)]
        errors = [str(error) for error in (call.exception() for call in running) if error is not None]
        if errors:
            raise UpdateFailed("; ".join(errors))

    def send_weights(self, version: int | None = None) -> Report:
        """Bring the model's weights into force in all schedulers, as one version. All trainer ranks call it.

        Servers go on until it has landed everywhere. They stand still while it moves: requests that are under way are
        computed again from their tokens, and SGLang's caches are dropped.

        Args:
            version: Its number, which becomes SGLang's weight version; the next one if None.

        Returns:
            What it took on this rank.

        Raises:
            ValueError: A version that is not larger than those before, or parameters that have changed.
            UpdateFailed: It came into force in no scheduler, or it is not known whether it did. Why is named.
        """
        version = self.version + 1 if version is None else operator.index(version)
        if version <= self.version:
            raise ValueError(f"version: {version} came; {self.version} has been sent")
        self.version = version
        end = time.monotonic() + self.init.deadline_s
        announce = (lambda: self._announce(version)) if self.rank == 0 else lambda: None
        return self.sender.send(version, end, lambda: self._commit(version), announce)

    def _announce(self, version: int) -> None:
        """Tell workers of a version. They wait for each number in turn, so one that was announced counts for good."""
        while self.rendezvous.has(f"next/{self.num_sent}"):  # also by a call that was interrupted behind its put
            self.num_sent += 1
        self.rendezvous.put(f"next/{self.num_sent}", {"version": version, "deadline_s": self.init.deadline_s})

    def _commit(self, version: int) -> None:
        """Bring a version into force that has landed in all schedulers."""
        calls = [[{"call": "commit", "version": version}] * size for size in self.init.tp_sizes]
        try:
            self._all(calls, weight_version=str(version), flush_cache=True)
        except UpdateFailed as error:
            raise UpdateFailed(f"version {version} is not known to be in force: {error}") from error

    def shutdown(self) -> None:
        """Close the engine. Schedulers keep their weights."""
        self.calls.shutdown(wait=False)
        self.sender.close()
