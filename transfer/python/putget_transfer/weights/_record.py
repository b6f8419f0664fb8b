"""Slots, recorded while an engine's own `load_weights` runs once over a checkpoint without storage."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from putget_transfer.weights._describe import dtype_name
from putget_transfer.weights._experts import ExpertSlots
from putget_transfer.weights._model import Param, Slot, Slots, tensors_of
from putget_transfer.weights._quantise import BLOCK
from putget_transfer.weights._views import Located, compose, locate

SHOWN = 8


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint, as the engine's loader sees it.

    Attributes:
        name: The checkpoint's name.
        shape: Its shape.
        dtype: Its type, torch's name without "torch.".
        param: The trainers' parameter that it is made of.
        recipe: How; the recipes of `Slot`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    param: str
    recipe: str = "copy"


def checkpoint(
    params: Iterable[Param],
    *,
    dtype: str | None = None,
    quantised: Collection[str] = (),
    scale: str = "float32",
    scale_suffix: str = "_scale_inv",
) -> list[Entry]:
    """List the tensors of the checkpoint that trainers would write.

    Args:
        params: The trainers' parameters.
        dtype: The type of floats in the checkpoint; the trainers' own if None.
        quantised: Names of parameters that the engine has in FP8, in blocks of 128 x 128.
        scale: "float32" or "ue8m0", as for `quantise`.
        scale_suffix: What the names of their scales end in.

    Raises:
        ValueError: A name of `quantised` that no parameter has, or whose parameter has no blocks; another scale.
    """
    params = list(params)
    unknown = sorted(set(quantised) - {param.name for param in params})
    if unknown:
        raise ValueError(f"quantised: no parameter is called {', '.join(map(repr, unknown[:SHOWN]))}")
    if scale not in ("float32", "ue8m0"):
        raise ValueError(f"scale: {scale!r} came; 'float32' and 'ue8m0' are allowed")
    flat = [
        f"{param.name!r} of shape {param.shape}" for param in params if param.name in quantised and len(param.shape) < 2
    ]
    if flat:
        raise ValueError(f"quantised: {', '.join(flat[:SHOWN])} came; blocks have 2 dimensions")
    entries = []
    for param in params:
        if param.name in quantised:
            *outer, rows, columns = param.shape
            grid = (*outer, -(-rows // BLOCK), -(-columns // BLOCK))
            entries.append(Entry(param.name, param.shape, "float8_e4m3fn", param.name, f"fp8_{scale}"))
            entries.append(Entry(param.name + scale_suffix, grid, "float32", param.name, f"fp8_{scale}_scale"))
        else:
            floats = param.dtype.startswith(("float", "bfloat"))
            entries.append(Entry(param.name, param.shape, dtype if dtype and floats else param.dtype, param.name))
    return entries


class _Memory:
    """A model's memory: which storage is which, and the names of the parameters in it."""

    def __init__(self, model: Any) -> None:
        self.memory: list[tuple[str, int]] = []
        self.tensors: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.parts: list[tuple[str, Any]] = []
        for name, tensor in tensors_of(model):
            key = tensor.untyped_storage()._cdata
            if key not in self.numbers:
                self.numbers[key] = len(self.memory)
                flat = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
                self.memory.append((name, tensor.untyped_storage().nbytes()))
                self.tensors.append(flat.view(dtype=_bytes()) if flat.numel() else flat)
            self.parts.append((name, tensor))

    def number(self, tensor: Any) -> int | None:
        return self.numbers.get(tensor.untyped_storage()._cdata)


def _bytes() -> Any:
    import torch

    return torch.uint8


class _Recorder:
    """Notes copies from the checkpoint's tensors into a model's memory. Nothing is copied."""

    def __init__(self, memory: _Memory) -> None:
        self.memory = memory
        self.sources: dict[int, tuple[Entry, Any, Located | None]] = {}
        self.slots: list[Slot] = []
        self.refused: list[str] = []

    def feed(self, entries: Iterable[Entry]) -> Iterable[tuple[str, Any]]:
        """Yield the checkpoint's tensors, as its files would."""
        import torch

        for entry in entries:
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            self.sources[tensor.untyped_storage()._cdata] = (entry, tensor, None)
            yield entry.name, tensor

    def _source(self, tensor: Any) -> tuple[Entry, list[Located]] | None:
        """Return the entry that a tensor is made of, and its parts there; None for other tensors."""
        found = self.sources.get(tensor.untyped_storage()._cdata)
        if found is None:
            return None
        entry, base, through = found
        parts = locate(tensor, tuple(base.shape))
        if through is not None:
            parts = [compose(part, through) for part in parts]
        return entry, parts

    def copied(self, to: Any, source: Any) -> bool:
        """Note a copy into the model's memory; False if it is another copy."""
        number = self.memory.number(to)
        if number is None:
            return False
        found = self._source(source)
        if found is None:
            if source.device.type == "meta":
                self.refused.append("a tensor that is computed from the checkpoint's is loaded")
            return True
        entry, parts = found
        to_strides = list(to.stride())
        if tuple(source.shape) != tuple(to.shape):
            source_dims, to_dims = tuple(source.shape), tuple(to.shape)
            if source.numel() != to.numel():
                raise ValueError(f"{entry.name!r}: {source_dims} is copied to {to_dims}; a value for many is refused")
            squeezed = [stride for size, stride in zip(to_dims, to_strides, strict=True) if size != 1]
            wanted = iter(squeezed)
            to_strides = [next(wanted) if size != 1 else 0 for size in source_dims]
        item = to.element_size()
        for part in parts:
            strides, offset = part.strides(to_strides)
            self.slots.append(
                Slot(
                    entry.param,
                    part.start,
                    part.size,
                    number,
                    (to.storage_offset() + offset) * item,
                    tuple(stride * item for stride in strides),
                    dtype_name(to.dtype),
                    entry.recipe,
                )
            )
        return True

    def derived(self, source: Any, made: Any) -> None:
        """Note that a tensor has the elements of another one: a copy in another order or type."""
        found = self._source(source)
        if found is not None and made.device.type == "meta" and made.is_contiguous():
            entry, parts = found
            if len(parts) == 1:
                self.sources[made.untyped_storage()._cdata] = (entry, made, parts[0])


def _mode(recorder: _Recorder) -> Any:
    """Return the mode in which copies are noted."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = func.name()
            if name == "aten::copy_" and recorder.copied(args[0], args[1]):
                return args[0]
            writes = func._schema.is_mutable and args and hasattr(args[0], "untyped_storage")
            if writes and recorder.memory.number(args[0]) is not None:
                if name.startswith(("aten::fill_", "aten::zero_")):
                    return args[0]  # memory that is filled with a number keeps it
                recorder.refused.append(f"{name} changes the model")
                return args[0]
            made = func(*args, **kwargs)
            if name in ("aten::_to_copy", "aten::clone"):
                recorder.derived(args[0], made)
            return made

    return Mode()  # type: ignore[no-untyped-call]


def _own_load(model: Any) -> Callable[[Iterable[tuple[str, Any]]], object]:
    """Return the loader of a model, or one that copies by name."""
    load = getattr(model, "load_weights", None)
    if load is not None:
        return load  # type: ignore[no-any-return]
    own = dict(tensors_of(model))

    def by_name(weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name not in own:
                raise ValueError(f"entries: {name!r} came; the model has no such parameter")
            own[name].data.copy_(tensor)

    return by_name


def _untouched(memory: _Memory, slots: Sequence[Slot]) -> list[str]:
    """Name the parameters of which no byte is loaded."""
    offsets: dict[int, list[int]] = {}
    for slot in slots:
        offsets.setdefault(slot.memory, []).append(slot.offset)
    for one in offsets.values():
        one.sort()
    names = []
    for name, tensor in memory.parts:
        number = memory.number(tensor)
        loaded = [] if number is None else offsets.get(number, [])
        first = tensor.storage_offset() * tensor.element_size()
        end = first + tensor.numel() * tensor.element_size()
        at = bisect.bisect_left(loaded, first)
        if tensor.numel() and not (at < len(loaded) and loaded[at] < end):
            names.append(name)
    return names


def record(
    model: Any,
    entries: Iterable[Entry | Param],
    *,
    load: Callable[[Iterable[tuple[str, Any]]], object] | None = None,
    ignored: Collection[str] = (),
    experts: ExpertSlots | None = None,
) -> Slots:
    """Record where a rollout rank's model wants the parts of a checkpoint.

    The model's own `load_weights` runs once over tensors without storage, and its copies are noted instead of made: the
    model keeps its values. Fused and sliced parameters (QKV, gate and up, experts, tensor parallelism) follow from
    that. The copies are noted as one would see them in a plain load, so a loader may slice, transpose, reshape and
    convert; what it computes is refused.

    Args:
        model: The engine's model, or tensors by name, which are loaded by name.
        entries: The checkpoint's tensors (`checkpoint`), or the trainers' parameters where these are the same.
        load: The loader, which takes pairs of name and tensor; the model's `load_weights`, or by name.
        ignored: Parameters and buffers of the model that no checkpoint has.
        experts: Slots of experts that a balancer writes, too, as for `Rollout`, which refuses versions after experts
            have moved since this call.

    Raises:
        ValueError: Parameters that are not loaded, or not by copying; they are named.
    """
    moved = None if experts is None else experts.moved
    known = [entry if isinstance(entry, Entry) else checkpoint([entry])[0] for entry in entries]
    memory = _Memory(model)
    recorder = _Recorder(memory)
    load = load or _own_load(model)
    import torch

    with torch.no_grad(), _mode(recorder):
        try:
            load(recorder.feed(known))
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(f"model: its loader needs more than names, shapes and copies: {error}") from error
    if recorder.refused:
        raise ValueError(f"model: its loader does more than copy: {'; '.join(sorted(set(recorder.refused))[:SHOWN])}")
    left = [name for name in _untouched(memory, recorder.slots) if name not in ignored]
    if left:
        names = ", ".join(map(repr, left[:SHOWN]))
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        raise ValueError(
            f"model: the checkpoint has nothing for {names}{more}; name them in `ignored` if that is right"
        )
    used = sorted({slot.memory for slot in recorder.slots})
    numbers = {number: place for place, number in enumerate(used)}
    slots = [Slot(**{**vars(slot), "memory": numbers[slot.memory]}) for slot in _last(recorder.slots)]
    return Slots(
        slots, [memory.memory[number] for number in used], [memory.tensors[number] for number in used], moved=moved
    )


def _last(slots: Sequence[Slot]) -> list[Slot]:
    """Leave out slots that a later copy to the same place replaces."""
    places = {(slot.memory, slot.offset, slot.size, slot.strides): slot for slot in slots}
    return list(itertools.chain(places.values()))
