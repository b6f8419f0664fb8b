"""Parameters of trainers and needs of rollout ranks: plain values, which can be sent to the planner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from putget_transfer._native import EngineError


class UpdateFailed(EngineError):
    """An update did not become whole.

    Attributes:
        missing: The ranks and replicas that are to blame, by name.
    """

    def __init__(self, text: str, missing: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.missing = list(missing)


@dataclass(frozen=True)
class Shard:
    """A part of a tensor: its first element and its size in each dimension, and the trainer ranks that hold it."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a tensor is divided over trainer ranks. Parameters that lie alike share it.

    Attributes:
        shards: Parts that have no element in common and are the whole tensor together.
        group: The mesh group: parameters of one mesh and placements move together, mesh groups one after the other.
        gathers: Whether all holders together can bring the whole tensor together on each of them (`full_tensor`).
    """

    shards: tuple[Shard, ...]
    group: str = "whole"
    gathers: bool = False


@dataclass(frozen=True)
class Param:
    """A parameter of the checkpoint, as the trainers hold it. `dtype` is torch's name without "torch."."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout


@dataclass(frozen=True)
class Slot:
    """A part of a parameter in a rollout rank's memory. Element `start + i` lies at `offset + i . strides`.

    Attributes:
        name: The parameter's name.
        start: The part's first element; in the grid of blocks, if the recipe makes scales.
        size: Its size in each dimension.
        memory: The memory that it lies in, by its place in the rank's list.
        offset: Bytes before its first element.
        strides: Bytes from one element to the next, in each dimension.
        dtype: The type in that memory.
        recipe: "copy" (rounded to `dtype`), "fp8_float32" or "fp8_ue8m0" (FP8 values of blocks of 128 x 128), or
            "fp8_float32_scale" or "fp8_ue8m0_scale" (the blocks' scales).
    """

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    memory: int
    offset: int
    strides: tuple[int, ...]
    dtype: str
    recipe: str = "copy"


class Slots(Sequence[Slot]):
    """The slots of a rollout rank, and the memory that they lie in.

    Attributes:
        memory: Name and bytes of each memory.
        tensors: The memory itself, as flat tensors of bytes; it stays behind when slots are pickled.
        moved: How often the slots of experts had got other ones when these were recorded; None: nobody has looked.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        memory: Sequence[tuple[str, int]],
        tensors: Sequence[Any] = (),
        *,
        moved: int | None = None,
    ) -> None:
        self.moved = moved
        self._slots, self.memory, self.tensors = list(slots), list(memory), list(tensors)

    def __getitem__(self, at: Any) -> Any:
        return self._slots[at]

    def __len__(self) -> int:
        return len(self._slots)

    def __getstate__(self) -> dict[str, Any]:
        return {"_slots": self._slots, "memory": self.memory, "tensors": [], "moved": self.moved}


def _joined(one: Layout, other: Layout) -> Layout:
    """Return the layout of a tensor of which two ranks have told the shards that they know."""
    if one == other:
        return one
    ranks: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for shard in (*one.shards, *other.shards):
        ranks.setdefault((shard.start, shard.size), set()).update(shard.ranks)
    shards = tuple(Shard(start, size, tuple(sorted(held))) for (start, size), held in ranks.items())
    return replace(one, shards=shards)


def merge(described: Iterable[Sequence[Param]]) -> list[Param]:
    """Join the parameters that each trainer rank has described.

    Raises:
        ValueError: Ranks differ in the shape or dtype of a parameter, which is named.
    """
    merged: dict[str, Param] = {}
    layouts: dict[tuple[int, int], tuple[Layout, Layout, Layout]] = {}
    for param in (param for rank in described for param in rank):
        known = merged.setdefault(param.name, param)
        if (known.shape, known.dtype) != (param.shape, param.dtype):
            came = f"{known.dtype} {known.shape} and {param.dtype} {param.shape}"
            raise ValueError(f"params: {param.name!r} came as {came}; all ranks have the same")
        if known.layout is not param.layout:
            # Parameters that lie alike share their layout afterwards, too.
            key = (id(known.layout), id(param.layout))
            entry = layouts.get(key)
            if entry is None:
                # The entry keeps both alive, so that their ids stay theirs.
                entry = layouts[key] = (known.layout, param.layout, _joined(known.layout, param.layout))
            merged[param.name] = replace(known, layout=entry[2])
    return list(merged.values())


def tensors_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and tensor of a model's parameters and of the buffers that its checkpoint has."""
    if isinstance(model, Mapping):
        yield from model.items()
        return
    yield from model.named_parameters()
    kept = set(model.state_dict(keep_vars=True)) if any(True for _ in model.buffers()) else set()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
