"""The half that lives in trainers: a version leaves a `WeightSource` for all workers of vLLM."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.logger import init_logger

from putget_transfer.adapters.options import Options
from putget_transfer.adapters.rendezvous import (
    Rendezvous,
    bytes_in,
    bytes_out,
    forget,
    params_out,
    planned_slots,
    workers,
)
from putget_transfer.adapters.vllm.weights import BACKEND
from putget_transfer.adapters.vllm.weights.source import Stream, describe_source
from putget_transfer.adapters.vllm.weights.worker import ENGINE, WorkerInit
from putget_transfer.weights import Report, Trainer, UpdateFailed, plan

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name

GRACE_S = 15.0
"""How long after the deadline workers may take to say that they have failed."""


@dataclass
class TrainerInit(TrainerInitInfo):  # type: ignore[misc]
    """How a trainer rank begins; all ranks have the same, but for `rank`.

    Attributes:
        num_workers: Workers of vLLM that the client reaches, of all its servers.
        num_trainers: Trainer ranks.
        master_address: Where workers and trainer ranks reach rank 0.
        master_port: Its port; 0 is any, with one trainer rank only.
        commit: "swap": a version lands in second copies, and a failed one leaves the old one whole. "paused": it lands
            in the model where vLLM does not repack, and the server has to be paused.
        deadline_s: Time for an update, and for the start.
        networks: What it may travel over: some of "tcp", "host", "nvlink" and "verbs", with commas. None: "tcp" for a
            CPU, "nvlink,verbs" for a GPU.
        address: This machine's address for "tcp"; None is the one that leads to other machines.
        worker_address: The workers' address for "tcp"; None is the one that leads to other machines.
        device: Where bytes are prepared: "cpu" or "cuda:N".
        watermark_bytes: Memory for prepared bytes.
        quantised: Names of parameters that vLLM has in FP8, in blocks of 128 x 128.
        scale: "float32" or "ue8m0".
        unused: Names that no worker needs.
        delta_bytes: Memory of each worker for deltas; 0 is none. With it a version goes as its changes where they are
            less. Trainers keep a copy of what they send.
    """

    backend: ClassVar[str] = BACKEND

    num_workers: int
    num_trainers: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    commit: str = "swap"
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

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: It is named.
        """
        if self.num_workers < 1 or not 0 <= self.rank < self.num_trainers:
            ranks = f"rank {self.rank} of {self.num_trainers} trainers, {self.num_workers} workers"
            raise ValueError(f"TrainerInit: {ranks} came; a rank below num_trainers and a worker are needed")
        if self.commit not in ("swap", "paused"):
            raise ValueError(f"TrainerInit: commit {self.commit!r} came; 'swap' and 'paused' are allowed")
        if self.num_trainers > 1 and not self.master_port:
            raise ValueError("TrainerInit: master_port 0 came; several trainer ranks need one that all know")


class _Sender(Trainer):
    """Sends what a source yields."""

    model: Stream

    def _checked(self) -> Mapping[str, Any]:
        self.model.begin()
        return self.model

    def _looks(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """A source yields each tensor once, so it is not asked here: they may lie anywhere, and each part is copied."""
        return self.model.looks


class PutgetTrainerWeightTransferEngine(TrainerWeightTransferEngine[TrainerInit]):  # type: ignore[misc]
    """Sends versions by `putget_transfer.weights`: `iter_local` of the source where it has that, and `iter_full` else.

    Blocks of FP8 may cross shards. So `iter_full` comes first where parameters are quantised.
    """

    init_info_cls = TrainerInit

    def __init__(self, info: TrainerInit, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender, rank=info.rank)
        self.info = info
        self.version = 0
        self.sent: int | None = None
        """The version that is in force, where changes can go."""
        self.told: list[int] = []
        """Versions for which workers may have spoken: since the last but one that is in force."""
        self.sender: Any = None
        divided = source.implements_iter_local() and not (info.quantised and source.implements_iter_full())
        self.params = describe_source(source, info.num_trainers, divided=divided)
        self.stream = Stream(source, info.rank, divided=divided)
        self.calls = ThreadPoolExecutor(1, thread_name_prefix="putget vLLM client")
        self.rendezvous = Rendezvous.open(
            info.master_address, info.master_port, holds=info.is_sender, timeout_s=info.deadline_s
        )
        self.engine = Options(networks=info.networks, address=info.address).engine(info.device)

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInit, *, client: Any, source: Any = None
    ) -> PutgetTrainerWeightTransferEngine:
        """Plan with all workers. All trainer ranks call it; rank 0 uses the client.

        Raises:
            ValueError: No source, ranks that cannot be, or parameters that do not fit; they are named.
            UpdateFailed: Workers or trainer ranks are missing by the deadline, or have failed; they are named.
        """
        if source is None:
            raise ValueError("source: None came; putget needs a WeightSource")
        init_info.check()
        self = cls(init_info, client=client, source=source)
        try:
            self._begin()
        except BaseException:
            self.shutdown()
            raise
        return self

    def _begin(self) -> None:
        info, end = self.info, time.monotonic() + self.info.deadline_s
        self.rendezvous.put(f"trainer/{self.rank}", bytes_out(self.engine.main_address().to_bytes()))
        told: Future[Any] | None = None
        if self.is_sender:
            self.rendezvous.put("params", params_out(self.params))
            init = WorkerInit(
                info.master_address,
                self.rendezvous.port,
                info.num_trainers,
                info.num_workers,
                info.commit,
                info.deadline_s,
                info.networks,
                info.worker_address,
                quantised=list(info.quantised),
                scale=info.scale,
                unused=list(info.unused),
                delta_bytes=info.delta_bytes,
            )
            told = self.calls.submit(self.client.init_weight_transfer_engine, asdict(init))
        slots = planned_slots(self.rendezvous, info.num_workers, end, _watch(told), ENGINE)
        schedule = plan(self.params, slots, unused=info.unused)
        self.sender = _Sender(
            self.engine,
            schedule,
            self.rank,
            self.stream,
            watermark_bytes=info.watermark_bytes,
            device=info.device,
            deltas=info.delta_bytes > 0,
        )
        if told is not None:
            told.result(max(end - time.monotonic(), 0.0) + GRACE_S)
            logger.info("putget sends to %d workers of vLLM:\n%s", info.num_workers, schedule.show())

    def send_weights(self, version: int | None = None) -> Report:
        """Bring the source's weights into force in all workers, as one version. All trainer ranks call it.

        Args:
            version: Its number, which becomes vLLM's weight version; the next one if None.

        Returns:
            What it took on this rank.

        Raises:
            ValueError: A version that is not larger than those before, or parameters that have changed.
            UpdateFailed: It came into force in no worker. Why is named.
        """
        version = self.version + 1 if version is None else operator.index(version)
        if version <= self.version:
            raise ValueError(f"version: {version} came; {self.version} has been sent")
        self.version = version
        end = time.monotonic() + self.info.deadline_s
        try:
            report = self._sent(version, end) if self.is_sender else self._published(version, end, lambda: None)
        except BaseException as error:
            if not self.is_sender:
                self._say(f"failed/{version}", f"trainer rank {self.rank}: {_words(error)}")
            raise
        if not self.is_sender:
            (outcome,) = self.rendezvous.take({f"end/{version}": "trainer rank 0"}, end + 2 * GRACE_S)
            if outcome:
                raise UpdateFailed(outcome)
            self.sent = version
        return report

    def _say(self, key: str, value: Any) -> None:
        """Say something where the other side may be gone."""
        try:
            self.rendezvous.put(key, value)
        except UpdateFailed as error:
            logger.warning("putget: %s", error)

    def _sent(self, version: int, end: float) -> Report:
        """Send as rank 0, which drives the workers."""
        problem = ""
        try:
            report = self._landed(version, end)
            self.rendezvous.put(f"commit/{version}", "")
            self.client.finish_weight_update(str(version))
        except BaseException as error:  # an interrupt, too: others must not take the version for one in force
            problem = str(error)
            if isinstance(error, (UpdateFailed, ValueError)):
                raise
            problem = f"version {version} is not known to be in force: {self._reason(version)}{_words(error)}"
            if not isinstance(error, Exception):
                raise
            raise UpdateFailed(problem) from error
        finally:
            self._say(f"end/{version}", problem)
        self.sent = version
        del self.told[:-2]
        return report

    def _landed(self, version: int, end: float) -> Report:
        """Let a version land in all workers; if it does not, all of them give it up."""
        try:
            forget(self.rendezvous, self.told, version, self.info.num_workers, ENGINE)
            self._start()
            left = max(end - time.monotonic(), 0.0)
            told = self.calls.submit(self.client.update_weights, {"version": version, "deadline_s": left})
            report = self._published(version, end, _watch(told))
            told.result(max(end - time.monotonic(), 0.0) + GRACE_S)
            votes = self.rendezvous.take(workers(f"vote/{version}", self.info.num_workers, ENGINE), end + GRACE_S)
            if any(votes):
                raise UpdateFailed(f"version {version}: {'; '.join(filter(None, votes))}")
        except BaseException as error:
            problem = str(error) if isinstance(error, UpdateFailed) else f"trainer rank 0: {_words(error)}"
            self._say(f"failed/{version}", problem)
            with contextlib.suppress(Exception):  # a server that is gone has nothing to give up
                self.client.finish_weight_update()
            if isinstance(error, (UpdateFailed, ValueError)) or not isinstance(error, Exception):
                raise
            raise UpdateFailed(f"version {version}: {problem}") from error
        return report

    def _reason(self, version: int) -> str:
        """Return what a rank has said about a version that failed: a client's error need not have it."""
        key = f"failed/{version}"
        try:
            if self.rendezvous.has(key):
                return f"{self.rendezvous.take({key: 'a rank'}, 0.0)[0]}; "
        except UpdateFailed as error:
            return f"{error}; "
        return ""

    def _start(self) -> None:
        """Begin an update, also where one before was left in the middle."""
        try:
            self.client.start_weight_update()
        except Exception as error:
            logger.warning("putget: an update before has not ended, it is ended first: %s", error)
            self.client.finish_weight_update()
            self.client.start_weight_update()

    def _published(self, version: int, end: float, watch: Callable[[], None]) -> Report:
        """Write to all workers, as soon as they expect the version."""

        def watched() -> None:
            watch()
            if self.rendezvous.has(f"failed/{version}"):
                raise UpdateFailed(self.rendezvous.take({f"failed/{version}": "a worker"}, end)[0])

        try:
            offers = self.rendezvous.take(workers(f"offers/{version}", self.info.num_workers, ENGINE), end, watched)
            own = [bytes_in(one[str(self.rank)]) for one in offers if str(self.rank) in one]
            left, since = max(end - time.monotonic(), 0.0), self.sent if self.info.delta_bytes else None
            report: Report = self.sender.publish(version, left, offers=own, since=since)
        finally:
            self.stream.end()
        if report.failed:
            raise UpdateFailed("; ".join(f"vLLM worker {rank}: {error}" for rank, error in report.failed.items()))
        return report

    def shutdown(self) -> None:
        """Close the engine. Workers keep their weights."""
        self.calls.shutdown(wait=False)
        self.engine.close()


def _words(error: BaseException) -> str:
    """Return what an error says; an interrupt says nothing."""
    return str(error) or type(error).__name__


def _watch(told: Future[Any] | None) -> Callable[[], None]:
    """Return what ends a wait for workers when the client's call has failed."""

    def watch() -> None:
        if told is not None and told.done():
            told.result()

    return watch
