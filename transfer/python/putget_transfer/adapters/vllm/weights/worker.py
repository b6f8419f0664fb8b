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

from putget_transfer.adapters.options import Options
from putget_transfer.adapters.receiver import Receiver
from putget_transfer.adapters.rendezvous import Rendezvous, params_in
from putget_transfer.adapters.vllm.weights.landing import Landing
from putget_transfer.weights import UpdateFailed, checkpoint

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name

ENGINE = "vLLM"


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
    delta_bytes: int = 0


@dataclass
class WorkerUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A version, and the seconds that it may take."""

    version: int
    deadline_s: float


class PutgetWeightTransferEngine(WeightTransferEngine[WorkerInit, WorkerUpdate]):  # type: ignore[misc]
    """Receives versions by `putget_transfer.weights`.

    `update_weights` returns at once, and the version lands while the server goes on. The trainer collects what all
    workers say about it. The model changes in `finish_weight_update` (or `drain_pending`), if the trainer has decided
    so.
    """

    init_info_cls = WorkerInit
    update_info_cls = WorkerUpdate
    supports_draft_weight_update = False
    defers_processing = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.receiver: Receiver | None = None
        self.guard: Any = None

    def init_transfer_engine(self, init_info: WorkerInit) -> None:
        """Record this worker's slots, and tell all others and the trainers. It waits for no other worker.

        Raises:
            ValueError: Parameters that cannot be recorded, which are named, or vLLM moves experts.
        """
        self.shutdown()
        info, config = init_info, self.parallel_config
        rank = info.first_rank + config.data_parallel_index * config.world_size + config.rank
        rendezvous = Rendezvous.open(info.address, info.port, holds=False, timeout_s=info.deadline_s)
        try:
            if config.enable_eplb:  # an expert would land where it was when its slot was recorded
                raise ValueError("enable_eplb: true came; vLLM would move experts while versions land in their slots")
            params = params_in(rendezvous.take({"params": "trainer rank 0"}, time.monotonic() + info.deadline_s)[0])
            entries = checkpoint(params, quantised=info.quantised, scale=info.scale)
            with set_current_vllm_config(self.vllm_config):
                landing = Landing(self.model, self.model_config, entries, commit=info.commit)
            device = "cpu" if self.device.type == "cpu" else f"cuda:{self.device.index or 0}"
            engine = Options(networks=info.networks, address=info.own_address).engine(device)
        except Exception as error:
            # The trainer waits for an answer of each worker.
            rendezvous.put(f"slots/{rank}", {"failed": f"{ENGINE} worker {rank}: {error}"})
            raise
        self.receiver = Receiver(
            ENGINE, rank, rendezvous, engine, params, landing.slots, info, move=landing.move, changed=self._guard
        )
        logger.info(
            "putget: versions land in reload buffers of %d layers that vLLM repacks, and in %d other tensors (%s)",
            landing.num_repacked,
            landing.num_in_place,
            info.commit,
        )

    def _begun(self) -> Receiver:
        if self.receiver is None:
            raise ValueError("init_weight_transfer_engine: it has to come first, from a trainer's trainer_init")
        return self.receiver

    def start_weight_update(self) -> None:
        """Give up what an update before may have left."""
        self._begun().give_up("another update began")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to receive a version. Nothing is synchronised: the model does not change here."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WorkerUpdate) -> None:
        """Let the trainers write a version, which lands in a thread; what it comes to is told to the trainers."""
        self._begun().begin(update_info.version, update_info.deadline_s)

    def finish_weight_update(self) -> None:
        """Bring the version into force, if the trainer has decided so; otherwise the old one stays."""
        self.drain_pending()

    def drain_pending(self) -> None:
        """Move the version that has landed into the model, if the trainer has decided so."""
        self._begun().finish()

    def _guard(self, mixed: bool) -> None:
        """Keep a model that may be mixed from answering: its next step fails, until an update is complete."""
        if mixed and self.guard is None:
            self.guard = self.model.register_forward_pre_hook(_refuse)
        if not mixed and self.guard is not None:
            self.guard.remove()
            self.guard = None

    def shutdown(self) -> None:
        """Give up what is landing, and close the engine. The model keeps its weights."""
        if self.receiver is not None:
            self.receiver.shutdown()
            self.receiver = None


def _refuse(*_arguments: Any) -> NoReturn:
    raise UpdateFailed("the weights are torn: an update into them failed. The next complete update heals")
