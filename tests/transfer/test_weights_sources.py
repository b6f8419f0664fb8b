"""Parameters that are written from where they lie: which ones, the same bytes, and nothing held behind an update."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import torch

import putget_transfer as pt
from putget_transfer import weights
from putget_transfer.weights import _pipeline, _rollout, _trainer
from putget_transfer.weights._prepare import Preparer
from putget_transfer.weights._sources import Sources
from putget_transfer.weights._staging import Writes

WAIT_S = 60.0


class Pair:
    """A trainer and a rollout rank on one simulated network; `load` fills `model` from a checkpoint."""

    def __init__(self, source: dict[str, torch.Tensor], model: dict[str, torch.Tensor], load: Any, **options: Any):
        params = weights.describe(source, rank=0)
        slots = weights.record(model, weights.checkpoint(params), load=load)
        schedule = weights.plan(params, [slots], task_bytes=20_000)
        self.network = pt.SimNetwork(seed=3)
        self.engines = [pt.Engine.builder().group(pt.DeviceGroup.sim(self.network, 1)).build() for _ in range(2)]
        self.source, self.model = source, model
        self.trainer = weights.Trainer(self.engines[0], schedule, 0, source, **options)
        self.rollout = weights.Rollout(self.engines[1], slots, schedule, 0)
        self.version = 0

    def update(self, wait_s: float = WAIT_S) -> Any:
        """Publish the next version; return the trainer's report."""
        self.version += 1
        offers = self.rollout.expect(self.version, {0: self.trainer.address()}, WAIT_S)
        return self.trainer.publish(self.version, wait_s, offers=[offers[0]])

    def commit(self) -> None:
        """Bring the version into force."""
        assert self.rollout.ready(WAIT_S)
        self.rollout.commit(self.version)

    def close(self) -> None:
        """End the engines."""
        for engine in self.engines:
            engine.close()


def whole(model: dict[str, torch.Tensor]) -> Any:
    """Return a loader that copies each parameter as it is."""

    def load(checkpoint: Any) -> None:
        for name, tensor in checkpoint:
            model[name].copy_(tensor)

    return load


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the works that are prepared from now on."""
    works, prepare = [], Preparer.prepare

    def noted(self: Preparer, work: Any, memory: Any) -> Any:
        works.append(work)
        return prepare(self, work, memory)

    monkeypatch.setattr(Preparer, "prepare", noted)
    return works


def test_what_travels_as_it_is_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also parameters that lie in one storage, in the middle of another one, and that have moved since."""
    both, wide = bf16(200, 300), bf16(50, 400)
    source = {"a": both[:80], "b": both[80:], "c": wide[10:30], "d": bf16(7), "e": torch.randn(40, 30)}
    model = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    pair, works = Pair(source, model, whole(model)), prepared(monkeypatch)
    for step in range(3):
        for tensor in source.values():
            tensor.add_(1)
        if step == 1:
            source["d"].data = bf16(7)
        report = pair.update()
        pair.commit()
        assert report.num_bytes == sum(tensor.nbytes for tensor in source.values())
        for name, tensor in source.items():
            assert torch.equal(model[name], tensor), name
    assert works == []
    pair.close()


def test_what_has_to_be_made_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns, another type, and a parameter that is not contiguous."""
    source = {"columns": bf16(40, 64), "type": torch.randn(30, 20), "turned": bf16(24, 32).t()}
    model = {"half": torch.zeros(40, 32).bfloat16(), "type": torch.zeros(30, 20).bfloat16(), "turned": bf16(32, 24)}

    def load(checkpoint: Any) -> None:
        for name, tensor in checkpoint:
            model["half" if name == "columns" else name].copy_(tensor[:, 32:] if name == "columns" else tensor)

    pair, works = Pair(source, model, load), prepared(monkeypatch)
    pair.update()
    pair.commit()
    assert torch.equal(model["half"], source["columns"][:, 32:])
    assert torch.equal(model["type"], source["type"].bfloat16())
    assert torch.equal(model["turned"], source["turned"])
    assert len(works) == len(pair.trainer.tasks)
    pair.close()


class Wrapped(torch.Tensor):
    """A tensor whose values are those of another one: it has no storage."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = torch.utils._pytree.tree_map_only(cls, lambda one: one.held, args)
        made = func(*bare, **(kwargs or {}))
        return cls(made) if isinstance(made, torch.Tensor) and func is not torch.ops.aten.copy_.default else made


def test_storages_that_begin_at_one_address_and_tensors_whose_bytes_are_not_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = bytearray(16384)
    source = {
        "short": torch.frombuffer(room, dtype=torch.float32, count=64),
        "long": torch.frombuffer(room, dtype=torch.float32, count=4096),
        "negated": torch._neg_view(torch.ones(64)),
        "wrapped": Wrapped(torch.randn(40)),
    }
    source["long"].copy_(torch.randn(4096))
    model = {name: torch.zeros(tensor.shape) for name, tensor in source.items()}
    pair, works = Pair(source, model, whole(model)), prepared(monkeypatch)
    pair.update()
    pair.commit()
    for name, tensor in source.items():
        assert torch.equal(model[name], getattr(tensor, "held", tensor)), name
    made = {pair.trainer.schedule.params[part.param][0] for work in works for part in work.parts}
    assert {"negated", "wrapped"} <= made
    pair.close()


def test_many_tasks_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pipeline, "MOST_SENT", 2)
    source = {f"w{at}": bf16(80, 100) for at in range(20)}
    model = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    pair, most = Pair(source, model, whole(model)), []
    begin = Writes.begin

    def counted(self: Writes, piece: int | None) -> None:
        begin(self, piece)
        most.append(len(self.sent))

    monkeypatch.setattr(Writes, "begin", counted)
    pair.update()
    pair.commit()
    assert all(torch.equal(model[name], tensor) for name, tensor in source.items())
    assert len(most) == len(pair.trainer.tasks) > 10
    assert max(most) == 2
    pair.close()


def test_deltas_compare_prepared_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"a": bf16(80, 30)}
    model = {"a": torch.zeros(80, 30).bfloat16()}
    pair, works = Pair(source, model, whole(model), deltas=True), prepared(monkeypatch)
    pair.update()
    pair.commit()
    assert torch.equal(model["a"], source["a"])
    assert len(works) == len(pair.trainer.tasks)
    pair.close()


def test_nothing_is_held_behind_an_update() -> None:
    """torch refuses to resize a storage that is registered; trainers resize theirs between steps."""
    source = {"a": bf16(80, 30), "b": bf16(50, 30)}
    model = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    pair = Pair(source, model, whole(model))
    pair.update()
    source["a"].untyped_storage().resize_(0)
    source["a"].untyped_storage().resize_(80 * 30 * 2)
    source["a"].copy_(bf16(80, 30))
    pair.commit()
    pair.network.kill(pair.engines[1].main_address())
    report = pair.update(wait_s=1.0)
    assert set(report.failed) == {0}
    for tensor in source.values():
        tensor.untyped_storage().resize_(0)
    pair.close()


class Pinning:
    """An engine whose network pins what is registered."""

    def main_address(self) -> Any:
        return SimpleNamespace(providers=["host", "verbs"])

    def reg_mrs(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is registered")

    def dereg_mrs(self, handles: list[Any]) -> None:
        assert handles == []


class Refusing:
    """An engine that cannot register memory of some lengths, alone or among others."""

    def __init__(self, engine: pt.Engine, lengths: set[int]) -> None:
        self.engine, self.lengths = engine, lengths

    def main_address(self) -> Any:
        return self.engine.main_address()

    def reg_mrs(self, memory: list[Any], *, read_only: bool) -> Any:
        if any(one.nbytes in self.lengths for one in memory):
            raise pt.EngineError("memory of another allocator")
        return self.engine.reg_mrs(memory, read_only=read_only)

    def dereg_mrs(self, handles: list[Any]) -> None:
        self.engine.dereg_mrs(handles)


def test_where_registering_pins_or_fails_parts_are_copied() -> None:
    source = {"a": bf16(80, 30), "b": bf16(300, 30), "c": bf16(80, 40)}
    model = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    pair = Pair(source, model, whole(model))
    trainer = pair.trainer
    pinning: Any = Pinning()
    refusing: Any = Refusing(pair.engines[0], {source["b"].nbytes})
    unready, some, found = (Sources(one, trainer._lying, source) for one in (pinning, refusing, pair.engines[0]))
    for one in (unready, some, found):
        one.look_up()
    refused = 0
    for number, task in enumerate(trainer.tasks):
        has_refused = any(trainer.params[item[0]][0] == "b" for item in task.items)
        refused += has_refused
        assert unready.of(number) is None
        assert (some.of(number) is None) == has_refused
        assert found.of(number) is not None
    assert 0 < refused < len(trainer.tasks)
    for one in (unready, some, found):
        one.close()
    pair.close()


class Counting:
    """An engine whose calls are counted."""

    def __init__(self, engine: pt.Engine, calls: Counter[str]) -> None:
        self.engine, self.calls = engine, calls

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.engine, name)


def test_a_second_update_does_not_do_again_what_the_first_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what follows from the plan alone, nor one call of the engine for each parameter."""
    source = {f"w{at}": bf16(16, 100) for at in range(100)}
    model = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        kept = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return kept(*arguments, **named)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in ((_trainer, "work_of"), (_trainer, "Lying"), (_trainer, "_planned"), (_rollout, "Copies")):
        count(owner, name)
    count(_rollout, "descs_for")
    monkeypatch.setattr(_trainer, "Sources", lambda engine, *rest: Sources(Counting(engine, calls), *rest))  # type: ignore
    pair = Pair(source, model, whole(model))
    num_tasks = len(pair.trainer.tasks)
    assert 1 < num_tasks < len(source)
    planned = {"work_of": num_tasks, "Lying": 1, "_planned": 1, "Copies": 1}
    assert calls == planned
    for _ in range(2):
        calls.clear()
        pair.update()
        pair.commit()
        assert calls == {"descs_for": 1, "main_address": 1, "reg_mrs": 1, "dereg_mrs": 1}
        assert all(torch.equal(model[name], tensor) for name, tensor in source.items())
        for tensor in source.values():
            tensor.add_(1)
    pair.close()


OTHERWISE = {
    "turned": lambda: bf16(32, 24).t(),
    "negated": lambda: torch._neg_view(bf16(24, 32)),
    "wrapped": lambda: Wrapped(bf16(24, 32)),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_parameter_that_lies_otherwise_than_before_is_prepared(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"a": bf16(24, 32)}
    model = {"a": torch.zeros_like(source["a"])}
    pair, works = Pair(source, model, whole(model)), prepared(monkeypatch)
    for tensor, num_prepared in ((source["a"], 0), (OTHERWISE[how](), 1), (bf16(24, 32), 1)):
        source["a"] = tensor
        pair.update()
        pair.commit()
        assert torch.equal(model["a"], getattr(tensor, "held", tensor))
        assert len(works) == num_prepared
    pair.close()
