"""A `WeightSource` of vLLM as the planner and the write stage take it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from putget_transfer.weights import Layout, Param, Shard
from putget_transfer.weights._describe import Part, chunk_area, dtype_name

GROUP = "source"
"""One mesh group for all parameters, so that they go in the order in which the source yields them."""


def _dims(meta: Any) -> list[int | None]:
    """Return which dimension of a tensor each dimension of its mesh divides."""
    return [getattr(placement, "dim", None) for placement in meta.placements or ()]


def _coordinates(meta: Any) -> list[tuple[int, ...]]:
    """Return the coordinates of a parameter's owners, in their order."""
    return list(itertools.product(*map(range, meta.mesh_shape)))


def _layout(meta: Any, num_trainers: int, *, divided: bool) -> Layout:
    owners = tuple(range(num_trainers)) if meta.owners is None else meta.owners
    strange = [rank for rank in owners if rank >= num_trainers]
    if strange:
        raise ValueError(f"source: {meta.name!r} is owned by trainer ranks {strange}; there are {num_trainers}")
    shape = tuple(meta.shape)
    if not divided or meta.placements is None:
        return Layout((Shard((0,) * len(shape), shape, tuple(sorted(owners))),), GROUP)
    holders: dict[tuple[Any, Any], list[int]] = {}
    for rank, at in zip(owners, _coordinates(meta), strict=True):
        holders.setdefault(chunk_area(shape, _dims(meta), meta.mesh_shape, at), []).append(rank)
    return Layout(
        tuple(Shard(start, size, tuple(sorted(held))) for (start, size), held in holders.items() if 0 not in size),
        GROUP,
    )


def describe_source(source: Any, num_trainers: int, *, divided: bool) -> list[Param]:
    """Describe the parameters of a source: with parts as `iter_local` yields them (`divided`), or whole."""
    layouts: dict[Any, Layout] = {}
    params = []
    for meta in source.metadata:
        key = (meta.shape, meta.owners, meta.mesh_shape, meta.placements)
        if key not in layouts:
            layouts[key] = _layout(meta, num_trainers, divided=divided)
        params.append(Param(meta.name, tuple(meta.shape), dtype_name(meta.dtype), layouts[key]))
    return params


class Stream(Mapping[str, Any]):
    """The tensors of a source by name, asked for in its order: one is held at a time.

    A source may gather among trainer ranks while it goes on. So each rank goes through all of it, also through what it
    does not send (`end`).

    Attributes:
        looks: What has type and shape of each tensor, and lies nowhere.
    """

    def __init__(self, source: Any, rank: int, *, divided: bool) -> None:
        import torch

        self.source, self.rank, self.divided = source, rank, divided
        self.metas = {meta.name: meta for meta in source.metadata}
        self.looks = {
            meta.name: torch.empty(tuple(meta.shape), dtype=meta.dtype, device="meta") for meta in source.metadata
        }
        self.names = list(source.owned_names(rank))
        self.left: Iterator[tuple[str, Any]] | None = None
        self.at = 0
        self.now: tuple[str, Any] | None = None

    def begin(self) -> None:
        """Begin a pass, at the first tensor that is asked for."""
        self.left, self.at, self.now = None, 0, None

    def end(self) -> None:
        """Go through what is left."""
        self.now = None
        while self.at < len(self.names):
            self._next()
        self.begin()

    def _next(self) -> tuple[str, Any]:
        wanted, at = self.names[self.at], self.at
        self.at = len(self.names)  # a source that raises has nothing left
        if self.left is None:
            self.left = iter(self.source.iter_local() if self.divided else self.source.iter_full())
        found = next(self.left, None)
        if found is None or found[0] != wanted:
            came = "nothing" if found is None else repr(found[0])
            raise ValueError(f"source: {came} came; {wanted!r} is the next of its metadata")
        self.at = at + 1
        return wanted, found[1]

    def __getitem__(self, name: str) -> Any:
        self.now = self.now if self.now is not None and self.now[0] == name else None
        while self.now is None:
            if self.at == len(self.names):
                raise ValueError(f"source: {name!r} was asked for after it has been yielded, or is not owned")
            found = self._next()
            if found[0] == name:
                self.now = (name, self._part(name, found[1]))
        return self.now[1]

    def _part(self, name: str, tensor: Any) -> Part:
        """Return a tensor with its place in the parameter."""
        meta = self.metas[name]
        start, size = (0,) * len(meta.shape), tuple(meta.shape)
        if self.divided and meta.placements is not None:
            at = _coordinates(meta)[meta.owners.index(self.rank)]
            start, size = chunk_area(size, _dims(meta), meta.mesh_shape, at)
        if tuple(tensor.shape) != size or tensor.dtype != meta.dtype:
            came = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
            raise ValueError(f"source: {name!r} came as {came}; {dtype_name(meta.dtype)} {list(size)} is planned")
        return Part(tuple(meta.shape), start, tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
