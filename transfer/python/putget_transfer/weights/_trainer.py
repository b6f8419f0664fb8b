"""The trainers' side: a version leaves a rank for all rollout ranks that expect it."""

from __future__ import annotations

import datetime
import operator
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from putget_transfer._native import Engine, NetAddr
from putget_transfer.weights._delta import Kept
from putget_transfer.weights._deltas import Deltas
from putget_transfer.weights._describe import dtype_name, is_dtensor
from putget_transfer.weights._model import UpdateFailed, tensors_of
from putget_transfer.weights._native import Place, Schedule, Task, Writer
from putget_transfer.weights._offer import ROW, Delta, read_offer
from putget_transfer.weights._pipeline import Pipeline
from putget_transfer.weights._prepare import Preparer, Work, on, work_of
from putget_transfer.weights._report import Report, metrics_text
from putget_transfer.weights._sources import Lying, Sources
from putget_transfer.weights._staging import Staging, Writes, padded

SHOWN = 8


def _with_index(device: Any) -> Any:
    """Return a device; a GPU with its number, because tensors are compared with it."""
    import torch

    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


class Trainer:
    """A trainer rank.

    Its parameters are read while `publish` runs, and must not change until it returns. Four stages overlap over tasks:
    bringing a parameter to the device, preparing it, writing it (in the engine's threads, without Python's lock), and
    the barrier at the end of a mesh group.
    """

    def __init__(
        self,
        engine: Engine,
        schedule: Schedule,
        rank: int,
        model: Any,
        group: Any = None,
        *,
        watermark_bytes: int = 256 << 20,
        device: Any = "cpu",
        deltas: bool = False,
    ) -> None:
        """Check a rank's parameters against the schedule, and allocate memory for pieces of them and prepared bytes.

        Args:
            engine: The engine that writes.
            schedule: The plan, the same on all ranks.
            rank: This rank among the trainers.
            model: What was described: a module, or tensors by name.
            group: A gloo process group of the trainers, whose barrier says which rank is missing; None: no barrier.
            watermark_bytes: Temporary memory: parts on their way to the device, parameters that are brought together,
                prepared bytes. A task that needs more runs alone.
            device: Where bytes are prepared. Parameters that lie elsewhere are copied there.
            deltas: Keep a copy there of what this rank sends, so that `publish` can send what has changed.

        Raises:
            ValueError: Parameters differ from the schedule's in name, shape or type, or cannot be brought together; all
                of them are named.
        """
        self.engine, self.schedule, self.rank, self.group = engine, schedule, rank, group
        self.model, self.device = model, _with_index(device)
        self.tasks, self.params = schedule.tasks(rank), schedule.params
        self._planned = _planned(self.tasks, self.params)
        self._known = {name for name, _, _ in self.params}
        self.version = 0
        self.watermark_bytes = watermark_bytes
        self._memories: dict[int, int] = {}
        self._works: list[Work] = []
        self._lying: Lying | None = None
        self._staging: Staging | None = None
        self._places: Mapping[str, Any] | None = None
        self._kept = Kept(schedule, rank) if deltas else None
        self._measure(self._looks(self._checked()))
        self._busy = threading.Lock()
        self._totals = {"updates": 0, "failed": 0, "bytes": 0}

    def address(self) -> bytes:
        """Return how rollout ranks know this rank."""
        return self.engine.main_address().to_bytes()

    def _checked(self) -> Mapping[str, Any]:
        """Return the tensors by name, compared with the schedule."""
        tensors = dict(tensors_of(self.model))
        wrong = []
        for name, (shape, dtype, gathered) in self._planned.items():
            found = tensors.get(name)
            if found is None:
                wrong.append(f"{name!r} is missing")
            elif found.shape != shape or found.dtype != dtype:
                came = f"{dtype_name(found.dtype)} {list(found.shape)}"
                wrong.append(f"{name!r} is {came}, not {dtype_name(dtype)} {list(shape)}")
            elif gathered and not is_dtensor(found):
                wrong.append(f"{name!r} has to be brought together, and is no DTensor")
        wrong += [f"{name!r} is not in the schedule" for name in tensors if name not in self._known]
        if wrong:
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ValueError(f"model: {'; '.join(wrong[:SHOWN])}{more}")
        return tensors

    def _looks(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what has type, shape and device of each tensor: here the tensors themselves."""
        return tensors

    def _measure(self, tensors: Mapping[str, Any]) -> None:
        """Find out what tasks need of temporary memory, and allocate it. `tensors` are looks.

        Other memory than pieces counts as well: pieces get what it leaves of the watermark.
        """
        places = {name: tensor.device for name, tensor in tensors.items()}
        if places == self._places:
            return
        works = [work_of(task, self.params, tensors, self.device) for task in self.tasks]
        outside = max((work.outside for work in works), default=0)
        longest = max((sum(map(padded, work.pieces)) for work in works), default=0)
        num_bytes = max(self.watermark_bytes - outside, longest)
        if self._staging is None or self._staging.num_bytes < num_bytes:
            # Memory may be short: then nothing is left of the old one, and the next call begins anew.
            old, self._staging, self._places = self._staging, None, None
            if old is not None:
                old.close(self.engine)
            self._staging = Staging(self.engine, num_bytes, self.watermark_bytes, self.device)
        self._works, self._places = works, places
        # Deltas compare prepared bytes.
        self._lying = None if self._kept is not None else Lying(works, self.params, tensors)

    def publish(self, version: int, deadline_s: float, *, offers: Sequence[bytes], since: int | None = None) -> Report:
        """Write a version to the rollout ranks that have made offers. All trainer ranks do so at the same time.

        Args:
            version: The version, larger than those before.
            deadline_s: Time until it fails. It returns at the latest when the engine's `grace` has passed as well.
            offers: What `Rollout.expect` has returned for this rank, of all rollout ranks that take part.
            since: The last published version: only what has changed goes, where that is less. Rollout ranks that hold
                another one get all; `whole` of the report names them.

        Returns:
            What it took. Rollout ranks that could not be written to are in `failed`; the others have everything.

        Raises:
            ValueError: An offer of another schedule or version, an older version, other parameters, deltas of a rank
                that keeps nothing. Before any write.
            UpdateFailed: The deadline came, or other trainer ranks are missing, which are named.
        """
        version = operator.index(version)
        read = [self._read(offer, version) for offer in offers]
        places = [Place(offer["rank"], offer["imm"], offer["memory"], offer["descs"]) for offer in read]
        inboxes = {offer["rank"]: Delta(offer) if offer["inbox"] else None for offer in read}
        if since is not None and (self._kept is None or since >= version):
            raise ValueError(f"since: {since} came for version {version}; an older one is needed, and `deltas=True`")
        if version < self.version:
            raise ValueError(f"version: {version} came; this rank has published {self.version}")
        if not self._busy.acquire(blocking=False):
            raise ValueError(f"version: {version} came while another version is being published")
        try:
            tensors = self._checked()
            self._measure(self._looks(tensors))
            addresses = [NetAddr.from_bytes(offer["address"]) for offer in read]
            writer = Writer(self.engine, self.schedule, self.rank, places)
            for address in addresses:  # the engine has shut out a rank whose heartbeat it missed
                self.engine.admit(address)
            self.version = version
            deltas = Deltas(self._kept, self.engine, since, inboxes)
            with on(self.device):
                return self._publish(version, deadline_s, tensors, writer, deltas)
        finally:
            self._busy.release()

    def _read(self, offer: bytes, version: int) -> dict[str, Any]:
        found = read_offer(offer)
        if found["digest"] != self.schedule.digest:
            raise ValueError(f"offers: schedule {found['digest']} came; this rank has {self.schedule.digest}")
        if found["version"] != version:
            raise ValueError(f"offers: version {found['version']} came; {version} is to be published")
        target = found["rank"]
        if not 0 <= target < self.schedule.num_targets:
            raise ValueError(f"offers: rollout rank {target} came; the schedule has {self.schedule.num_targets}")
        if target not in self._memories:
            self._memories[target] = len(self.schedule.memory(target))
        came = len(found["memory"]) / ROW.size
        if came != self._memories[target]:
            planned = self._memories[target]
            raise ValueError(f"offers: {came:g} memories came; the schedule has {planned} for rollout rank {target}")
        return found

    def _publish(
        self, version: int, deadline_s: float, tensors: Mapping[str, Any], writer: Writer, deltas: Deltas
    ) -> Report:
        report = Report(version, self.rank)
        report.whole = deltas.refused
        assert self._staging is not None
        writes = Writes(self._staging, report, time.monotonic() + deadline_s)
        preparer = Preparer(self.params, tensors, report, self.device)
        sources = Sources(self.engine, self._lying, tensors)
        pipeline = Pipeline(
            self.rank, self.tasks, self._works, self._staging, preparer, writes, writer, deltas, sources
        )
        try:
            sources.look_up()
            for number, task in enumerate(self.tasks):
                self._task(number, pipeline)
                last = number + 1 == len(self.tasks)
                if last or (self.group is not None and self.tasks[number + 1].group != task.group):
                    # Nobody may wait at the barrier for a rank that waits for it to bring a parameter together.
                    pipeline.flush()
                    pipeline.release()
                    self._barrier(report, writes, version)
            writes.end()
            preparer.add_times()
            deltas.kept_all(version)
        except BaseException as error:
            # Also at an interrupt: what is under way is read from memory that is the trainer's again behind this call.
            writes.cancel()
            preparer.wait()
            self._totals["failed"] += 1
            if isinstance(error, (UpdateFailed, ValueError)) or not isinstance(error, Exception):
                raise
            raise UpdateFailed(f"version {version}, trainer rank {self.rank}: {error}") from error
        finally:
            sources.close()
        report.peak_bytes = writes.room.peak
        report.seconds = time.perf_counter() - report.begun
        self._totals["updates"] += 1
        self._totals["bytes"] += report.num_bytes
        return report

    def _task(self, number: int, pipeline: Pipeline) -> None:
        """Begin with a task."""
        pipeline.begin(number)

    def _barrier(self, report: Report, writes: Writes, version: int) -> None:
        """Meet the other trainer ranks."""
        if self.group is None:
            return
        from torch import distributed

        begin = time.perf_counter()
        timeout = datetime.timedelta(seconds=max(writes.left(), 0.001))
        try:
            distributed.monitored_barrier(self.group, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise UpdateFailed(f"version {version}, trainer rank {self.rank}: a rank is missing: {error}") from error
        report.ran("barrier", begin, time.perf_counter())

    def metrics_text(self) -> str:
        """Return counts as text for Prometheus."""
        return metrics_text("trainer", self._totals)


def _planned(tasks: Sequence[Task], params: Sequence[Any]) -> dict[str, tuple[tuple[int, ...], Any, bool]]:
    """Return shape and type of each parameter that tasks need, and whether it is brought together."""
    import torch

    gathered: dict[int, bool] = {}
    for number, *_, whole, _, _ in (item for task in tasks for item in task.items):
        gathered[number] = gathered.get(number, False) or whole
    found = {}
    for number, whole in sorted(gathered.items()):
        name, shape, dtype = params[number]
        found[name] = tuple(shape), getattr(torch, dtype), whole
    return found
