"""The half that lives in SGLang's schedulers: a version lands in a second copy, and moves between two steps."""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from putget_transfer.adapters.options import Options
from putget_transfer.adapters.receiver import Receiver
from putget_transfer.adapters.rendezvous import Rendezvous, params_in
from putget_transfer.weights import Slots, UpdateFailed, checkpoint, record
from putget_transfer.weights._model import tensors_of
from putget_transfer.weights._rollout import Copies

logger = logging.getLogger(__name__)

ENGINE = "SGLang"
MESSAGE = "putget"
WATCH_S = 0.05
"""How often a worker looks for the next version."""


@dataclass
class WorkerInit:
    """Settings that the trainer tells each worker once; `TrainerInit` says what the fields mean."""

    rank: int
    address: str
    port: int
    num_trainers: int
    num_workers: int
    deadline_s: float
    networks: str | None = None
    own_address: str | None = None
    quantised: list[str] = field(default_factory=list)
    scale: str = "float32"
    unused: list[str] = field(default_factory=list)
    delta_bytes: int = 0
    commit: str = "swap"


class Worker:
    """A scheduler's part. Versions are announced through the rendezvous, and land in a thread."""

    def __init__(self, model: Any, info: WorkerInit) -> None:
        """Record the model's slots. The model is as its loader finds it: in an update session of SGLang.

        Raises:
            ValueError: Parameters that cannot be recorded; they are named.
        """
        import torch

        self.info, self.model = info, weakref.ref(model)
        self.closed = threading.Event()
        rendezvous = Rendezvous.open(info.address, info.port, holds=False, timeout_s=info.deadline_s)
        end = time.monotonic() + info.deadline_s
        try:
            params = params_in(rendezvous.take({"params": "trainer rank 0"}, end)[0])
            entries = checkpoint(params, quantised=info.quantised, scale=info.scale)
            with torch.no_grad():
                recorded = record(model, entries)
            device = str(recorded.tensors[0].device) if recorded.tensors else "cpu"
            self.copies = [torch.empty_like(tensor) for tensor in recorded.tensors]
            self.slots = Slots(list(recorded), recorded.memory, self.copies)
            self.moves = Copies(self.slots)
            engine = Options(networks=info.networks, address=info.own_address).engine(device)
        except Exception as error:
            rendezvous.put(f"slots/{info.rank}", {"failed": f"{ENGINE} worker {info.rank}: {error}"})
            raise
        self.receiver = Receiver(ENGINE, info.rank, rendezvous, engine, params, self.slots, info, move=self._move)
        name = "putget weights: next version"
        self.watching = threading.Thread(target=self._watch, args=(self.receiver,), name=name, daemon=True)
        self.watching.start()
        logger.info("putget: versions land in second copies of %d tensors", len(self.copies))

    def _watch(self, receiver: Receiver) -> None:
        """Begin each version that the trainer announces."""
        number, store = 0, receiver.rendezvous
        try:
            while not self.closed.wait(WATCH_S):
                if store.has(f"next/{number}"):
                    (told,) = store.take({f"next/{number}": "trainer rank 0"}, time.monotonic())
                    number += 1
                    receiver.begin(told["version"], told["deadline_s"])
        except UpdateFailed as error:
            logger.info("putget: no more versions come from this trainer: %s", error)

    def commit(self, version: int) -> None:
        """Bring a version that has landed into the model: the trainer's call is the decision.

        SGLang labels answers with the version after this call. So where it is another one, the scheduler ends.
        """
        self.receiver.finish(version)

    def _move(self) -> None:
        """Copy the second copy into the parameters, where they lie now: SGLang may have put new ones in their place."""
        import torch

        model = self.model()
        if model is None:
            raise UpdateFailed(f"{ENGINE} worker {self.info.rank}: its model is gone")
        now = dict(tensors_of(model))
        places = [_flat(now[name]) for name, _ in self.slots.memory]
        wrong = [
            f"{name!r} has {place.numel()} bytes, not {num_bytes}"
            for place, (name, num_bytes) in zip(places, self.slots.memory, strict=True)
            if place.numel() != num_bytes
        ]
        if wrong:
            raise UpdateFailed(f"{ENGINE} worker {self.info.rank}: {'; '.join(wrong)}")
        with torch.no_grad():
            self.moves.copy(self.copies, places)
            if hasattr(model, "post_load_weights"):
                model.post_load_weights()
        if places and places[0].is_cuda:
            torch.cuda.synchronize(places[0].device)

    def shutdown(self) -> None:
        """Give up what is landing, and close the engine. The model keeps its weights."""
        self.closed.set()
        self.watching.join()
        self.receiver.shutdown()


def _flat(tensor: Any) -> Any:
    """Return the bytes of a tensor's memory."""
    import torch

    flat = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
    return flat.view(dtype=torch.uint8) if flat.numel() else flat


_workers: weakref.WeakKeyDictionary[Any, Worker] = weakref.WeakKeyDictionary()


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Carry out a call. What goes wrong before a commit is told to the trainer; SGLang would end its scheduler."""
    (name, tensor), *_ = named_tensors or [("nothing", None)]
    if name != MESSAGE:
        raise ValueError(f"named_tensors: {name!r} came; a trainer of putget sends {MESSAGE!r}")
    call = json.loads(bytes(tensor.cpu().tolist()))
    if call["call"] == "commit":
        _workers[model].commit(call["version"])
        return
    if (before := _workers.pop(model, None)) is not None:
        before.shutdown()
    try:
        _workers[model] = Worker(model, WorkerInit(**call["init"]))
    except Exception as error:
        logger.exception("putget: weights cannot be received: %s", error)
