"""Temporary memory of an update: its sum stays below the watermark, and what needs more is alone."""

from __future__ import annotations

import ctypes
import itertools
import random
import signal
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import torch

import putget_transfer as pt
from putget_transfer import weights
from putget_transfer.weights import _trainer
from putget_transfer.weights._deltas import Deltas
from putget_transfer.weights._pipeline import Pipeline
from putget_transfer.weights._prepare import Part, Preparer, Work
from putget_transfer.weights._quantise import SCRATCH, scratch_bytes
from putget_transfer.weights._report import Report
from putget_transfer.weights._staging import Room, Staging, Writes, padded

WAIT_S = 60.0


@pytest.mark.parametrize("number", range(20))
def test_the_sum_stays_below_the_limit_unless_one_is_alone(number: int) -> None:
    made = random.Random(number)
    limit = made.randint(1_000, 100_000)
    sizes = [[made.randint(0, limit // 2) for _ in range(made.randint(1, 4))] for _ in range(300)]
    outside = [made.choice([0, made.randint(0, limit)]) for _ in sizes]
    totals = [sum(map(padded, one)) + other for one, other in zip(sizes, outside, strict=True)]
    longest = max(sum(map(padded, one)) for one in sizes)
    num_bytes = max(limit - max(outside), longest)
    room, kept, held, waited = Room(num_bytes, limit), 0, [], 0
    for at, pieces in enumerate(sizes):
        if made.random() < 0.1:  # a parameter is brought together, and kept
            grown = made.randint(0, limit // 4)
            room.hold(grown - kept)
            kept = grown
        while (found := room.take(pieces, outside[at], beside=kept)) is None:
            assert held, "what is alone fits"
            waited += 1
            room.give(*held.pop(made.randrange(len(held)))[:2])
        alone = not held
        held.append((found, outside[at], list(zip(found, map(padded, pieces), strict=True))))
        now = kept + sum(sum(count for _, count in one[2]) + one[1] for one in held)
        assert room.held == now
        assert now <= limit or (alone and now == kept + totals[at])
        places = sorted(place for one in held for place in one[2])
        assert all(begin + count <= end for (begin, count), (end, _) in itertools.pairwise(places))
        assert places[-1][0] + places[-1][1] <= num_bytes
    assert waited
    for found, other, _ in held:
        room.give(found, other)
    assert (room.held, room.used) == (kept, [])


def model_of(made: random.Random) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """Return a trainer's parameters, an engine's, and which ones are quantised there."""
    source, model, quantised = {}, {}, []
    for at in range(made.randint(3, 8)):
        shape, name = (made.randint(1, 500), made.randint(1, 500)), f"w{at}"
        source[name] = torch.randn(shape, dtype=made.choice([torch.bfloat16, torch.float32]))
        if made.random() < 0.6:
            quantised.append(name)
            model[name] = torch.zeros(shape, dtype=torch.float8_e4m3fn)
            model[name + "_scale_inv"] = torch.zeros([-(-size // 128) for size in shape])
        else:
            model[name] = torch.zeros(shape, dtype=torch.bfloat16)
    return source, model, quantised


def lies_ready(task: Any, params: Any) -> bool:
    """Say whether a task's bytes are whole rows of parameters, or parts of one row, in their own type."""

    def lies(item: Any) -> bool:
        param, recipe, dtype, _, size, *_ = item
        _, shape, own = params[param]
        return recipe == "copy" and dtype == own and (size[1] == shape[1] or size[0] == 1)

    return all(map(lies, task.items))


@pytest.mark.parametrize("number", range(6))
def test_an_update_stays_below_the_watermark(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = random.Random(number)
    source, model, quantised = model_of(made)

    def load(checkpoint: Any) -> None:
        for name, tensor in checkpoint:
            model[name].copy_(tensor)

    params = weights.describe(source, rank=0)
    slots = weights.record(model, weights.checkpoint(params, quantised=quantised), load=load)
    schedule = weights.plan(params, [slots], task_bytes=made.randint(1_000, 100_000))
    watermark = made.choice([1_000, made.randint(10_000, 1_000_000), 20_000_000])
    network = pt.SimNetwork(seed=number)
    engines = [pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() for _ in range(2)]
    trainer = weights.Trainer(engines[0], schedule, 0, source, watermark_bytes=watermark)
    rollout = weights.Rollout(engines[1], slots, schedule, 0)
    # Needs of tasks are counted from what they are given, apart from the accounts that they keep.
    made_of = zip(trainer.tasks, trainer._works, strict=True)
    works = [work for task, work in made_of if not lies_ready(task, schedule.params)]
    needs = [sum(map(padded, work.pieces)) + work.outside for work in works]
    in_use: list[int] = []
    prepare = Preparer.prepare

    def counted(preparer: Preparer, work: Any, memory: Any) -> Any:
        assert [len(one) for one in memory] == work.pieces
        in_use.append(sum(map(padded, work.pieces)) + work.outside)
        return prepare(preparer, work, memory)

    monkeypatch.setattr(Preparer, "prepare", counted)
    offers = rollout.expect(1, {0: trainer.address()}, WAIT_S)
    report = trainer.publish(1, WAIT_S, offers=[offers[0]])
    assert rollout.ready(WAIT_S)
    rollout.commit(1)
    assert in_use == needs
    assert max(needs, default=0) <= report.peak_bytes <= max(watermark, *needs)
    # The memory that is there, and the most that comes on top of it.
    outside = max(work.outside for work in trainer._works)
    assert trainer._staging is not None
    most = max(sum(map(padded, work.pieces)) + work.outside for work in trainer._works)
    assert trainer._staging.num_bytes + outside <= max(watermark, 2 * most) + 256
    for name, tensor in source.items():
        if name in quantised:
            values, scales = weights.quantise(tensor)
            assert torch.equal(model[name].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(model[name + "_scale_inv"], scales)
        else:
            assert torch.equal(model[name], tensor.bfloat16())
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("shape", [(1, 1), (300, 500), (2, 128, 129), (1024, 2048), (3, 1100, 1300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rounding_without_the_kernel_takes_no_more_than_it_says(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = weights.quantise(tensor)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    results = sum(one.numel() * one.element_size() for one in kept)
    assert results < most <= results + scratch_bytes(shape)
    assert scratch_bytes(shape) <= SCRATCH << 20


class Later(Preparer):
    """Prepares at once, and says later that it is done, as a GPU does."""

    def prepare(self, work: Work, memory: Any) -> Any:
        """Return an event that is never over before it is waited for."""
        super().prepare(work, memory)
        return SimpleNamespace(query=lambda: False, synchronize=lambda: None)


def test_a_parameter_of_a_later_task_is_counted_once() -> None:
    small, large, limit = 1_000, 256_000, 516_000
    tensors = {"a": torch.zeros(small // 4), "b": torch.zeros(large // 4)}
    params = [(name, list(tensor.shape), "float32") for name, tensor in tensors.items()]
    works = [
        Work(256, [Part(0, [0], [1], True, outside=small)]),
        Work(256, [Part(1, [0], [1], True, outside=2 * large)]),
    ]
    # Nobody expects the version: all that is left is to bring parameters together.
    nobody: Any = SimpleNamespace(targets=lambda _number: [])
    staging: Any = SimpleNamespace(room=lambda: Room(1_024, limit), bytes=torch.zeros(1_024, dtype=torch.uint8))
    report = Report(1, 0)
    writes = Writes(staging, report, time.monotonic() + WAIT_S)
    preparer = Later(params, tensors, report, "cpu")
    deltas = Deltas(None, None, None, {})  # type: ignore[arg-type]
    tasks = [SimpleNamespace(num_bytes=256)] * 2
    pipeline = Pipeline(0, tasks, works, staging, preparer, writes, nobody, deltas)
    for number in range(2):
        pipeline.begin(number)
    assert len(pipeline.begun) == 2
    pipeline.flush()
    assert writes.kept == large
    assert writes.room.peak == 2 * 256 + small + 2 * large <= limit
    pipeline.release()
    writes.end()
    assert writes.room.held == 0


def test_the_time_of_writes_is_counted_once_where_they_overlap() -> None:
    staging: Any = SimpleNamespace(room=lambda: Room(1_024, 1_024))
    report = Report(1, 0)
    writes = Writes(staging, report, time.monotonic() + WAIT_S)
    spans = [(1.0, 4.0), (2.0, 3.0), (3.5, 6.0), (6.0, 7.0), (10.0, 11.0), (10.5, 10.75), (20.0, 20.5)]
    for begin, end in spans:
        writes._ran(report.begun + begin, report.begun + end)
    writes.end()
    assert report.write_s == pytest.approx(6 + 1 + 0.5)
    assert [(round(begin, 6), round(end, 6)) for _, begin, end in report.spans] == [(1, 7), (10, 11), (20, 20.5)]


def test_a_write_never_ends_before_it_begins() -> None:
    staging: Any = SimpleNamespace(room=lambda: Room(1_024, 1_024))
    writes = Writes(staging, Report(1, 0), time.monotonic() + WAIT_S)

    class Write:
        """One that is over at once, and of which another thread keeps the reader for a while."""

        def __init__(self) -> None:
            self.end = time.perf_counter()

        def wait(self) -> None:
            """Return at once."""

        @property
        def seconds_since_end(self) -> float:
            """The time since the end, later than it was asked for."""
            asked = time.perf_counter()
            while time.perf_counter() < asked + 0.01:
                pass
            return time.perf_counter() - self.end

    writes.begin(None)
    writes.write(0, Write)  # type: ignore[arg-type]
    writes.end_oldest()
    assert writes.since is not None
    assert writes.since <= writes.until


def test_a_write_that_is_interrupted_as_it_begins_is_known() -> None:
    staging: Any = SimpleNamespace(room=lambda: Room(1_024, 1_024))
    writes = Writes(staging, Report(1, 0), time.monotonic() + WAIT_S)
    writes.begin(None)
    call = ctypes.CDLL(None)["raise"]  # it returns a number as a write returns its transfer, and the signal has come
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            writes.write(0, partial(call, int(signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert [(target, result) for target, _, result in writes.sent[-1].transfers] == [(0, 0)]


def plain() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], weights.Slots, weights.Schedule]:
    """Return a trainer's parameters, an engine's, and their plan."""
    source, model = {"w": torch.randn(64, 64)}, {"w": torch.zeros(64, 64)}

    def load(checkpoint: Any) -> None:
        for name, tensor in checkpoint:
            model[name].copy_(tensor)

    params = weights.describe(source, rank=0)
    slots = weights.record(model, weights.checkpoint(params), load=load)
    return source, model, slots, weights.plan(params, [slots])


def test_a_trainer_recovers_from_memory_that_was_short(monkeypatch: pytest.MonkeyPatch) -> None:
    source, model, slots, schedule = plain()
    network = pt.SimNetwork(seed=3)
    engines = [pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() for _ in range(2)]
    trainer = weights.Trainer(engines[0], schedule, 0, source, watermark_bytes=1)
    rollout = weights.Rollout(engines[1], slots, schedule, 0)
    offers = rollout.expect(1, {0: trainer.address()}, WAIT_S)

    def short(*_arguments: Any) -> Staging:
        raise MemoryError("out of memory")

    kept, works = source["w"], trainer._works
    with monkeypatch.context() as now:
        now.setattr(_trainer, "Staging", short)
        source["w"] = kept.to("meta")  # parts that lie elsewhere take memory
        for _ in range(2):
            with pytest.raises(MemoryError):
                trainer.publish(1, WAIT_S, offers=[offers[0]])
    assert trainer._works is works
    source["w"] = kept
    trainer.publish(1, WAIT_S, offers=[offers[0]])
    assert rollout.ready(WAIT_S)
    rollout.commit(1)
    assert torch.equal(model["w"], kept)
    for engine in engines:
        engine.close()


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    source, _, _, schedule = plain()
    source["w"] = SimpleNamespace(  # type: ignore[assignment]
        device=torch.device("cuda", 0), shape=(64, 64), dtype=torch.float32, element_size=lambda: 4
    )
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(_trainer, "tensors_of", lambda model: model)
    monkeypatch.setattr(_trainer, "Staging", lambda *arguments: asked.append(arguments[-1]))
    trainer = weights.Trainer(None, schedule, 0, source, device="cuda")  # type: ignore[arg-type]
    assert asked == [trainer.device] == [torch.device("cuda", 1)]
    # The parameter lies on another GPU, and has to be brought over.
    assert sum(part.num_bytes for work in trainer._works for part in work.parts) == 64 * 64 * 4
