"""What ranks do in the tests of launching: functions that rank processes import by name."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist

from putget.bench.contender import Putget
from putget.bench.demo_layer import run_layer
from putget.bench.launch import Emit, RankContext
from putget.bench.measure import measure
from putget.bench.settings import Settings


def agree(context: RankContext, settings: Any, emit: Emit) -> int:
    everyone: list[Any] = [None] * context.size
    dist.all_gather_object(everyone, (context.rank, context.size, str(context.device)))
    emit({"kind": "everyone", "ranks": everyone, "settings": settings})
    return 7


def die(context: RankContext, settings: Any, emit: Emit) -> int:
    emit({"kind": "alive"})
    dist.barrier()
    if context.rank == settings["rank"]:
        if settings["how"] == "raise":
            raise RuntimeError("out of luck")
        os.kill(os.getpid(), getattr(signal, settings["how"]))
    dist.barrier()
    return 0


def corrupt(context: RankContext, settings: Settings, emit: Emit) -> int:
    """The bench with a combine that gets one value wrong on the last rank, from the second size on."""
    _break_combine(context)
    return measure(context, settings, emit)


def corrupt_demo(context: RankContext, settings: Settings, emit: Emit) -> int:
    """The demo, likewise."""
    _break_combine(context)
    return run_layer(context, settings, emit)


def _break_combine(context: RankContext) -> None:
    combine = Putget.combine

    def wrong(self: Putget) -> None:
        combine(self)
        if context.rank == context.size - 1 and len(self.output) > 1:
            self.output[1, 3] += 1

    Putget.combine = wrong  # type: ignore[method-assign]
