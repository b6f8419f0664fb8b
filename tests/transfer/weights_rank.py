"""A trainer or a rollout rank in a process of its own: it takes pickled calls on its standard input, and answers."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import putget_transfer as pt
from putget_transfer import weights
from tests.harness import warm
from tests.project.checkout import ROOT
from tests.transfer import weights_models as models

HEARTBEAT_S = (0.1, 4.0)
"""A peer that lives may get no processor for seconds."""
LOST_S = 30.0
"""How long a trainer waits for a peer to be lost."""
TASK_BYTES = 20_000


def engine(network: str, on_peer_event: Callable[[str, str | None], object] | None = None) -> pt.Engine:
    """Return an engine that notices lost peers in a few seconds."""
    group = pt.DeviceGroup.host(1) if network == "host" else pt.DeviceGroup.tcp(["127.0.0.1"])
    builder = pt.Engine.builder().group(group).heartbeat(*HEARTBEAT_S).connect_timeout(5.0).grace(0.3)
    return (builder if on_peer_event is None else builder.on_peer_event(on_peer_event)).build()


class Trainer:
    """The calls that a process carries out."""

    def __init__(self, network: str, rank: int, ranks: int, file: str) -> None:
        self.rank, self.source, self.group = rank, models.Source(), None
        if ranks > 1:
            self._shard(ranks, file)
        self.lost = threading.Event()
        self.engine = engine(network, self._heard)

    def _heard(self, _peer: str, reason: str | None) -> None:
        if reason is not None:
            self.lost.set()

    def _shard(self, ranks: int, file: str) -> None:
        """Divide the model over ranks with FSDP2."""
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=self.rank, world_size=ranks)
        self.group = distributed.group.WORLD
        fully_shard(self.source, mesh=init_device_mesh("cpu", (ranks,)))

    def describe(self) -> list[weights.Param]:
        return weights.describe(self.source, rank=self.rank)

    def start(self, params: list[Any], slots: list[weights.Slots], replicas: int) -> str:
        schedule = weights.plan(params, slots, replicas=replicas, task_bytes=TASK_BYTES)
        self.trainer = weights.Trainer(
            self.engine, schedule, self.rank, self.source, self.group, watermark_bytes=2 * TASK_BYTES
        )
        return str(schedule.digest)

    def set(self, version: int) -> None:
        self.source.set(version)

    def address(self) -> bytes:
        return self.trainer.address()

    def publish(self, *arguments: Any, **named: Any) -> weights.Report:
        return self.trainer.publish(*arguments, **named)

    def lose(self, pid: int) -> None:
        """Have the next `publish` stop a process of a rollout rank, and begin when its heartbeat is missed."""
        publish = self.trainer.publish

        def after_loss(*arguments: Any, **named: Any) -> weights.Report:
            self.trainer.publish = publish  # type: ignore[method-assign]
            self.lost.clear()
            os.kill(pid, signal.SIGSTOP)
            assert self.lost.wait(LOST_S)
            return publish(*arguments, **named)

        self.trainer.publish = after_loss  # type: ignore[method-assign]

    def stop_after(self, writes: int, number: int) -> None:
        """Have this process signal itself once, in front of a write."""
        writer = weights._trainer.Writer  # type: ignore[attr-defined]
        left = writes

        class Stopping:
            def __init__(self, *arguments: Any) -> None:
                self.writer = writer(*arguments)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.writer, name)

            def write(self, *arguments: Any) -> Any:
                nonlocal left
                left -= 1
                if left == -1:
                    os.kill(os.getpid(), number)
                return self.writer.write(*arguments)

        weights._trainer.Writer = Stopping  # type: ignore[attr-defined]

    def signal_at(self, stage: str, number: int) -> None:
        """Have this process signal itself once, where all trainers bring a parameter together or meet at the end."""
        from torch import distributed
        from torch.distributed.tensor import DTensor

        places: dict[str, tuple[Any, str]] = {
            "gather": (DTensor, "full_tensor"),
            "barrier": (distributed, "monitored_barrier"),
        }
        owner, name = places[stage]
        call = getattr(owner, name)

        def once(*arguments: Any, **named: Any) -> Any:
            setattr(owner, name, call)
            os.kill(os.getpid(), number)
            return call(*arguments, **named)

        setattr(owner, name, once)


class Rollout:
    """The calls of a process that has a rollout rank, tensor-parallel rank 0 of 1."""

    def __init__(self, network: str) -> None:
        self.engine, self.model = engine(network), models.Engine(1, 0)

    def record(self, params: list[Any]) -> weights.Slots:
        self.slots = weights.record(self.model, weights.checkpoint(params))
        return self.slots

    def start(self, params: list[Any], slots: weights.Slots, replicas: int, rank: int) -> str:
        schedule = weights.plan([params], [slots], replicas=replicas, task_bytes=TASK_BYTES)
        self.rollout = weights.Rollout(self.engine, self.slots, schedule, rank)
        return str(schedule.digest)

    def die_at(self, stage: str) -> None:
        """Have this process kill itself at a stage of the next update."""

        def die(*_arguments: Any, **_named: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        rollout: Any = self.rollout
        expect, ready = rollout.expect, rollout.ready

        def die_after(call: Any) -> Any:
            return lambda *arguments, **named: (call(*arguments, **named), die())

        if stage == "before it expects":
            rollout.expect = die
        elif stage == "when it expects":
            rollout.expect = die_after(expect)
        elif stage == "while bytes land":
            rollout.ready = die
        elif stage == "when it is complete":
            rollout.ready = die_after(ready)
        else:
            assert stage == "while it commits"
            move = rollout._move
            rollout._move = die_after(move)

    def versions(self, among: range) -> list[int]:
        return models.version_of(self.model, among)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)


class Remote:
    """A rank, from outside: its calls may be made from several threads, one after the other."""

    def __init__(self, *arguments: Any) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        command = [warm.python(), "-m", "tests.transfer.weights_rank"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
        )
        self.lock = threading.Lock()
        self.first = arguments
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        with self.lock:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            try:
                pickle.dump((name, arguments, named), self.process.stdin)
                self.process.stdin.flush()
                kind, value = pickle.load(self.process.stdout)
            except (EOFError, BrokenPipeError) as error:
                raise RuntimeError("the process has ended") from error
        if kind == "raised":
            raise value
        return value

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.call(name, *arguments, **named)

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            # The warm Python's command ends a moment later than its program.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(60)


def main() -> None:
    """Carry out calls: the first makes the trainer."""
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    torch.set_num_threads(1)
    out.write(f"{os.getpid()}\n".encode())
    out.flush()
    rank: Any = None
    while True:
        try:
            name, arguments, named = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if name == "make":
                rank = Trainer(*arguments) if len(arguments) > 1 else Rollout(*arguments)
                answer: Any = ("done", None)
            else:
                answer = ("done", getattr(rank, name)(*arguments, **named))
        except Exception as error:
            answer = ("raised", weights.UpdateFailed(str(error)) if isinstance(error, pt.EngineError) else error)
        pickle.dump(answer, out)
        out.flush()


if __name__ == "__main__":
    main()
