"""Parameters that are written from where they lie: what travels as it is needs no copy of a task's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from putget_transfer._native import Engine, EngineError, MrHandle
from putget_transfer.weights._describe import dtype_name, local
from putget_transfer.weights._prepare import Part, Work, slices

_FREE = {"host", "tcp", "nvlink", "sim"}
"""Registering memory over these pins none of it, so that it can be done for each version anew. Not so the host's memory
over nvlink."""


class Sources:
    """The memory of a rank's parameters, registered for one version.

    A trainer may move or free its parameters between versions, so no registration outlives one. All are looked at
    before the first write: between writes Python's work costs more, because the ends of earlier ones take its lock.
    """

    def __init__(
        self, engine: Engine, tasks: Sequence[Any], works: Sequence[Work], params: Any, tensors: Mapping[str, Any]
    ) -> None:
        self.engine, self.tasks, self.params, self.tensors = engine, tasks, params, tensors
        providers = engine.main_address().providers
        self.works = works if _FREE.issuperset(providers) else []
        self.host_too = "nvlink" not in providers
        # By device, address and length: storages may begin at one address. None: it cannot be registered.
        self.handles: dict[tuple[Any, int, int], MrHandle | None] = {}
        self.places: list[list[tuple[MrHandle, int]] | None] = []

    def look_up(self) -> None:
        """Find and register what lies ready."""
        self.places = [self._places(number) for number in range(len(self.works))]

    def of(self, number: int) -> list[tuple[MrHandle, int]] | None:
        """Return handle and offset of each item of a task, if all lie ready; None: it is prepared."""
        return self.places[number] if self.places else None

    def _places(self, number: int) -> list[tuple[MrHandle, int]] | None:
        parts = self.works[number].parts
        if not parts or len(parts) != len(self.tasks[number].items):
            return None
        places = []
        for part in parts:
            place = _place(part, self.tensors, self.params)
            handle = None if place is None else self._handle(place[0])
            if place is None or handle is None:
                return None
            places.append((handle, place[1]))
        return places

    def _handle(self, storage: Any) -> MrHandle | None:
        """Return a storage's registration; None: it cannot be shared as it is."""
        import torch

        at = storage.device, storage.data_ptr(), storage.nbytes()
        if storage.device.type == "cpu" and not self.host_too:
            return None
        if at not in self.handles:
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.handles[at] = None
            with suppress(ValueError, EngineError):
                self.handles[at] = self.engine.reg_mr(memory, read_only=storage.device.type == "cpu")[0]
        return self.handles[at]

    def close(self) -> None:
        """End the registrations, when nothing is written any more."""
        for handle in self.handles.values():
            if handle is not None:
                with suppress(ValueError, EngineError):  # the engine keeps what is still in use until it closes
                    self.engine.dereg_mr(handle)
        self.handles, self.places = {}, []


def _place(part: Part, tensors: Mapping[str, Any], params: Any) -> tuple[Any, int] | None:
    """Return the storage of a part's bytes, and where in it they begin; None if they have to be made."""
    import torch

    if part.gathered or part.num_bytes or len(part.copies) != 1 or part.values or part.scales:
        return None
    origin, own = local(tensors[params[part.param][0]])
    if type(own) not in (torch.Tensor, torch.nn.Parameter):
        return None  # its storage may be none, or mean something else
    source = own[slices(part.start, part.size, origin)]
    if (
        not source.is_contiguous()
        or source.is_neg()
        or source.is_conj()
        or dtype_name(source.dtype) != part.copies[0][2]
    ):
        return None
    storage = source.untyped_storage()
    return storage, source.data_ptr() - storage.data_ptr()
