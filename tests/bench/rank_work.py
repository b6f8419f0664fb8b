"""Functions that rank processes import by name in the tests of launching."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from putget_bench import peers, variants
from putget_bench.ablation import Variant, group
from putget_bench.contender import Putget, Round
from putget_bench.demo_layer import run_layer
from putget_bench.launch import Emit, RankContext
from putget_bench.measure import measure
from putget_bench.peers import deepep
from putget_bench.peers.flashinfer import FlashInfer
from putget_bench.settings import Settings


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


@dataclass(frozen=True)
class WithStandIns:
    """The bench's settings, and by peer what its stand-in does wrong."""

    settings: Settings
    broken: dict[str, str]


def with_stand_ins(context: RankContext, job: WithStandIns, emit: Emit) -> int:
    """The bench, with peers that may run on the CPU."""
    for name, peer in peers.REGISTRY.items():
        peers.REGISTRY[name] = replace(peer, devices=("cpu", "cuda"))
    for name, how in job.broken.items():
        _break_peer(name, how, context.rank)
    return measure(context, job.settings, emit)


def _break_peer(name: str, how: str, rank: int) -> None:
    if how == "import":
        if rank == 1:
            peers.REGISTRY[name] = replace(peers.REGISTRY[name], make=_raise("no driver on rank 1\nsecond line"))
    elif how == "no library":
        why = "libnvshmem_host.so.3: cannot open shared object file"
        peers.REGISTRY[name] = replace(peers.REGISTRY[name], make=_raise(why))
    elif how == "large batches":
        FlashInfer.load = _refuse_large_batches(FlashInfer.load)  # type: ignore[method-assign]
    elif how == "small memory":
        deepep._MOST_LOW_LATENCY_TOKENS = 2
    elif how == "no room":
        importlib.import_module("deep_ep").Buffer.low_latency_dispatch = _raise("no room")
    elif name == "flashinfer":
        importlib.import_module("flashinfer.comm.trtllm_moe_alltoall").MoeAlltoAll.broken = how
    else:
        importlib.import_module("deep_ep").Buffer.broken = how


def _raise(why: str) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise ImportError(why)

    return fail


def _refuse_large_batches(load: Callable[..., str | None]) -> Callable[..., str | None]:
    def refuse(self: FlashInfer, round_: Round) -> str | None:
        if round_.num_tokens > 1:
            raise RuntimeError("too many tokens")
        return load(self, round_)

    return refuse


def with_another_group(context: RankContext, settings: Settings, emit: Emit) -> int:
    """The ablations, with a group that somebody has added."""

    @group("deadline")
    def deadlines(settings: Settings) -> Iterator[Variant]:
        yield Variant("patient", "waits for an hour", settings, lambda bench: Putget(*bench, timeout_s=3600.0))

    return measure(context, replace(settings, ablate=("deadline",)), emit)


def corrupt_staged(context: RankContext, settings: Settings, emit: Emit) -> int:
    """The ablations with a staged combine that spoils a value on rank 0."""
    _spoil(context, variants.StagedPutget, "combine", lambda staged: staged.output[1, 3].add_(1))
    return measure(context, settings, emit)


def corrupt_load(context: RankContext, settings: Settings, emit: Emit) -> int:
    """The ablations with a count of the load of which rank 0 sees one too many."""
    _spoil(context, variants.LoadPutget, "dispatch", lambda counting, _: counting._beside["expert_load"][3].add_(1))
    return measure(context, settings, emit)


def corrupt_statistics(context: RankContext, settings: Settings, emit: Emit) -> int:
    """The ablations with numbers of the ranks of which rank 0 sees a wrong one."""
    _spoil(context, variants.StatsPutget, "dispatch", lambda _, received: received.stats[1, 2].add_(1))
    return measure(context, settings, emit)


def corrupt_ids(context: RankContext, settings: Settings, emit: Emit) -> int:
    """The ablations with an exchange of ids by putget of which rank 0 sees the wrong ids."""
    _spoil(context, variants.IdsByPutget, "dispatch", lambda _, received: received.topk_ids.fill_(3))
    return measure(context, settings, emit)


def corrupt_gather(context: RankContext, settings: Settings, emit: Emit) -> int:
    """The ablations with an all-gather of ids of which rank 0 sees the wrong ids."""
    _spoil(context, variants.IdsByAllGather, "dispatch", lambda gather: gather._gathered[0, 0].add_(1))
    return measure(context, settings, emit)


def _spoil(context: RankContext, kind: Any, method: str, spoil: Callable[..., object]) -> None:
    right = getattr(kind, method)

    def wrong(self: Any) -> Any:
        result = right(self)
        if context.rank == 0:
            spoil(self) if result is None else spoil(self, result)
        return result

    setattr(kind, method, wrong)
