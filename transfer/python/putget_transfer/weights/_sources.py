"""Parameters that are written from where they lie: what travels as it is needs no copy of a task's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from putget_transfer._native import Engine, EngineError, MrHandle
from putget_transfer.weights._describe import dtype_name, local
from putget_transfer.weights._prepare import Part, Work, slices

_FREE = {"host", "tcp", "nvlink", "sim"}
"""Registering memory over these pins none of it, so that it can be done for each version anew."""


class Sources:
    """The memory of a rank's parameters, registered for one version.

    A trainer may move or free its parameters between versions, so no registration outlives one.

    Attributes:
        of: By the number of a task whose items all lie ready: handle and offset of each item.
    """

    def __init__(
        self, engine: Engine, tasks: Sequence[Any], works: Sequence[Work], params: Any, tensors: Mapping[str, Any]
    ) -> None:
        self.engine = engine
        self.of: dict[int, list[tuple[MrHandle, int]]] = {}
        self.handles: list[MrHandle] = []
        if not _FREE.issuperset(engine.main_address().providers):
            return
        found: dict[int, list[tuple[Any, int]]] = {}
        storages: dict[int, Any] = {}
        for number, work in enumerate(works):
            places = [_place(part, tensors, params) for part in work.parts]
            if len(places) == len(tasks[number].items) and all(places):
                found[number] = [place for place in places if place is not None]
                storages.update((place[0].data_ptr(), place[0]) for place in found[number])
        self.of = self._registered(found, storages)

    def _registered(
        self, found: Mapping[int, list[tuple[Any, int]]], storages: Mapping[int, Any]
    ) -> dict[int, list[tuple[MrHandle, int]]]:
        import torch

        handles: dict[int, MrHandle] = {}
        for device in {storage.device for storage in storages.values()}:
            own = [storage for storage in storages.values() if storage.device == device]
            memory = [torch.empty(0, dtype=torch.uint8, device=device).set_(storage) for storage in own]
            try:
                made = self.engine.reg_mrs(memory, read_only=device.type == "cpu")
            except EngineError:
                continue  # memory that cannot be shared as it is: it is copied, as before
            self.handles += [handle for handle, _ in made]
            handles.update((storage.data_ptr(), handle) for storage, (handle, _) in zip(own, made, strict=True))
        return {
            number: [(handles[storage.data_ptr()], offset) for storage, offset in places]
            for number, places in found.items()
            if all(storage.data_ptr() in handles for storage, _ in places)
        }

    def close(self) -> None:
        """End the registrations, when nothing is written any more."""
        for handle in self.handles:
            self.engine.dereg_mr(handle)
        self.handles, self.of = [], {}


def _place(part: Part, tensors: Mapping[str, Any], params: Any) -> tuple[Any, int] | None:
    """Return the storage of a part's bytes, and where in it they begin; None if they have to be made."""
    if part.gathered or part.num_bytes or len(part.copies) != 1 or part.values or part.scales:
        return None
    origin, own = local(tensors[params[part.param][0]])
    source = own[slices(part.start, part.size, origin)]
    if not source.is_contiguous() or dtype_name(source.dtype) != part.copies[0][2]:
        return None
    storage = source.untyped_storage()
    return storage, source.data_ptr() - storage.data_ptr()
