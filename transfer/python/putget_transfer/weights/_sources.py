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
        places: By the number of a task whose items all lie ready: storage of each item, and where in it it begins.
    """

    def __init__(
        self, engine: Engine, tasks: Sequence[Any], works: Sequence[Work], params: Any, tensors: Mapping[str, Any]
    ) -> None:
        self.engine = engine
        self.places: dict[int, list[tuple[Any, int]]] = {}
        self.handles: dict[int, MrHandle] = {}
        if not _FREE.issuperset(engine.main_address().providers):
            return
        for number, work in enumerate(works):
            found = [_place(part, tensors, params) for part in work.parts]
            if len(found) == len(tasks[number].items) and all(found):
                self.places[number] = [place for place in found if place is not None]

    def of(self, number: int) -> list[tuple[MrHandle, int]] | None:
        """Return handle and offset of each item of a task, registered now if they are not; None: it is prepared."""
        try:
            return [(self._handle(storage), offset) for storage, offset in self.places[number]]
        except (KeyError, ValueError, EngineError):  # also memory that cannot be shared as it is
            return None

    def _handle(self, storage: Any) -> MrHandle:
        import torch

        found = self.handles.get(storage.data_ptr())
        if found is None:
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            found, _ = self.engine.reg_mr(memory, read_only=storage.device.type == "cpu")
            self.handles[storage.data_ptr()] = found
        return found

    def close(self) -> None:
        """End the registrations, when nothing is written any more."""
        for handle in self.handles.values():
            self.engine.dereg_mr(handle)
        self.handles, self.places = {}, {}


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
