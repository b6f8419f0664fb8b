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
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from putget.balancer.placement import Placement, as_load

Made = TypeVar("Made")
Tables = tuple[Tensor, Tensor, Tensor]
_PLACEMENT, _COUNT = "physical_to_logical_map", "logical_count"


def to_deepseek(placement: Placement) -> Tables:
    """The tables that DeepSeek's ``rebalance_experts`` returns.

    Returns:
        int64 on the CPU: experts of the slots [num_layers, num_replicas]; slots of the experts
        [num_layers, num_experts, num_replicas - num_experts + 1], then -1; replicas of the experts
        [num_layers, num_experts].
    """
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
    width = placement.logical_to_physical.shape[2]
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
    count = np.asarray(replica_count)
    if count.ndim != 2:
        raise ValueError(f"replica_count is {list(count.shape)}; it must be [num_layers, num_experts]")
    given = np.asarray(logical_to_physical)
    num_experts = given.shape[1] if given.ndim == 3 else count.shape[1]
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


def write_sglang(path: Path, placement: Placement) -> None:
    """Writes a file for SGLang's ``--init-expert-location``; the suffix, .json or .pt, says which kind.

    Raises:
        ValueError: The placement has empty slots, or the suffix is another one.
    """
    _write_sglang(path, _PLACEMENT, _full(placement))


def read_sglang(path: Path, num_experts: int) -> Placement:
    """Reads a placement from SGLang's JSON or .pt.

    Raises:
        ValueError: The file is missing or of another form.
    """
    return _named(path, lambda: Placement.of(_read_sglang(path, _PLACEMENT), num_experts))


def write_sglang_count(path: Path, load: Any) -> None:
    """Writes tokens of each expert, [num_layers, num_experts], as SGLang's ``logical_count``.

    Raises:
        ValueError: The load is not of that shape, or the suffix is neither .json nor .pt.
    """
    _write_sglang(path, _COUNT, as_load(load, None, None).astype(np.int64))


def read_sglang_count(path: Path) -> NDArray[np.int64]:
    """Reads SGLang's ``logical_count`` from JSON or .pt: [layers, experts], or [steps, layers, experts].

    Returns:
        int64 [num_layers, num_experts], the sum over the steps.

    Raises:
        ValueError: The file is missing or of another form.
    """
    found = np.asarray(_read_sglang(path, _COUNT))
    if found.ndim not in (2, 3) or found.dtype.kind not in "iuf":
        raise ValueError(f"{path}: {_COUNT} is {found.dtype} {list(found.shape)}; it must be [layers, experts] counts")
    count: NDArray[np.int64] = found.reshape(-1, *found.shape[-2:]).sum(axis=0).astype(np.int64)
    return count


@dataclass(frozen=True)
class TensorRtLlm:
    """What TensorRT-LLM's load balancer file has.

    Attributes:
        placement: ``initial_global_assignments``, layers in ascending order.
        layers: the model's numbers of these layers.
        layer_updates_per_iter: layers that are planned anew in each iteration; 0: the placement stays.
    """

    placement: Placement
    layers: tuple[int, ...]
    layer_updates_per_iter: int


def write_tensorrt_llm(
    path: Path, placement: Placement, *, first_layer: int = 0, layer_updates_per_iter: int = 0
) -> None:
    """Writes the YAML that TensorRT-LLM's ``moe_config.load_balancer`` names. It needs PyYAML.

    Args:
        path: where to.
        placement: the placement to begin with.
        first_layer: the model's number of the first layer with experts; the others follow it.
        layer_updates_per_iter: see `TensorRtLlm`.

    Raises:
        ValueError: The placement has empty slots.
    """
    import yaml

    slots = _full(placement)
    document = {
        "num_slots": placement.num_replicas,
        "layer_updates_per_iter": layer_updates_per_iter,
        "initial_global_assignments": {first_layer + layer: row.tolist() for layer, row in enumerate(slots)},
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8")


def read_tensorrt_llm(path: Path, num_experts: int) -> TensorRtLlm:
    """Reads TensorRT-LLM's load balancer file. It needs PyYAML.

    Raises:
        ValueError: The file is missing, is not of this form, or its layers differ in their slots.
    """
    import yaml

    try:
        found = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    return _named(path, lambda: _tensorrt_llm(found, num_experts))


def _tensorrt_llm(found: Any, num_experts: int) -> TensorRtLlm:
    assignments = _entry(found, "initial_global_assignments")
    num_slots = _entry(found, "num_slots")
    if not isinstance(assignments, dict) or not assignments:
        raise ValueError("initial_global_assignments assigns no layer")
    layers = sorted(assignments)
    for layer in layers:
        if len(assignments[layer]) != num_slots:
            raise ValueError(f"layer {layer} has {len(assignments[layer])} slots, num_slots is {num_slots}")
    placement = Placement.of([assignments[layer] for layer in layers], num_experts)
    return TensorRtLlm(placement, tuple(layers), int(found.get("layer_updates_per_iter", 0)))


def _named(path: Path, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _entry(found: Any, key: str) -> Any:
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not names and values")
    if key not in found:
        raise ValueError(f"it has no {key!r}; it has {', '.join(map(str, found)) or 'nothing'}")
    return found[key]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_sglang(path: Path, key: str) -> Any:
    if path.suffix == ".json":
        try:
            found = json.loads(_text(path))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    elif path.suffix == ".pt":
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} cannot be read as .pt: {error}") from error
    else:
        raise ValueError(f"{path} ends in {path.suffix!r}, allowed are .json and .pt")
    return _named(path, lambda: _entry(found, key))


def _write_sglang(path: Path, key: str, table: NDArray[Any]) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps({key: table.tolist()}) + "\n", encoding="utf-8")
    elif path.suffix == ".pt":
        torch.save({key: _int64(table)}, path)
    else:
        raise ValueError(f"{path} ends in {path.suffix!r}, allowed are .json and .pt")


def _full(placement: Placement) -> NDArray[np.int32]:
    """The slots, none of them empty: engines would take -1 for the last expert."""
    for layer, slot in np.argwhere(placement.physical_to_logical < 0):
        raise ValueError(f"layer {layer}, slot {slot} is empty, which this file cannot say: plan without dead ranks")
    return placement.physical_to_logical


def _int64(table: NDArray[Any]) -> Tensor:
    return torch.from_numpy(table.astype(np.int64))


def _sorted(table: NDArray[Any]) -> NDArray[Any]:
    """Slots in ascending order behind the -1."""
    return np.sort(table, axis=2)
