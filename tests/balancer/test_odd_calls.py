"""Odd values for every argument of the planner and its neighbours: a ValueError with the argument's name, or sense.

Each target is a call with good arguments. Each argument in turn gets each odd value. A call may accept a value only if
the argument's kind says that the value means something.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import putget
from putget.balancer import (
    BalancedLayer,
    Balancer,
    ExpertBlobs,
    LoadGathering,
    LoadHistory,
    Placement,
    ReplicaChoice,
    RoutingRecorder,
    formats,
    rebalance,
)
from putget.balancer.schedule import batches
from tests.balancer.online import options_of
from tests.harness import Rank, run_ranks

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")


class Odd:
    """An object of no use to anybody."""

    def __repr__(self) -> str:
        return "an odd object"


def odd_values() -> list[Any]:
    """Made anew for each argument: some of them are used up."""
    scalars: list[Any] = [
        None,
        True,
        False,
        0,
        -1,
        1.5,
        2.0,
        NAN,
        INF,
        -INF,
        1 << 20,
        1 << 40,
        10**30,
        10**400,
        -(1 << 31),
    ]
    others: list[Any] = [
        "",
        "x",
        "2",
        b"2",
        1j,
        [],
        (),
        {},
        set(),
        [1],
        [[1, 2], [3]],
        [[[1], [2]], [3]],
        [None],
        {"a": 1},
    ]
    others += [Odd(), Odd, len, range(3), iter([1, 2]), Path("x"), "a\0b", [Odd()], "cuda:99", "meta", "\ud800"]
    numpy: list[Any] = [np.int64(2), np.int8(-1), np.uint64(1 << 63), np.float32(2.5), np.float64(NAN), np.bool_(True)]
    numpy += [np.zeros(0), np.zeros((0, 0)), np.zeros((2, 3, 4)), np.zeros((2, 16), bool), np.zeros((2, 16), complex)]
    numpy += [np.full((2, 16), NAN), np.full((2, 16), INF), np.full((2, 16), -1.0), np.full((2, 16), 1e308)]
    numpy += [np.full((2, 16), "x"), np.full((2, 16), None), np.array(2), np.zeros((2, 16), "datetime64[s]")]
    numpy += [np.full((2, 16), 1 << 63, np.uint64), np.ones((2, 16), np.float16), np.ones((16, 2)).T, np.arange(20)]
    tensors: list[Any] = [torch.tensor(2), torch.tensor(2.5), torch.tensor([2]), torch.zeros(0), torch.zeros(2, 16, 1)]
    tensors += [
        torch.ones(2, 16, dtype=torch.bfloat16),
        torch.ones(2, 16, requires_grad=True),
        torch.ones(2, 16).bool(),
    ]
    tensors += [
        torch.zeros(2, 16, device="meta"),
        torch.ones(2, 16).to_sparse(),
        torch.zeros(2, 16, dtype=torch.cfloat),
    ]
    tensors += [torch.zeros(4, 2, dtype=torch.int16), torch.zeros(2, 4, dtype=torch.int32).T, torch.zeros(4, 2).int()]
    tensors += [
        torch.zeros(2, 16, dtype=torch.float8_e4m3fn),
        torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
    ]
    return scalars + others + numpy + tensors


def is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    kinds = int | float | np.integer | np.floating
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def is_load(value: Any) -> bool:
    """Finite numbers from 0 on, one row a layer."""
    array = numbers(value)
    return array is not None and array.ndim in (1, 2) and bool(np.isfinite(array).all()) and bool((array >= 0).all())


def is_table(value: Any) -> bool:
    array = numbers(value)
    return array is not None and array.ndim in (1, 2) and array.dtype.kind in "iu"


def numbers(value: Any) -> np.ndarray[Any, Any] | None:
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().float().numpy() if value.is_floating_point() else value.numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array if array.dtype.kind in "iuf" else None


def is_none(value: Any) -> bool:
    return value is None


def is_path(value: Any) -> bool:
    return isinstance(value, str | Path)


def is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device | int)


def never(_: Any) -> bool:
    return False


def ints_in(value: Any) -> bool:
    return isinstance(value, list | tuple | set | dict | range | np.ndarray | torch.Tensor) or hasattr(
        value, "__next__"
    )


def either(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(kind(value) for kind in kinds)


@dataclass
class Target:
    """A call, good arguments, and which odd values each of them may take."""

    call: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, Callable[[Any], bool]]
    also: dict[str, str] = field(default_factory=dict)  # other names that messages use for an argument


PLACEMENT = Placement.of(np.tile(np.arange(20) % 16, (2, 1)), 16)
OPTIONAL_INT = either(is_none, is_int)


def plans() -> dict[str, Target]:
    sizes: dict[str, Any] = {"num_replicas": 20, "num_groups": 1, "num_nodes": 1, "num_gpus": 4}
    more: dict[str, Any] = {
        "previous": PLACEMENT,
        "max_moves": 3,
        "min_gain": 0.1,
        "dead_ranks": (),
        "host_store": False,
    }
    kinds = dict.fromkeys(sizes, is_int) | {"load": is_load, "previous": is_none, "max_moves": OPTIONAL_INT}
    kinds |= {"min_gain": either(is_none, is_number), "dead_ranks": either(is_none, ints_in), "host_store": is_flag}
    scores = {"load": is_load, "num_gpus": is_int}
    return {
        "rebalance": Target(
            rebalance, {"load": np.ones((2, 16)), **sizes, **more}, kinds, {"previous": "without prev"}
        ),
        "Placement.of": Target(
            Placement.of,
            {"physical_to_logical": [[0, 1, 2, 0]], "num_experts": 3},
            {"physical_to_logical": is_table, "num_experts": is_int},
            {"num_experts": "physical_to_logical"},
        ),
        "rank_loads": Target(PLACEMENT.rank_loads, {"load": np.ones((2, 16)), "num_gpus": 4}, scores),
        "imbalance": Target(PLACEMENT.imbalance, {"load": np.ones((2, 16)), "num_gpus": 4}, scores),
        "moves_from": Target(
            PLACEMENT.moves_from, {"previous": PLACEMENT, "num_gpus": 4}, {"previous": never, "num_gpus": is_int}
        ),
        "batches": Target(
            lambda **words: list(batches(**words)),
            {"current": PLACEMENT, "target": PLACEMENT, "num_gpus": 4, "cells": 2},
            {"current": never, "target": never, "num_gpus": is_int, "cells": is_int},
        ),
    }


def histories() -> dict[str, Target]:
    def add(load: Any) -> None:
        history = LoadHistory()
        history.add(np.ones((2, 16)))
        before = history.load
        try:
            history.add(load)
        except ValueError:
            assert np.array_equal(history.load, before)
            raise
        assert np.isfinite(history.load).all()

    return {
        "LoadHistory": Target(LoadHistory, {"window": 3, "decay": 0.5}, {"window": OPTIONAL_INT, "decay": is_number}),
        "LoadHistory.add": Target(add, {"load": np.ones((2, 16))}, {"load": is_load}),
        "LoadGathering": Target(
            LoadGathering,
            {"loads": [torch.zeros(4).int()], "ep_size": 2, "num_stats": 4, "interval": 2, "device": CPU},
            {"loads": never, "ep_size": is_int, "num_stats": is_int, "interval": is_int, "device": never},
            {"loads": "expert_load"},
        ),
    }


def choices() -> dict[str, Target]:
    good: dict[str, Any] = {"placement": PLACEMENT, "layer": 0, "how": "hash", "ep_size": 4, "ep_rank": 0}
    good |= {"ranks_per_node": 2, "device": "cpu", "max_replicas": 3}
    kinds = {"placement": never, "layer": is_int, "how": never, "ep_size": is_int, "ep_rank": is_int}
    kinds |= {"ranks_per_node": OPTIONAL_INT, "device": is_device, "max_replicas": OPTIONAL_INT}
    choice = ReplicaChoice(**good)
    of_layer = {"placement": PLACEMENT, "layer": 1}
    ids = torch.zeros(4, 2, dtype=torch.int32)
    call = {"topk_ids": ids, "out": torch.zeros_like(ids), "seed": 1, "num_valid_tokens": torch.ones(1).int()}
    is_ids = lambda v: isinstance(v, torch.Tensor) and v.dtype in (torch.int32, torch.int64)  # noqa: E731
    return {
        "ReplicaChoice": Target(ReplicaChoice, good, kinds),
        "set_placement": Target(choice.set_placement, of_layer, {"placement": never, "layer": is_int}),
        "tables_of": Target(choice.tables_of, of_layer, {"placement": never, "layer": is_int}),
        "choice": Target(
            choice,
            call,
            {"topk_ids": is_ids, "out": either(is_none, is_ids), "seed": is_int, "num_valid_tokens": is_none},
            {"topk_ids": "out is", "out": "topk_ids"},
        ),
    }


def recorders(folder: Path) -> dict[str, Target]:
    recorder = RoutingRecorder(1, 2, 16)
    recorder.record(0, torch.zeros(4, 2, dtype=torch.int32))

    def save(path: Any, task: Any) -> None:
        if isinstance(path, str | Path) and "\0" not in str(path):
            path = folder / str(path)
        (folder / "x").unlink(missing_ok=True)
        recorder.save(path, task)

    is_ids = lambda v: isinstance(v, torch.Tensor) and v.dtype in (torch.int32, torch.int64)  # noqa: E731
    return {
        "RoutingRecorder": Target(
            RoutingRecorder,
            {"num_layers": 1, "top_k": 2, "max_tokens": 8, "num_experts": 4, "device": "cpu"},
            {"num_layers": is_int, "top_k": is_int, "max_tokens": is_int, "num_experts": OPTIONAL_INT}
            | {"device": is_device},
        ),
        "record": Target(
            RoutingRecorder(2, 2, 16).record,
            {"layer": 0, "topk_ids": torch.zeros(4, 2).int(), "num_valid_tokens": torch.ones(1).int()},
            {"layer": is_int, "topk_ids": is_ids, "num_valid_tokens": is_none},
        ),
        "of_layer": Target(RoutingRecorder(1, 2, 16).of_layer, {"layer": 0}, {"layer": is_int}),
        "save": Target(
            save,
            {"path": "y.npz", "task": "law"},
            {"path": is_path, "task": lambda v: isinstance(v, str)},
            {"path": ""},
        ),
    }


def files(folder: Path) -> dict[str, Target]:
    formats.write_sglang(folder / "a.json", PLACEMENT)
    formats.write_sglang_count(folder / "count.json", np.ones((2, 16)))
    formats.write_tensorrt_llm(folder / "a.yaml", PLACEMENT)
    tables = dict(
        zip(
            ("physical_to_logical", "logical_to_physical", "replica_count"), formats.to_deepseek(PLACEMENT), strict=True
        )
    )
    read = {"path": either(is_path), "num_experts": is_int}
    return {
        "to_deepseek": Target(formats.to_deepseek, {"placement": PLACEMENT}, {"placement": never}),
        "to_vllm": Target(
            formats.to_vllm, {"placement": PLACEMENT, "max_slots": 3}, {"placement": never, "max_slots": is_int}
        ),
        "from_tables": Target(formats.from_tables, tables, dict.fromkeys(tables, never)),
        "write_sglang": Target(
            formats.write_sglang,
            {"path": folder / "b.json", "placement": PLACEMENT},
            {"path": never, "placement": never},
            {"path": " ends in "},
        ),
        "read_sglang": Target(
            formats.read_sglang,
            {"path": folder / "a.json", "num_experts": 16},
            read,
            {"path": " ends in ", "num_experts": "experts below"},
        ),
        "write_sglang_count": Target(
            formats.write_sglang_count,
            {"path": str(folder / "c.pt"), "load": np.ones((2, 16))},
            {"path": never, "load": is_load},
            {"path": " ends in "},
        ),
        "read_sglang_count": Target(
            formats.read_sglang_count, {"path": folder / "count.json"}, {"path": never}, {"path": " ends in "}
        ),
        "write_tensorrt_llm": Target(
            formats.write_tensorrt_llm,
            {"path": folder / "b.yaml", "placement": PLACEMENT, "first_layer": 0, "layer_updates_per_iter": 1},
            {"path": is_path, "placement": never, "first_layer": is_int, "layer_updates_per_iter": is_int},
        ),
        "read_tensorrt_llm": Target(
            formats.read_tensorrt_llm,
            {"path": folder / "a.yaml", "num_experts": 16},
            {"path": is_path, "num_experts": is_int},
            {"path": "cannot be read", "num_experts": "experts below"},
        ),
    }


def blobs() -> dict[str, Target]:
    made = ExpertBlobs({"weight": torch.zeros(4, 8)})
    packed = torch.zeros(made.slot_bytes, dtype=torch.uint8)
    return {
        "ExpertBlobs": Target(
            ExpertBlobs,
            {"tensors": {"weight": torch.zeros(4, 8)}, "module": torch.nn.Linear(2, 2), "shared": ()},
            {"tensors": never, "module": is_none, "shared": ints_in},
            {"tensors": "tensor"},
        ),
        "pack": Target(made.pack, {"slot": 1, "out": packed}, {"slot": is_int, "out": is_none}),
        "unpack": Target(made.unpack, {"slot": 1, "packed": packed}, {"slot": is_int, "packed": never}),
    }


def faults(name: str, target: Target) -> Iterator[str]:
    """The mistakes for each odd value of each argument."""
    target.call(**target.good)
    for argument, kind in target.kinds.items():
        names = [argument, *([target.also[argument]] if argument in target.also else [])]
        for value in odd_values():
            said = f"{name}({argument}={type(value).__name__} {describe(value)})"
            try:
                target.call(**{**target.good, argument: value})
            except ValueError as error:
                if not any(one in str(error) for one in names):
                    yield f"{said} does not name it: {error}"
            except putget.BackendUnavailable:
                if "device" not in argument:
                    yield f"{said} is no device"
            except Exception as error:
                yield f"{said} raises {type(error).__name__}: {error}"
            else:
                if not kind(value):
                    yield f"{said} is accepted"


def describe(value: Any) -> str:
    try:
        return repr(value)[:60].replace("\n", " ")
    except ValueError:
        return "that has no repr"


def check(targets: dict[str, Target]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = [fault for name, target in targets.items() for fault in faults(name, target)]
    assert not found, f"{len(found)} faults:\n" + "\n".join(found)


def test_plans() -> None:
    check(plans())


def test_histories() -> None:
    check(histories())


def test_choices() -> None:
    check(choices())


def test_recorders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(recorders(tmp_path))


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml", reason="needs PyYAML")
    monkeypatch.chdir(tmp_path)
    check(files(tmp_path))


def test_blobs() -> None:
    check(blobs())


# --- objects of a group, of one rank here -----------------------------------------------------------------------------


def expert_major(rank: Rank) -> None:
    """A body: arguments of expert-major rows."""
    row = putget.Payload((4,), torch.float32)
    sizes: dict[str, Any] = {"num_experts": 3, "top_k": 2, "max_tokens_per_rank": 8, "payloads": [row], "output": row}
    with rank.all_to_all(**sizes) as a2a:
        ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
        received = a2a.dispatch(ids, weights, torch.ones(3, 4), max_rows=4)
        memory = a2a.expert_major_memory(2, 4)
        layout = received.expert_major(2)
        rows = torch.zeros(layout.capacity, 4)
        check(
            {
                "expert_major_memory": Target(
                    a2a.expert_major_memory,
                    {"alignment": 2, "max_rows": 4, "copy_rows": True},
                    {"alignment": is_int, "max_rows": OPTIONAL_INT, "copy_rows": is_flag},
                ),
                "expert_major": Target(
                    received.expert_major,
                    {"alignment": 2, "copy_rows": True, "memory": memory},
                    {"alignment": is_int, "copy_rows": is_flag, "memory": is_none},
                    {"alignment": "memory is made for", "copy_rows": "memory is made for"},
                ),
            }
        )
        for value in odd_values():
            if value is not None:
                with pytest.raises(ValueError, match="layout"):
                    a2a.combine(rows, layout=value)
        a2a.combine(rows, layout=received.expert_major(2))


def balancers(rank: Rank) -> None:
    """A body: arguments of a Balancer."""
    placement = Placement.of([[0, 1, 2, 0]], 3)
    choose = ReplicaChoice(placement, ep_size=1)
    load = torch.zeros(3, dtype=torch.int32)
    layer = BalancedLayer(ExpertBlobs({"w": torch.zeros(4, 4)}), load, choose.tables, choose.tables_of)

    def make(**words: Any) -> None:
        Balancer(rank.comm, **options_of(**words)).close()

    ints = {"carrier": 0, "num_stats": 8, "interval": 2, "num_groups": 1, "num_nodes": 1, "max_moves": 2, "cells": 2}
    ints |= {"num_sms": 2, "most_bytes": 64}
    good: dict[str, Any] = {
        "layers": [layer],
        "placement": placement,
        **ints,
        "history": LoadHistory(),
        "min_gain": 0.1,
    }
    good |= {"mover": "kernel", "store": None, "in_thread": False, "device": "cpu", "timeout_s": 5.0}
    kinds = dict.fromkeys(ints, is_int) | {"max_moves": OPTIONAL_INT, "history": is_none, "mover": never}
    kinds |= {"layers": never, "placement": never, "store": is_none, "in_thread": is_flag, "device": is_device}
    kinds |= {"min_gain": either(is_none, is_number), "timeout_s": is_number}
    check({"Balancer": Target(make, good, kinds)})


@pytest.mark.parametrize("body", [expert_major, balancers])
def test_objects_of_a_group(body: Callable[[Rank], None]) -> None:
    run_ranks(1, body, mode="thread", timeout=120)
