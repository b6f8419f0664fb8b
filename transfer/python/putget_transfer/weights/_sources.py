"""Parameters that are written from where they lie: what travels as it is needs no copy of a task's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from putget_transfer._native import Engine, EngineError, MrHandle
from putget_transfer.weights._describe import dtype_name, local
from putget_transfer.weights._prepare import Part, Work

_FREE = {"host", "tcp", "nvlink", "sim"}
"""Registering memory over these pins none of it, so that it can be done for each version anew. Not so the host's memory
over nvlink."""

Ready = tuple[list[MrHandle], list[int]]
"""Handle and offset of each item of a task."""


@dataclass(frozen=True)
class _Look:
    """How this rank's part of a parameter lay when tasks were measured; one that lies otherwise is prepared."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any

    def holds(self, start: tuple[int, ...], own: Any) -> bool:
        """Say whether a part lies so. The storage of another class of tensors may be none, or mean something else."""
        import torch

        return (
            start == self.start
            and own.shape == self.shape
            and own.stride() == self.strides
            and own.dtype is self.dtype
            and type(own) is torch.Tensor
            and not own.is_neg()
            and not own.is_conj()
        )

    def first(self, part: Part) -> int | None:
        """Return where the elements of a part begin, or None if they do not lie side by side."""
        first, length = 0, 1
        dims = zip(part.start, part.size, self.start, self.strides, strict=True)
        for begin, size, zero, stride in reversed(list(dims)):
            first += (begin - zero) * stride
            if size != 1:
                if stride != length:
                    return None
                length *= size
        return first


class Lying:
    """Where bytes of tasks lie that travel as they are: found once, for all versions of parameters that lie alike.

    Attributes:
        looks: The parameters.
        tasks: For each task parameters, by their place among the looks, and bytes from the begin of each to that of the
            item; None: the task is prepared.
    """

    def __init__(self, works: Sequence[Work], params: Sequence[Any], tensors: Mapping[str, Any]) -> None:
        self.looks: list[_Look] = []
        self._numbers: dict[int, int] = {}
        self._starts: dict[Any, Any] = {}
        self.tasks = [self._places(work, params, tensors) for work in works]

    def _places(
        self, work: Work, params: Sequence[Any], tensors: Mapping[str, Any]
    ) -> tuple[list[int], list[int]] | None:
        numbers, offsets = [], []
        for part in work.parts:
            if part.gathered or part.num_bytes or len(part.copies) != 1 or part.values or part.scales:
                return None
            if part.param not in self._numbers:
                name = params[part.param][0]
                start, own = local(tensors[name], self._starts)
                self._numbers[part.param] = len(self.looks)
                self.looks.append(_Look(name, start, own.shape, own.stride(), own.dtype))
            look = self.looks[self._numbers[part.param]]
            first = look.first(part)
            if first is None or dtype_name(look.dtype) != part.copies[0][2]:
                return None
            numbers.append(self._numbers[part.param])
            offsets.append(first * look.dtype.itemsize)
        return (numbers, offsets) if numbers else None


class Sources:
    """The memory of a rank's parameters, registered for one version.

    A trainer may move or free its parameters between versions, so no registration outlives one. All are looked at and
    registered at once, before the first write: between writes Python's work costs more.
    """

    def __init__(self, engine: Engine, lying: Lying | None, tensors: Mapping[str, Any]) -> None:
        self.engine, self.tensors = engine, tensors
        providers = engine.main_address().providers
        self.lying = lying if _FREE.issuperset(providers) else None
        self.host_too = "nvlink" not in providers
        self.handles: dict[int, MrHandle] = {}
        """By storage. One that is missing cannot be shared as it is."""
        self.places: list[tuple[int, int] | None] = []
        """Storage of each parameter, and where in it the parameter begins."""

    def look_up(self) -> None:
        """Find and register what lies ready."""
        if self.lying is None:
            return
        import torch

        starts: dict[Any, Any] = {}
        memory: dict[Any, dict[int, Any]] = {}
        with torch.no_grad():
            self.places = [self._place(look, starts, memory) for look in self.lying.looks]
        for device, storages in memory.items():
            self._register(list(storages), list(storages.values()), read_only=device.type == "cpu")

    def of(self, number: int) -> Ready | None:
        """Return where each item of a task lies, if all lie ready; None: the task is prepared."""
        task = self.lying.tasks[number] if self.lying is not None else None
        if task is None:
            return None
        handles, offsets = [], []
        for at, offset in zip(*task, strict=True):
            place = self.places[at]
            handle = None if place is None else self.handles.get(place[0])
            if place is None or handle is None:
                return None
            handles.append(handle)
            offsets.append(place[1] + offset)
        return handles, offsets

    def _place(self, look: _Look, starts: dict[Any, Any], memory: dict[Any, dict[int, Any]]) -> tuple[int, int] | None:
        """Return the storage of a parameter and where it begins there; note the storage's memory by its device."""
        import torch

        start, own = local(self.tensors[look.name], starts)
        if not look.holds(start, own) or (own.is_cpu and not self.host_too):
            return None
        storage = own.untyped_storage()
        key = storage._cdata
        known = memory.setdefault(own.device, {})
        if key not in known:
            fills = own.is_contiguous() and own.nbytes == storage.nbytes()
            known[key] = own if fills else own.new_empty(0, dtype=torch.uint8).set_(storage)
        return key, own.storage_offset() * own.itemsize

    def _register(self, keys: Sequence[int], memory: Sequence[Any], *, read_only: bool) -> None:
        """Register storages at once; if one of them is refused, each by itself."""
        try:
            found = self.engine.reg_mrs(memory, read_only=read_only)
            self.handles.update(zip(keys, (handle for handle, _ in found), strict=True))
        except (ValueError, EngineError):
            if len(keys) > 1:
                for key, one in zip(keys, memory, strict=True):
                    self._register([key], [one], read_only=read_only)

    def close(self) -> None:
        """End the registrations, when nothing is written any more."""
        handles, self.handles, self.places = list(self.handles.values()), {}, []
        try:
            self.engine.dereg_mrs(handles)
        except (ValueError, EngineError):
            for handle in handles:
                with suppress(ValueError, EngineError):  # the engine keeps what is still in use until it closes
                    self.engine.dereg_mr(handle)
