"""The half that lives in vLLM's workers: a version lands beside serving, and moves in between two steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

import putget_transfer as pt
from putget_transfer.adapters.options import Options
from putget_transfer.adapters.vllm.weights.landing import Landing
from putget_transfer.adapters.vllm.weights.rendezvous import (
    Rendezvous,
    bytes_in,
    bytes_out,
    params_in,
    slots_in,
    slots_out,
    trainers,
    workers,
)
from putget_transfer.weights import Rollout, UpdateFailed, checkpoint, plan

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name

SLICE_S = 0.1
"""How often a worker that waits for bytes asks whether the trainers have given up."""
GRACE_S = 15.0
"""How long after the deadline the other workers may take to say that they have failed."""


@dataclass
class WorkerInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Settings that the trainer tells each worker once; `TrainerInit` says what the fields mean."""

    address: str
    port: int
    num_trainers: int
    num_workers: int
    commit: str
    deadline_s: float
    networks: str | None = None
    own_address: str | None = None
    first_rank: int = 0
    quantised: list[str] = field(default_factory=list)
    scale: str = "float32"
    unused: list[str] = field(default_factory=list)


@dataclass
class WorkerUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A version, and the seconds that it may take."""

    version: int
    deadline_s: float


class PutgetWeightTransferEngine(WeightTransferEngine[WorkerInit, WorkerUpdate]):  # type: ignore[misc]
    """Receives versions by `putget_transfer.weights`.

    `update_weights` returns when a version has landed in all workers: the model is still the old one. It changes in
    `finish_weight_update` (or `drain_pending`), if the trainer has decided so.
    """

    init_info_cls = WorkerInit
    update_info_cls = WorkerUpdate
    supports_draft_weight_update = False
    defers_processing = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.engine: pt.Engine | None = None
        self.rendezvous: Rendezvous
        self.rollout: Rollout | None = None
        self.landing: Landing
        self.info: WorkerInit
        self.rank = 0
        self.guard: Any = None

    def init_transfer_engine(self, init_info: WorkerInit) -> None:
        """Record this worker's slots, and plan with all others and the trainers."""
        self.shutdown()
        info = self.info = init_info
        config = self.parallel_config
        self.rank = info.first_rank + config.data_parallel_index * config.world_size + config.rank
        end = time.monotonic() + info.deadline_s
        self.rendezvous = Rendezvous.open(info.address, info.port, holds=False, timeout_s=info.deadline_s)
        try:
            params = params_in(self.rendezvous.take({"params": "trainer rank 0"}, end)[0])
            entries = checkpoint(params, quantised=info.quantised, scale=info.scale)
            with set_current_vllm_config(self.vllm_config):
                self.landing = Landing(self.model, self.model_config, entries, commit=info.commit)
        except Exception as error:
            # The trainer waits for an answer of each worker.
            self.rendezvous.put(f"slots/{self.rank}", {"failed": f"vLLM worker {self.rank}: {error}"})
            raise
        self.rendezvous.put(f"slots/{self.rank}", slots_out(self.landing.slots))
        slots = planned_slots(self.rendezvous, info.num_workers, end)
        schedule = plan(params, slots, unused=info.unused)
        device = "cpu" if self.device.type == "cpu" else f"cuda:{self.device.index or 0}"
        self.engine = Options(networks=info.networks, address=info.own_address).engine(device)
        commit: Any = info.commit
        self.rollout = Rollout(
            self.engine, self.landing.slots, schedule, self.rank, commit=commit, move=self.landing.move
        )
        logger.info(
            "putget: versions land in reload buffers of %d layers that vLLM repacks, and in %d other tensors (%s)",
            self.landing.num_repacked,
            self.landing.num_in_place,
            info.commit,
        )

    def _ready(self) -> Rollout:
        if self.rollout is None:
            raise ValueError("init_weight_transfer_engine: it has to come first, from a trainer's trainer_init")
        return self.rollout

    def start_weight_update(self) -> None:
        """Give up what an update before may have left."""
        self._ready().abort("another update began")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a version. Nothing is synchronised: the model does not change here."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WorkerUpdate) -> None:
        """Let the trainers write a version; return when it is complete in all workers.

        Raises:
            UpdateFailed: It is not complete in all of them, and will come into force in none. Why is named.
        """
        rollout, version = self._ready(), update_info.version
        end = time.monotonic() + update_info.deadline_s
        problem = ""
        try:
            self._land(rollout, version, end)
        except Exception as error:
            problem = f"vLLM worker {self.rank}: {error}"
        try:
            if problem:
                self.rendezvous.put(f"failed/{version}", problem)
            self.rendezvous.put(f"vote/{version}/{self.rank}", problem)
            votes = self.rendezvous.take(workers(f"vote/{version}", self.info.num_workers), end + GRACE_S)
        except UpdateFailed as error:
            votes = [problem, str(error)]
        problems = "; ".join(filter(None, votes))
        if problems:
            self._fail(rollout, f"version {version}: {problems}")

    def _land(self, rollout: Rollout, version: int, end: float) -> None:
        found = self.rendezvous.take(trainers("trainer", self.info.num_trainers), end)
        addresses = {rank: bytes_in(address) for rank, address in enumerate(found)}
        offers = rollout.expect(version, addresses, max(end - time.monotonic(), 0.0))
        told = {str(rank): bytes_out(offer) for rank, offer in offers.items()}
        self.rendezvous.put(f"offers/{version}/{self.rank}", told)
        while offers and not rollout.ready(SLICE_S):
            if self.rendezvous.has(f"failed/{version}"):
                raise UpdateFailed(self.rendezvous.take({f"failed/{version}": "trainers"}, end)[0])

    def _fail(self, rollout: Rollout, reason: str) -> NoReturn:
        rollout.abort(reason)
        self._guard()
        raise UpdateFailed(reason)

    def finish_weight_update(self) -> None:
        """Bring the version into force, if the trainer has decided so; otherwise the old one stays."""
        self.drain_pending()

    def drain_pending(self) -> None:
        """Move the version that has landed into the model, if the trainer has decided so."""
        rollout = self._ready()
        version = rollout.landing
        if version is None:
            return
        try:
            decided = self.rendezvous.has(f"commit/{version}")
        except UpdateFailed:
            decided = False
        if not decided:
            rollout.abort("the trainer has not decided for it")
            self._guard()
            return
        rollout.commit(version)
        self._guard()

    def _guard(self) -> None:
        """Keep a torn model from answering: its next step fails, until an update is complete."""
        torn = self.rollout is not None and self.rollout.state == "torn"
        if torn and self.guard is None:
            self.guard = self.model.register_forward_pre_hook(_refuse)
        if not torn and self.guard is not None:
            self.guard.remove()
            self.guard = None

    def shutdown(self) -> None:
        """Give up what is landing, and close the engine. The model keeps its weights."""
        if self.rollout is not None:
            self.rollout.abort("the transfer engine was shut down")
            self._guard()
            self.rollout = None
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def _refuse(*_arguments: Any) -> NoReturn:
    raise UpdateFailed("the weights are torn: an update into them failed. The next complete update heals")


def planned_slots(rendezvous: Rendezvous, num_workers: int, end: float, watch: Any = lambda: None) -> list[Any]:
    """Return the slots of all workers, as the plan takes them.

    Raises:
        UpdateFailed: A worker has none, or has said nothing.
    """
    found = rendezvous.take(workers("slots", num_workers), end, watch)
    failed = [one["failed"] for one in found if "failed" in one]
    if failed:
        raise UpdateFailed("; ".join(failed))
    return [slots_in(one) for one in found]
