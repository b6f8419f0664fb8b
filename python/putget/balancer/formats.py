"""Placements and counts as other programs write and read them.

| program | form |
|---|---|
| DeepSeek's EPLB | three int64 tensors: `to_deepseek`, `from_tables` |
| vLLM | the same, the second padded to a fixed width: `to_vllm`, `from_tables` |
| SGLang, ``--init-expert-location`` | JSON or .pt with ``physical_to_logical_map`` or ``logical_count`` |
| TensorRT-LLM, the load balancer's YAML | ``num_slots``, ``initial_global_assignments``, ``layer_updates_per_iter`` |
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from putget import _abi_balancer
from putget._arguments import as_array, as_count, as_kind, as_path
from putget.balancer.documents import entry, named, read_json, read_pt, read_yaml, rows, whole, writing
from putget.balancer.placement import Placement, as_load

PathLike = str | os.PathLike[str]
Tables = tuple[Tensor, Tensor, Tensor]
_PLACEMENT, _COUNT, _ASSIGNMENTS = "physical_to_logical_map", "logical_count", "initial_global_assignments"
_MOST_COUNT = 1 << 62
_MOST_NUMBER = (1 << 31) - 1


def to_deepseek(placement: Placement) -> Tables:
    """The tables that DeepSeek's ``rebalance_experts`` returns.

    Returns:
        int64 on the CPU: experts of the slots [num_layers, num_replicas]; slots of the experts
        [num_layers, num_experts, num_replicas - num_experts + 1], then -1; replicas of the experts
        [num_layers, num_experts].
    """
    as_kind("placement", placement, Placement)
    return to_vllm(placement, max_slots=placement.num_replicas - placement.num_experts + 1)


def to_vllm(placement: Placement, max_slots: int) -> Tables:
    """vLLM's ``physical_to_logical_map``, ``logical_to_physical_map`` and ``logical_replica_count``.

    Args:
        placement: what to convert.
        max_slots: width of the second one: the most replicas that vLLM's tensors have room for.

    Returns:
        int64 on the CPU, shapes as for `to_deepseek`, the second one max_slots wide.

    Raises:
        ValueError: An expert has more replicas.
    """
    width = as_kind("placement", placement, Placement).logical_to_physical.shape[2]
    max_slots = as_count("max_slots", max_slots, 1, _abi_balancer.MAX_SLOTS)
    if width > max_slots:
        raise ValueError(f"max_slots is {max_slots}, but an expert has {width} replicas")
    table = np.full((placement.num_layers, placement.num_experts, max_slots), -1, np.int64)
    table[..., :width] = placement.logical_to_physical
    return _int64(placement.physical_to_logical), torch.from_numpy(table), _int64(placement.replica_count)


def from_tables(physical_to_logical: Any, logical_to_physical: Any, replica_count: Any) -> Placement:
    """A placement from DeepSeek's or vLLM's three tables. An expert's slots may stand in any order.

    Raises:
        ValueError: The tables have other shapes or contradict each other; layer and expert are named.
    """
    count = as_array("replica_count", replica_count)
    if count.ndim != 2 or count.dtype.kind not in "iu":
        raise ValueError(
            f"replica_count is {count.dtype} {list(count.shape)}; it must be integers [num_layers, num_experts]"
        )
    given = as_array("logical_to_physical", logical_to_physical)
    if given.ndim != 3 or given.dtype.kind not in "iu":
        raise ValueError(
            f"logical_to_physical is {given.dtype} {list(given.shape)}; it must be integers "
            "[num_layers, num_experts, slots]"
        )
    num_experts = given.shape[1]
    placement = Placement.of(physical_to_logical, num_experts)
    wanted = (placement.num_layers, num_experts)
    if count.shape != wanted or given.shape[:2] != wanted:
        raise ValueError(
            f"replica_count is {list(count.shape)}, logical_to_physical {list(given.shape)}; "
            f"they must begin with {list(wanted)}"
        )
    for layer, expert in np.argwhere(count != placement.replica_count):
        slots = int(placement.replica_count[layer, expert])
        raise ValueError(
            f"replica_count: layer {layer}, expert {expert} has {count[layer, expert]}, but {slots} slots hold it"
        )
    ours = _sorted(placement.logical_to_physical)
    theirs = _sorted(given)[..., -ours.shape[2] :]
    differs = given.shape[2] < ours.shape[2] or (theirs != ours).any(axis=2) | ((given >= 0).sum(axis=2) != count)
    for layer, expert in np.argwhere(np.broadcast_to(differs, wanted)):
        raise ValueError(
            f"logical_to_physical: layer {layer}, expert {expert} has slots {given[layer, expert][:16].tolist()}, "
            f"but physical_to_logical has {placement.logical_to_physical[layer, expert].tolist()}"
        )
    return placement


def write_sglang(path: PathLike, placement: Placement) -> None:
    """Writes a file for SGLang's ``--init-expert-location``; the suffix, .json or .pt, says which kind.

    Raises:
        ValueError: The placement has empty slots, the suffix is another one, or the file cannot be written.
    """
    _write_sglang(path, _PLACEMENT, _full(placement))


def read_sglang(path: PathLike, num_experts: int) -> Placement:
    """Reads a placement from SGLang's JSON or .pt.

    Raises:
        ValueError: The file is missing or of another form; the message names the place in it.
    """
    num_experts = as_count("num_experts", num_experts, 1, _abi_balancer.MAX_SLOTS)
    table = _read_sglang(path, _PLACEMENT)
    with named(as_path("path", path)):
        return Placement.of(rows(_PLACEMENT, table), num_experts)


def write_sglang_count(path: PathLike, load: Any) -> None:
    """Writes tokens of each expert, [num_layers, num_experts], as SGLang's ``logical_count``.

    Raises:
        ValueError: The load is not of that shape, the suffix is neither .json nor .pt, or the file cannot be written.
    """
    loads = as_load(load, None, None)
    if loads.max(initial=0) >= _MOST_COUNT:
        raise ValueError(f"load is {loads.max():g} at most, allowed are numbers below {_MOST_COUNT:g}")
    _write_sglang(path, _COUNT, loads.astype(np.int64))


def read_sglang_count(path: PathLike) -> NDArray[np.int64]:
    """Reads SGLang's ``logical_count`` from JSON or .pt: [layers, experts], or [steps, layers, experts].

    Returns:
        int64 [num_layers, num_experts], the sum over the steps.

    Raises:
        ValueError: The file is missing or of another form.
    """
    counts = _read_sglang(path, _COUNT)
    with named(as_path("path", path)):
        found = as_array(_COUNT, counts)
        if found.ndim not in (2, 3) or found.dtype.kind not in "iuf" or 0 in found.shape:
            raise ValueError(f"{_COUNT} is {found.dtype} {list(found.shape)}; it must be [layers, experts] counts")
        steps = found.reshape(-1, *found.shape[-2:])
        for step in steps:
            as_load(step, None, None)
        if steps.astype(np.float64).sum(axis=0).max() >= _MOST_COUNT:
            raise ValueError(f"{_COUNT} is too large: its sum over the steps is {_MOST_COUNT:g} or more")
        count: NDArray[np.int64] = steps.astype(np.int64).sum(axis=0)
        return count


@dataclass(frozen=True)
class TensorRtLlm:
    """The content of TensorRT-LLM's load balancer file.

    Attributes:
        placement: ``initial_global_assignments``, layers in ascending order.
        layers: the model's numbers of these layers.
        layer_updates_per_iter: layers that are planned anew in each iteration; 0: the placement stays.
    """

    placement: Placement
    layers: tuple[int, ...]
    layer_updates_per_iter: int


def write_tensorrt_llm(
    path: PathLike, placement: Placement, *, first_layer: int = 0, layer_updates_per_iter: int = 0
) -> None:
    """Writes the YAML that TensorRT-LLM's ``moe_config.load_balancer`` names. It needs PyYAML.

    Args:
        path: where to.
        placement: the placement to begin with.
        first_layer: the model's number of the first layer with experts; the others follow it.
        layer_updates_per_iter: see `TensorRtLlm`.

    Raises:
        ValueError: The placement has empty slots, a number is out of range, or the file cannot be written.
    """
    import yaml

    target, slots = as_path("path", path), _full(placement)
    first_layer = as_count("first_layer", first_layer, 0, _MOST_NUMBER)
    layer_updates_per_iter = as_count("layer_updates_per_iter", layer_updates_per_iter, 0, _MOST_NUMBER)
    document = {
        "num_slots": placement.num_replicas,
        "layer_updates_per_iter": layer_updates_per_iter,
        "initial_global_assignments": {first_layer + layer: row.tolist() for layer, row in enumerate(slots)},
    }
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)
    with writing(target):
        target.write_text(text, encoding="utf-8")


def read_tensorrt_llm(path: PathLike, num_experts: int) -> TensorRtLlm:
    """Reads TensorRT-LLM's load balancer file. It needs PyYAML.

    Raises:
        ValueError: The file is missing, is not of this form, or its layers differ in their slots; the message names the
            place in it.
    """
    num_experts = as_count("num_experts", num_experts, 1, _abi_balancer.MAX_SLOTS)
    place = as_path("path", path)
    found = read_yaml(place)
    with named(place):
        return _tensorrt_llm(found, num_experts)


def _tensorrt_llm(found: Any, num_experts: int) -> TensorRtLlm:
    assignments = entry(found, _ASSIGNMENTS)
    num_slots = whole("num_slots", entry(found, "num_slots"), 1)
    if not isinstance(assignments, dict) or not assignments:
        raise ValueError(f"{_ASSIGNMENTS} assigns no layer")
    layers = sorted(whole(f"{_ASSIGNMENTS}: a layer", layer, 0) for layer in assignments)
    table = rows(_ASSIGNMENTS, [assignments[layer] for layer in layers], layers)
    for layer, row in zip(layers, table, strict=True):
        if len(row) != num_slots:
            raise ValueError(f"{_ASSIGNMENTS}: layer {layer} has {len(row)} slots, num_slots is {num_slots}")
    updates = whole("layer_updates_per_iter", found.get("layer_updates_per_iter", 0), 0)
    return TensorRtLlm(Placement.of(table, num_experts), tuple(layers), updates)


def _read_sglang(path: PathLike, key: str) -> Any:
    place = as_path("path", path)
    found = {".json": read_json, ".pt": read_pt}[_suffix(place)](place)
    with named(place):
        return entry(found, key)


def _write_sglang(path: PathLike, key: str, table: NDArray[Any]) -> None:
    place = as_path("path", path)
    suffix = _suffix(place)
    with writing(place):
        if suffix == ".json":
            place.write_text(json.dumps({key: table.tolist()}) + "\n", encoding="utf-8")
        else:
            torch.save({key: _int64(table)}, place)


def _suffix(path: Path) -> str:
    if path.suffix not in (".json", ".pt"):
        raise ValueError(f"{path} ends in {path.suffix!r}, allowed are .json and .pt")
    return path.suffix


def _full(placement: Placement) -> NDArray[np.int32]:
    """The slots, none of them empty: engines would take -1 for the last expert."""
    as_kind("placement", placement, Placement)
    for layer, slot in np.argwhere(placement.physical_to_logical < 0):
        raise ValueError(f"layer {layer}, slot {slot} is empty, which this file cannot say: plan without dead ranks")
    return placement.physical_to_logical


def _int64(table: NDArray[Any]) -> Tensor:
    return torch.from_numpy(table.astype(np.int64))


def _sorted(table: NDArray[Any]) -> NDArray[Any]:
    """Slots in ascending order behind the -1."""
    return np.sort(table, axis=2)
