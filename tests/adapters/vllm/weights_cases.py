"""Both halves of the weight-transfer plug-in in vLLM's own factories; stand-ins for the rest of vLLM.

`run` is the body of a process of its own. Its workers are threads, and do with a call what vLLM's worker does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from putget_transfer import weights
from tests.adapters.packages import shell, stand_in
from tests.engines.prompts import free_port
from tests.harness import Rank
from tests.transfer import weights_models as models

WORKERS = 2
DEADLINE_S = 60.0
PLUGIN = "putget_transfer.adapters.vllm.weights"


class Landing:
    """Stands for the part that knows vLLM's layers."""

    def __init__(self, model: Any, _model_config: Any, entries: Any, *, commit: str) -> None:
        self.live = weights.record(model, entries)
        self.copies = [torch.zeros_like(tensor) if commit == "swap" else tensor for tensor in self.live.tensors]
        self.slots = weights.Slots(list(self.live), self.live.memory, self.copies)
        self.num_repacked, self.num_in_place = 0, len(self.copies)

    def move(self) -> None:
        for tensor, copy in zip(self.live.tensors, self.copies, strict=True):
            tensor.copy_(copy)


class Worker:
    """The calls of vLLM's worker, as far as they matter here."""

    def __init__(self, rank: int) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        self.model = models.Engine(WORKERS, rank)
        parallel = SimpleNamespace(data_parallel_index=0, world_size=WORKERS, rank=rank, enable_eplb=False)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        backend = SimpleNamespace(backend="putget")
        self.engine = WeightTransferEngineFactory.create_engine(backend, config, torch.device("cpu"), self.model)
        self.active = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.engine.start_weight_update()
        self.active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self.active = False
            raise

    def finish_weight_update(self) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.engine.finish_weight_update()
        self.active = False


class Client:
    """Calls workers one after the other; `version` is the label of a server's answers.

    A server calls its data-parallel engines at once, but one of them may be in a step that waits for the other: so no
    call may wait for another worker.
    """

    def __init__(self) -> None:
        self.workers = [Worker(rank) for rank in range(WORKERS)]
        self.version = "default"

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            errors: list[Exception] = []
            for worker in self.workers:
                try:
                    getattr(worker, name)(*arguments)
                except Exception as error:
                    errors.append(error)
            if errors:
                raise RuntimeError(f"500 Internal Server Error: {errors[0]}")

        return call

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.__getattr__("finish_weight_update")()
        self.version = weight_version or self.version

    def versions(self) -> list[list[int]]:
        return [models.version_of(worker.model, range(8)) for worker in self.workers]


def divided(rank: int, ranks: int) -> Any:
    """Return a source that yields parts alone: the first dimension is divided."""
    from vllm.distributed.weight_transfer.base import ParamMeta, Shard, WeightSource

    class Divided(WeightSource):  # type: ignore[misc]
        version = 0
        fails = ""

        @functools.cached_property
        def metadata(self) -> list[Any]:
            owners = tuple(range(ranks))
            return [
                ParamMeta(name, torch.float32, shape, owners=owners, placements=(Shard(0),))
                for name, shape in models.shapes().items()
            ]

        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in models.values(self.version).items():
                if name == self.fails:
                    raise RuntimeError(f"the GPU with {name} is lost")
                yield name, tensor.chunk(ranks)[rank]

    return Divided()


def whole() -> Any:
    """Return a source that yields whole tensors alone."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Whole(WeightSource):  # type: ignore[misc]
        version = 0

        @functools.cached_property
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, torch.float32, shape) for name, shape in models.shapes().items()]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from models.values(self.version).items()

    return Whole()


class Cluster:
    """Trainer ranks, and the workers of one server."""

    def __init__(self, sources: list[Any], client: Client | None = None, **options: Any) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from putget_transfer.adapters.vllm.weights import TrainerInit

        self.sources, self.client = sources, client or Client()
        port = options.pop("port", 0) if len(sources) == 1 else free_port()
        init = {"num_workers": WORKERS, "num_trainers": len(sources), "networks": "host", "master_port": port}
        self.pool = ThreadPoolExecutor(len(sources))

        def begin(rank: int) -> Any:
            info = TrainerInit(**{**init, "deadline_s": DEADLINE_S, **options}, rank=rank)
            return WeightTransferTrainerFactory.trainer_init(info, client=self.client, source=sources[rank])

        self.ranks = list(self.pool.map(begin, range(len(sources))))

    def send(self, version: int) -> list[Any]:
        """Send a version on all ranks; return reports and errors."""
        for source in self.sources:
            source.version = version
        calls = [self.pool.submit(rank.send_weights, version) for rank in self.ranks]
        return [call.exception() or call.result() for call in calls]

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()
        for worker in self.client.workers:
            worker.engine.shutdown()
        self.pool.shutdown()


@contextlib.contextmanager
def cluster(*arguments: Any, **options: Any) -> Iterator[Cluster]:
    made = Cluster(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def parts_arrive_from_two_trainers() -> None:
    with cluster([divided(rank, 2) for rank in range(2)]) as found:
        for version in (1, 3):
            reports = found.send(version)
            assert found.client.versions() == [[version]] * 2
            assert found.client.version == str(version)
            assert sum(report.num_bytes for report in reports) == found.ranks[0].sender.schedule.num_bytes
            assert all(report.num_bytes > 0 for report in reports)


def whole_tensors_arrive_where_a_source_has_no_parts() -> None:
    with cluster([whole()]) as found:
        (report,) = found.send(2)
        assert report.version == 2
        assert found.client.versions() == [[2]] * 2


def modules_arrive() -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    module = models.Source()
    with cluster([ModuleSource(module)]) as found:
        module.set(4)
        found.send(1)
        assert found.client.versions() == [[4]] * 2


def changes_arrive_alone() -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    module = models.Source()
    with cluster([ModuleSource(module)], delta_bytes=1 << 16) as found:
        module.set(4)
        (first,) = found.send(1)
        assert first.num_deltas == 0
        with torch.no_grad():
            last = list(module.parameters())[-1].view(-1)
            kept = last[0].clone()
            last[0] += 1
        (second,) = found.send(2)
        assert second.num_deltas > 0
        assert second.num_bytes < first.num_bytes / 2
        assert [] in found.client.versions()  # the element lies in one of them
        with torch.no_grad():
            last[0] = kept
        found.client.workers[1].engine.receiver._land = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
        (error,) = found.send(3)
        assert "out of memory" in str(error)
        del found.client.workers[1].engine.receiver._land
        (fourth,) = found.send(4)
        assert list(fourth.whole) == [0]  # version 3 may have reached it in part
        assert found.client.versions() == [[4]] * 2


def a_trainer_that_fails_leaves_the_old_version() -> None:
    for failing in (0, 1):
        sources = [divided(rank, 2) for rank in range(2)]
        with cluster(sources) as found:
            found.send(1)
            sources[failing].fails = "layers.1.o.weight"
            told = [str(error) for error in found.send(2)]
            assert all("the GPU with layers.1.o.weight is lost" in text for text in told), told
            assert f"trainer rank {failing}" in told[1 - failing], told
            assert found.client.versions() == [[1]] * 2
            assert found.client.version == "1"
            assert [worker.engine.receiver.rollout.state for worker in found.client.workers] == ["whole"] * 2
            sources[failing].fails = ""
            found.send(3)
            assert found.client.versions() == [[3]] * 2


def no_trainer_rank_takes_an_interrupted_version_for_sent() -> None:
    with cluster([divided(rank, 2) for rank in range(2)]) as found:
        found.send(1)

        def interrupted(*_arguments: Any) -> None:
            raise KeyboardInterrupt

        for at, name in enumerate(("update_weights", "finish_weight_update")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(found.client, name, interrupted, raising=False)
                results = found.send(2 + at)
            assert isinstance(results[0], KeyboardInterrupt), results
            assert isinstance(results[1], weights.UpdateFailed), results
            assert "KeyboardInterrupt" in str(results[1])
        assert not [result for result in found.send(4) if isinstance(result, BaseException)]
        assert found.client.versions() == [[4]] * WORKERS


def nothing_is_kept_of_versions_that_are_over() -> None:
    with cluster([divided(rank, 2) for rank in range(2)]) as found:
        store = found.ranks[0].rendezvous
        found.send(1)
        found.send(5)
        found.sources[1].fails = next(iter(models.shapes()))
        assert all(isinstance(result, BaseException) for result in found.send(6))
        found.sources[1].fails = ""
        for version in (10, 11):  # those of the version before stay
            assert not [result for result in found.send(version) if isinstance(result, BaseException)]
        kept = [version for version in (1, 5, 6) for key in ("offers", "vote") if store.has(f"{key}/{version}/0")]
        assert not kept, kept


def a_worker_that_fails_keeps_all_from_the_version() -> None:
    with cluster([whole()]) as found:
        found.send(1)
        lost = found.client.workers[1]
        land = lost.engine.receiver._land
        lost.engine.receiver._land = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
        (error,) = found.send(2)
        assert "vLLM worker 1: out of memory" in str(error), error
        assert found.client.versions() == [[1]] * 2
        lost.engine.receiver._land = land
        found.send(3)
        assert found.client.versions() == [[3]] * 2


def a_torn_model_answers_nothing_until_an_update_is_complete() -> None:
    sources = [divided(0, 1)]
    with cluster(sources, commit="paused") as found:
        found.send(1)
        sources[0].fails = "layers.1.o.weight"
        found.send(2)
        for worker in found.client.workers:
            assert worker.engine.receiver.rollout.state == "torn"
            with pytest.raises(weights.UpdateFailed, match="torn"):
                worker.model(None)
        sources[0].fails = ""
        found.send(3)
        assert found.client.versions() == [[3]] * 2
        with pytest.raises(NotImplementedError):  # it is called: this model has no forward
            found.client.workers[0].model(None)


def another_trainer_goes_on_after_one_that_died_in_the_middle() -> None:
    with cluster([whole()]) as found:
        found.send(1)
        found.client.start_weight_update()
        with cluster([whole()], found.client) as other:
            other.send(5)
            assert found.client.versions() == [[5]] * 2


def a_version_is_decided_by_the_trainer() -> None:
    with cluster([whole()]) as found:
        found.send(1)
        finish = found.client.finish_weight_update

        def fails(*_arguments: Any) -> None:
            raise RuntimeError("the trainer's machine is gone")

        found.ranks[0].rendezvous.put = functools.partial(_put_but, found.ranks[0].rendezvous.put, "commit/2", fails)
        (error,) = found.send(2)
        assert "the trainer's machine is gone" in str(error)
        finish()  # as a new trainer would
        assert found.client.versions() == [[1]] * 2
        found.send(3)
        assert found.client.versions() == [[3]] * 2


def _put_but(put: Callable[..., None], key: str, fails: Callable[..., None], name: str, value: Any) -> None:
    if name == key:
        fails()
    put(name, value)


def mistakes_are_named() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from putget_transfer.adapters.vllm.weights import TrainerInit

    for source, options, words in (
        (None, {}, "source: None came"),
        (whole(), {"rank": 3}, "rank 3 of 1 trainers"),
        (whole(), {"commit": "both"}, "commit 'both' came"),
        (whole(), {"num_trainers": 2}, "master_port 0 came"),
    ):
        info = TrainerInit(**{"num_workers": 2, "rank": 0, **options})
        with pytest.raises(ValueError, match=words):
            WeightTransferTrainerFactory.trainer_init(info, client=None, source=source)
    source = divided(0, 1)
    source.metadata.pop(0)
    with pytest.raises(Exception, match="the checkpoint has nothing for 'embed'"), cluster([source]):
        pass
    client = Client()
    client.workers[1].engine.parallel_config.enable_eplb = True
    with pytest.raises(Exception, match="enable_eplb: true came"), cluster([whole()], client):
        pass
    with cluster([whole()]) as found:
        found.send(2)
        with pytest.raises(ValueError, match="1 came; 2 has been sent"):
            found.ranks[0].send_weights(1)
        iterate = type(found.sources[0]).iter_full
        type(found.sources[0]).iter_full = lambda self: ((name, one[:1]) for name, one in iterate(self))
        (error,) = found.send(3)
        assert "'embed.weight' came as float32 [1, 64]" in str(error), error
        assert found.client.versions() == [[2]] * 2


CASES = (
    parts_arrive_from_two_trainers,
    whole_tensors_arrive_where_a_source_has_no_parts,
    modules_arrive,
    changes_arrive_alone,
    a_trainer_that_fails_leaves_the_old_version,
    no_trainer_rank_takes_an_interrupted_version_for_sent,
    nothing_is_kept_of_versions_that_are_over,
    a_worker_that_fails_keeps_all_from_the_version,
    a_torn_model_answers_nothing_until_an_update_is_complete,
    another_trainer_goes_on_after_one_that_died_in_the_middle,
    a_version_is_decided_by_the_trainer,
    mistakes_are_named,
)


def load(root: Path) -> None:
    """Import vLLM's files, and register the plug-in as vLLM does: nothing of it is imported before it is used."""
    shell(root, "vllm", "vllm.distributed", "vllm.distributed.weight_transfer")
    stand_in("vllm.logger", init_logger=logging.getLogger)
    stand_in("vllm.config", set_current_vllm_config=lambda _config: contextlib.nullcontext())
    stand_in("vllm.config.parallel", ParallelConfig=object)
    stand_in("vllm.config.weight_transfer", WeightTransferConfig=object)
    stand_in("vllm.distributed.kv_transfer")
    stand_in("vllm.distributed.kv_transfer.kv_connector")
    stand_in("vllm.distributed.kv_transfer.kv_connector.v1")
    connectors = SimpleNamespace(_registry={}, register_connector=lambda *_: None)
    stand_in("vllm.distributed.kv_transfer.kv_connector.factory", KVConnectorFactory=connectors)
    from putget_transfer.adapters import vllm

    vllm.register()
    vllm.register()
    assert f"{PLUGIN}.worker" not in sys.modules
    assert f"{PLUGIN}.trainer" not in sys.modules
    stand_in(f"{PLUGIN}.landing", Landing=Landing)


def run(_rank: Rank, root: Path) -> dict[str, str]:
    """Return what each case came to: "ok", or how it failed."""
    torch.set_num_threads(1)
    load(root)
    found = {}
    for case in CASES:
        try:
            case()
            found[case.__name__] = "ok"
        except BaseException:
            found[case.__name__] = traceback.format_exc()
    return found
