"""The checkpoint engine in verl's own registry and manager; stand-ins for Ray and for the rest of verl.

`run` is the body of a process of its own. Actors and rollout workers are threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from putget_transfer import weights
from tests.adapters.packages import shell, stand_in
from tests.harness import Rank
from tests.transfer import weights_models as models

ACTORS, WORKERS, DEADLINE_S = 2, 2, 60.0
MODULE = "putget_transfer.adapters.verl"
OPTIONS = {"networks": "host", "deadline_s": DEADLINE_S}


class Group:
    """Carries out the manager's calls, as verl's worker groups do: one thread for each worker."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.world_size = len(workers)
        self.pool = ThreadPoolExecutor(len(workers))

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Future[Any]]:
        calls = []
        for at, worker in enumerate(self.workers):
            own = {name: values[at] for name, values in arguments.items()}
            calls.append(self.pool.submit(getattr(worker.engine, method[at]), **own))
        return calls

    def update_weights(self, **arguments: Any) -> list[Future[Any]]:
        return [self.pool.submit(asyncio.run, worker.update_weights(**arguments)) for worker in self.workers]


class Actor:
    """An actor: every rank yields whole tensors."""

    def __init__(self, rank: int, **options: Any) -> None:
        from verl.checkpoint_engine.base import CheckpointEngineRegistry

        self.engine = CheckpointEngineRegistry.new(
            "putget", is_master=rank == 0, bucket_size=1 << 20, **{**OPTIONS, **options}
        )
        self.version, self.fails = 0, ""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in models.values(self.version).items():
            if name == self.fails:
                raise RuntimeError(f"the GPU with {name} is lost")
            yield name, tensor

    async def update_weights(self, global_steps: int | None, mode: str) -> Any:
        assert mode == "putget"
        return await self.engine.send_weights(self.weights(), global_steps=global_steps)


class Worker:
    """A rollout worker: its engine loads what verl's checkpoint engine yields."""

    def __init__(self, rank: int, **options: Any) -> None:
        from verl.checkpoint_engine.base import CheckpointEngineRegistry

        self.engine = CheckpointEngineRegistry.new("putget", bucket_size=1 << 20, **{**OPTIONS, **options})
        self.model = models.Engine(WORKERS, rank)

    async def update_weights(self, global_steps: int | None) -> None:
        async for name, tensor in self.engine.receive_weights(global_steps=global_steps):
            self.model.load_weights([(name, tensor)])


class Replica:
    """A replica, as far as the manager asks it for something."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.generates = True

    async def abort_all_requests(self) -> None:
        self.generates = False

    async def resume_generation(self) -> None:
        self.generates = True

    async def release_kv_cache(self) -> None:
        assert not self.generates

    async def resume_kv_cache(self) -> None:
        assert not self.generates


class Cluster:
    """Actors and replicas, and verl's manager of their weights."""

    def __init__(self, replicas: int = 1, **options: Any) -> None:
        from verl.checkpoint_engine.base import CheckpointEngineManager

        self.actors = [Actor(rank, **options) for rank in range(ACTORS)]
        self.replicas = [Replica([Worker(rank, **options) for rank in range(WORKERS)]) for _ in range(replicas)]
        config = SimpleNamespace(backend="putget", custom_backend_module=MODULE)
        self.manager = CheckpointEngineManager(config, Group(self.actors), self.replicas)

    def send(self, version: int) -> dict[str, float]:
        for actor in self.actors:
            actor.version = version
        found: dict[str, float] = asyncio.run(self.manager.update_weights(global_steps=version))
        return found

    def versions(self) -> list[list[int]]:
        return [
            models.version_of(worker.model, range(6)) for replica in self.manager.replicas for worker in replica.workers
        ]

    def close(self) -> None:
        workers = [worker for replica in self.manager.replicas for worker in replica.workers]
        for engine in [*(actor.engine for actor in self.actors), *(worker.engine for worker in workers)]:
            engine._close()


def versions_arrive() -> None:
    found = Cluster()
    for version in (1, 2):
        metrics = found.send(version)
        assert metrics["putget/bytes"] > 0
        assert found.versions() == [[version]] * WORKERS
        assert found.replicas[0].generates
    found.close()


def replicas_join_and_leave() -> None:
    found = Cluster(2)
    found.send(1)
    assert found.versions() == [[1]] * 2 * WORKERS
    gone = found.replicas[1]
    found.manager.remove_replicas([gone])
    found.send(2)
    assert found.versions() == [[2]] * WORKERS
    found.manager.add_replicas([gone])
    found.send(3)
    assert found.versions() == [[3]] * 2 * WORKERS
    found.close()


def an_actor_that_fails_leaves_the_old_version() -> None:
    for failing in range(ACTORS):
        found = Cluster()
        found.send(1)
        found.actors[failing].fails = "layers.1.o.weight"
        with pytest.raises((RuntimeError, weights.UpdateFailed), match=r"the GPU with layers\.1\.o\.weight is lost"):
            found.send(2)
        assert found.versions() == [[1]] * WORKERS
        found.actors[failing].fails = ""
        found.send(3)
        assert found.versions() == [[3]] * WORKERS
        found.close()


def actors_try_again_where_the_first_version_has_failed() -> None:
    for failing in range(ACTORS):
        found = Cluster()
        found.actors[failing].fails = "layers.1.o.weight"
        with pytest.raises((RuntimeError, weights.UpdateFailed), match=r"the GPU with layers\.1\.o\.weight is lost"):
            found.send(1)
        found.actors[failing].fails = ""
        found.send(2)
        assert found.versions() == [[2]] * WORKERS
        found.close()


def a_worker_that_fails_keeps_all_from_the_version() -> None:
    found = Cluster()
    found.send(1)
    receiver = found.replicas[0].workers[1].engine.receiver
    land, receiver._land = receiver._land, _lost
    with pytest.raises(weights.UpdateFailed, match="verl worker 1: out of memory"):
        found.send(2)
    assert found.versions() == [[1]] * WORKERS
    receiver._land = land
    found.send(3)
    assert found.versions() == [[3]] * WORKERS
    found.close()


def _lost(*_arguments: Any) -> None:
    raise RuntimeError("out of memory")


class Parties:
    """Actors and rollout workers without a manager, so that each call can be cancelled or left out."""

    def __init__(self, actors: int, workers: int) -> None:
        from putget_transfer.adapters.verl import PutgetCheckpointEngine

        self.kind: Any = PutgetCheckpointEngine
        self.actors = [self.kind(1 << 20, is_master=rank == 0, **OPTIONS) for rank in range(actors)]
        self.workers = [self.kind(1 << 20, **OPTIONS) for _ in range(workers)]
        self.version = 0

    @property
    def engines(self) -> list[Any]:
        return [*self.actors, *self.workers]

    def topologies(self) -> list[dict[str, Any]]:
        """Return each engine's arguments of `init_process_group` for the next version."""
        described = [engine.prepare() for engine in self.engines]
        sides = self.kind.build_topology(len(self.actors), len(self.workers), described)
        sizes = (len(self.actors), len(self.workers))
        found = [
            {name: values[rank] for name, values in side.items()}
            for side, size in zip(sides, sizes, strict=True)
            for rank in range(size)
        ]
        self.version = found[0]["version"]
        return found

    def join(self) -> None:
        for engine, topology in zip(self.engines, self.topologies(), strict=True):
            engine.init_process_group(**topology)

    def say(self, what: str, version: int, value: str) -> None:
        engine = self.actors[0]
        engine.store.of(engine.topology.session).put(f"{what}/{version}", value)

    async def call(self, engine: Any, value: int, goes_on: threading.Event | None = None) -> list[float]:
        """Send or receive, as the engine does; return what has been received."""
        if engine in self.actors:
            await engine.send_weights(_ones(value, len(self.actors), goes_on))
            return []
        return [float(tensor[0]) async for _, tensor in engine.receive_weights()]

    async def all(self, value: int) -> list[Any]:
        """Send and receive on all; return what came, or the error."""
        return await asyncio.gather(*(self.call(engine, value) for engine in self.engines), return_exceptions=True)

    async def cancelled(self, engine: Any, goes_on: threading.Event) -> None:
        """Cancel a call in whose midst its thread is."""
        runs, work = threading.Event(), "_send" if engine in self.actors else "_receive"
        done = getattr(engine, work)

        def noticed(*arguments: Any) -> Any:
            runs.set()
            return done(*arguments)

        setattr(engine, work, noticed)
        task = asyncio.create_task(self.call(engine, 2, goes_on))
        assert await asyncio.to_thread(runs.wait, DEADLINE_S)
        delattr(engine, work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def close(self) -> None:
        for engine in self.engines:
            engine._close()


def _ones(value: int, count: int, goes_on: threading.Event | None) -> Iterator[tuple[str, torch.Tensor]]:
    assert goes_on is None or goes_on.wait(DEADLINE_S)
    for number in range(count):
        yield f"w{number}", torch.ones(4) * value


async def _free(call: Callable[[], Any]) -> Any:
    """Repeat what is refused while a call before still runs, until it is not."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            return call()
        except ValueError as error:
            if "still runs" not in str(error) or time.monotonic() > end:
                raise
        await asyncio.sleep(0.01)


def a_version_that_nobody_waits_for_any_more_goes_on_alone() -> None:
    found, goes_on = Parties(1, 1), threading.Event()
    found.join()

    async def again() -> None:
        try:
            for engine in found.engines:
                await found.cancelled(engine, goes_on)
            refusals = [(found.actors[0], "send_weights"), (found.workers[0], "receive_weights")]
            for engine, call in refusals:
                with pytest.raises(ValueError, match=f"^{call}: {call} of version {found.version} still runs"):
                    await found.call(engine, 3)
        finally:
            goes_on.set()

    asyncio.run(again())  # it waits for both threads
    # A second call for the version that runs has not ended it.
    assert float(found.workers[0].tensors["w0"][0]) == 2.0
    found.close()


def others_take_part_only_once_a_cancelled_version_has_ended() -> None:
    found, goes_on = Parties(1, 1), threading.Event()

    async def replaced() -> None:
        try:
            found.join()
            assert await found.all(1) == [[], [1.0]]
            found.join()
            running, gone = found.version, found.workers[0]
            received = asyncio.create_task(found.call(gone, 2))
            await found.cancelled(found.actors[0], goes_on)
            found.workers = [found.kind(1 << 20, **OPTIONS)]
            with pytest.raises(ValueError, match=f"^init_process_group: send_weights of version {running} still runs"):
                found.join()
            goes_on.set()
            assert await received == [2.0]
            gone._close()
            found.workers = [found.kind(1 << 20, **OPTIONS)]
            await _free(found.join)
            for value in (3, 4):
                assert await found.all(value) == [[], [float(value)]]
                found.join()
        finally:
            goes_on.set()

    asyncio.run(replaced())
    found.close()


def a_refused_call_ends_the_version_for_all() -> None:
    for at in range(ACTORS + WORKERS):
        found, goes_on = Parties(ACTORS, WORKERS), threading.Event()
        asyncio.run(_refused(found, at, goes_on))
        found.close()


async def _refused(found: Parties, at: int, goes_on: threading.Event) -> None:
    call, name = ("send_weights", f"actor {at}") if at < ACTORS else ("receive_weights", f"worker {at - ACTORS}")
    found.join()
    assert await found.all(1) == [[]] * ACTORS + [[1.0] * ACTORS] * WORKERS
    found.join()
    running = found.version
    try:
        await found.cancelled(found.engines[at], goes_on)
        found.join()
        errors = await found.all(3)
        reason = f"{call}: {call} of version {running} still runs"
        for number, error in enumerate(errors):
            if number == at:
                assert isinstance(error, ValueError), (at, errors)
                assert str(error) == reason
            else:
                assert isinstance(error, weights.UpdateFailed), (at, errors)
                assert f"{name}: {reason}" in str(error), (at, errors)
    finally:
        # Nobody else has sent or received the version that was cancelled.
        for what in ("failed", "end"):
            found.say(what, running, "nobody takes part")
        goes_on.set()
    found.join()
    end = time.monotonic() + DEADLINE_S
    while True:
        results = await found.all(4)
        if results == [[]] * ACTORS + [[4.0] * ACTORS] * WORKERS:
            return
        # Its thread has not noticed yet.
        assert "still runs" in str(results[at]), results
        assert time.monotonic() < end
        found.join()


def changes_go_alone() -> None:
    found = Cluster(delta_bytes=1 << 20)
    whole = found.send(1)["putget/bytes"]
    assert found.send(1)["putget/bytes"] < whole / 4
    found.send(2)
    assert found.versions() == [[2]] * WORKERS
    found.close()


def mistakes_are_named() -> None:
    from putget_transfer.adapters.verl import PutgetCheckpointEngine

    engine = PutgetCheckpointEngine(1 << 20)
    with pytest.raises(ValueError, match="init_process_group: it has to come before"):
        asyncio.run(engine.send_weights([]))
    with pytest.raises(ValueError, match="0 actors of 1 are the master"):
        PutgetCheckpointEngine.build_topology(1, 1, [{"name": "a"}, {"name": "b"}])


CASES: tuple[Callable[[], None], ...] = (
    versions_arrive,
    replicas_join_and_leave,
    an_actor_that_fails_leaves_the_old_version,
    actors_try_again_where_the_first_version_has_failed,
    a_worker_that_fails_keeps_all_from_the_version,
    a_version_that_nobody_waits_for_any_more_goes_on_alone,
    others_take_part_only_once_a_cancelled_version_has_ended,
    a_refused_call_ends_the_version_for_all,
    changes_go_alone,
    mistakes_are_named,
)


def load(root: Path) -> None:
    """Import verl's file. Its registry gets the engine when the manager imports `custom_backend_module`."""
    shell(root, "verl", "verl.checkpoint_engine")

    def results(futures: list[Future[Any]]) -> list[Any]:
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def import_external_libs(name: str | None) -> None:
        __import__(name or "sys")

    def group(worker_handles: list[Any], **_options: Any) -> Group:
        return Group(worker_handles)

    def waited(call: Callable[..., Any]) -> Callable[..., Any]:
        return call

    decorate = lambda **_options: lambda method: method  # noqa: E731
    stand_in("ray", remote=lambda kind: kind, get=results)
    stand_in("verl.single_controller")
    stand_in("verl.single_controller.base", Worker=object)
    stand_in(
        "verl.single_controller.base.decorator", Dispatch=SimpleNamespace(ONE_TO_ALL=0, DP_COMPUTE=0), register=decorate
    )
    stand_in("verl.single_controller.ray", RayClassWithInitArgs=SimpleNamespace, RayWorkerGroup=group)
    stand_in("verl.utils")
    stand_in("verl.utils.distributed", initialize_global_process_group_ray=None)
    stand_in("verl.utils.import_utils", import_external_libs=import_external_libs)
    stand_in("verl.utils.ray_utils", auto_await=waited)
    stand_in("verl.workers")
    stand_in("verl.workers.config", CheckpointEngineConfig=object, HFModelConfig=object, RolloutConfig=object)
    stand_in("verl.workers.rollout", BaseRollout=object, RolloutReplica=object, get_rollout_class=None)
    stand_in("verl.workers.rollout.utils", ensure_async_iterator=None)
    __import__(MODULE)


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
