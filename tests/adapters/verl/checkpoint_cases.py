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


def a_refusal_counts_the_time_in_which_others_may_still_answer() -> None:
    found = Parties(1, 1)

    async def refused() -> None:
        found.join()
        assert await found.all(1) == [[], [1.0]]
        found.join()
        found.workers[0].deadline_s = 0.0
        await found.cancelled(found.workers[0], threading.Event())
        with pytest.raises(ValueError, match=r"still runs; its deadline ends in [1-9]\d* s$"):
            await found.call(found.workers[0], 3)
        found.say("end", found.version, "nobody takes part")

    asyncio.run(refused())
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
            refused = f"^init_process_group: send_weights of version {running} still runs; its deadline ends in [0-9]+"
            with pytest.raises(ValueError, match=refused):
                found.join()
            goes_on.set()
            with pytest.raises(weights.UpdateFailed, match="was cancelled, and others take part now"):
                await received
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


def a_cancelled_call_that_waits_for_a_dead_peer_makes_way_for_a_new_session() -> None:
    for engine, dead in ((0, 2), (1, 2), (2, 0), (2, 1)):  # of two actors and one worker
        for first in (False, True):
            found = Parties(2, 1)
            asyncio.run(_makes_way(found, engine, dead, first))
            found.close()


async def _makes_way(found: Parties, engine: int, dead: int, is_first: bool) -> None:
    """A call waits for one that never calls, and is cancelled; then another takes the place of that one."""
    found.join()
    if not is_first:
        assert await found.all(1) == [[], [], [1.0] * 2]
        found.join()
    waits, gone, goes_on = found.engines[engine], found.engines[dead], threading.Event()
    goes_on.set()
    await found.cancelled(waits, goes_on)
    assert waits.running is not None
    if dead < 2:
        found.actors[dead] = found.kind(1 << 20, is_master=dead == 0, **OPTIONS)
    else:
        found.workers = [found.kind(1 << 20, **OPTIONS)]
    found.join()
    assert waits.running is None
    assert await found.all(3) == [[], [], [3.0] * 2]
    gone._close()


def a_call_whose_coroutine_is_closed_makes_way_for_a_new_session() -> None:
    found, runs = Parties(2, 1), threading.Event()
    found.join()
    gone, worker = found.actors[1], found.workers[0]
    receive = worker._receive

    def noticed(*arguments: Any) -> Any:
        runs.set()
        return receive(*arguments)

    worker._receive = noticed
    call, loop = found.call(worker, 1), asyncio.new_event_loop()
    task: Any = loop.create_task(call)
    task._log_destroy_pending = False
    assert loop.run_until_complete(asyncio.to_thread(runs.wait, DEADLINE_S))
    call.close()  # nobody cancels it: its loop is over
    loop.close()
    del worker._receive
    assert worker.running is not None
    found.actors[1] = found.kind(1 << 20, **OPTIONS)
    found.join()
    assert worker.running is None
    gone._close()
    found.close()


def actors_that_are_given_up_one_after_the_other_gather_to_the_end() -> None:
    found, goes_on, gather = Parties(2, 1), threading.Event(), threading.Barrier(2)

    async def replaced() -> None:
        try:
            await _given_up_in_order(found, goes_on, gather)
        finally:
            goes_on.set()
            gather.abort()

    asyncio.run(replaced())
    found.close()


async def _given_up_in_order(found: Parties, goes_on: threading.Event, gather: threading.Barrier) -> None:
    """Both actors' calls are cancelled; one is given up, and the other only once that one has ended."""

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(6):
            gather.wait(DEADLINE_S)
            yield f"w{number % 2}", torch.ones(4) * 2
            inside.release()
            assert goes_on.wait(DEADLINE_S)

    found.join()
    assert await found.all(1) == [[], [], [1.0] * 2]
    found.join()
    gone, inside = found.workers[0], threading.Semaphore(0)
    calls = [asyncio.create_task(actor.send_weights(gathered())) for actor in found.actors]
    for _ in calls:
        assert await asyncio.to_thread(inside.acquire, timeout=DEADLINE_S)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    found.workers = [found.kind(1 << 20, **OPTIONS)]
    first: Any = found.actors[0].running
    for number, (engine, topology) in enumerate(zip(found.engines, found.topologies(), strict=True)):
        joined = asyncio.create_task(asyncio.to_thread(engine.init_process_group, **topology))
        while number == 0 and not first.given_up:
            await asyncio.sleep(0.01)
        goes_on.set()
        await joined
    assert await found.all(3) == [[], [], [3.0] * 2]
    gone._close()


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
        # An actor that is refused goes through its weights once the call before has done so.
        goes_on.set()
        found.join()
        errors = await found.all(3)
        reason = f"{call}: {call} of version {running} still runs"
        for number, error in enumerate(errors):
            if number == at:
                assert isinstance(error, ValueError), (at, errors)
                assert str(error).startswith(f"{reason}; its deadline ends in ")
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


def an_actor_that_is_refused_gathers_with_the_others() -> None:
    for at in range(ACTORS):
        found = Parties(ACTORS, 1)
        asyncio.run(_gathers_all_the_same(found, at))
        found.close()


async def _gathers_all_the_same(found: Parties, at: int) -> None:
    """An actor's call is cancelled in its gather. The next version comes before that gather is over."""
    goes_on, gather, inside, refused = threading.Event(), threading.Barrier(ACTORS), threading.Event(), found.actors[at]

    def alone() -> Iterator[tuple[str, torch.Tensor]]:
        inside.set()
        yield from _ones(2, ACTORS, goes_on)

    found.join()
    assert await found.all(1) == [[]] * ACTORS + [[1.0] * ACTORS]
    found.join()
    cancelled = found.version
    call = asyncio.create_task(refused.send_weights(alone()))
    assert await asyncio.to_thread(inside.wait, DEADLINE_S)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    found.join()
    try:
        errors = asyncio.gather(
            *(actor.send_weights(_gathered(3, gather)) for actor in found.actors),
            found.call(found.workers[0], 3),
            return_exceptions=True,
        )
        store = refused.store.of(refused.topology.session)
        await asyncio.to_thread(store.take, {f"failed/{found.version}": "the refused actor"}, _end())
        goes_on.set()
        reason = f"send_weights: send_weights of version {cancelled} still runs"
        for number, error in enumerate(await errors):
            assert isinstance(error, ValueError if number == at else weights.UpdateFailed), error
            assert (reason if number == at else f"actor {at}: {reason}") in str(error), error
    finally:
        goes_on.set()
        gather.abort()
        for what in ("failed", "end"):
            found.say(what, cancelled, "nobody takes part")


def _end() -> float:
    return time.monotonic() + DEADLINE_S


def _gathered(value: int, gather: threading.Barrier, bad: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield an actor's weights: none comes before all actors have asked for it."""
    for number in range(ACTORS):
        gather.wait(DEADLINE_S)
        name = f"w{number}"
        yield name, torch.ones(4, device="meta" if name == bad else "cpu") * value
    gather.wait(DEADLINE_S)


def an_actor_that_cannot_copy_gathers_with_the_others() -> None:
    for at in range(ACTORS):
        found, gather = Parties(ACTORS, 1), threading.Barrier(ACTORS)
        try:
            found.join()
            asyncio.run(_cannot_copy(found, at, gather))
        finally:
            gather.abort()
        found.close()


async def _cannot_copy(found: Parties, at: int, gather: threading.Barrier) -> None:
    for value, bad in ((1, ""), (2, f"w{at}"), (3, "")):
        calls = [actor.send_weights(_gathered(value, gather, bad)) for actor in found.actors]
        results = await asyncio.gather(*calls, found.call(found.workers[0], value), return_exceptions=True)
        if bad:
            assert isinstance(results[at], NotImplementedError), results
            for error in (*results[:at], *results[at + 1 :]):
                assert isinstance(error, weights.UpdateFailed), results
                assert f"actor {at}: Cannot copy out of meta tensor" in str(error), results
        else:
            assert results[ACTORS] == [float(value)] * ACTORS, results
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
    a_refusal_counts_the_time_in_which_others_may_still_answer,
    others_take_part_only_once_a_cancelled_version_has_ended,
    a_cancelled_call_that_waits_for_a_dead_peer_makes_way_for_a_new_session,
    a_call_whose_coroutine_is_closed_makes_way_for_a_new_session,
    actors_that_are_given_up_one_after_the_other_gather_to_the_end,
    a_refused_call_ends_the_version_for_all,
    an_actor_that_is_refused_gathers_with_the_others,
    an_actor_that_cannot_copy_gathers_with_the_others,
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
