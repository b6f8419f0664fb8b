"""The bytes of one expert: which tensors have a part for each slot, and how those parts travel together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from putget._arguments import as_count, as_kind, as_list, shown

_ALIGNMENT = 16  # bytes: what one access moves
_INTERNAL = frozenset(vars(nn.Module()))  # torch's own attributes of a module


@dataclass(frozen=True)
class Blob:
    """One tensor's part of an expert.

    Attributes:
        name: the tensor's.
        offset: where it begins in a packed expert, in bytes; a multiple of 16.
        num_bytes: its size.
    """

    name: str
    offset: int
    num_bytes: int


class ExpertBlobs:
    """Names every tensor that belongs to an expert: weights, scales, biases. Their types and shapes do not matter.

    A moved expert whose scales stay behind gives wrong numbers and no error. So give the experts' module too: a tensor
    of it that has as many rows as there are slots, and is not among the named ones, is refused.

    Args:
        tensors: name to tensor [num_slots, ...], contiguous, all on one device.
        module: whose parameters, buffers and plain tensor attributes are looked through, its submodules', lists' and
            dictionaries' too. A view of a named tensor's memory counts as named.
        shared: tensors of `module`, by the names in its errors, that are alike for all slots and happen to have as many
            rows.

    Attributes:
        num_slots: slots of this rank.
        slot_bytes: bytes of a packed expert, a multiple of 16.
        layout: the `Blob` of each tensor, in the order given.

    Raises:
        ValueError: A tensor is not contiguous, has other slots than the first, is on another device, overlaps another
            or has no bytes; `module` has one that would stay behind. The message names it.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, module: nn.Module | None = None, shared: Iterable[str] = ()
    ) -> None:
        _require(tensors)
        if module is not None:
            as_kind("module", module, nn.Module)
        names = _names(shared)
        self._tensors = dict(tensors)
        self.num_slots = int(next(iter(tensors.values())).shape[0])
        layout, offset = [], 0
        for name, tensor in self._tensors.items():
            layout.append(Blob(name, offset, tensor.nbytes // self.num_slots))
            offset += -(-layout[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.layout = tuple(layout)
        self.slot_bytes = offset
        self._device = next(iter(tensors.values())).device
        # [num_slots, bytes] views of the tensors' own memory
        self._bytes = [tensor.detach().reshape(self.num_slots, -1).view(torch.uint8) for tensor in tensors.values()]
        if module is not None:
            self._require_all_of(module, names)
        elif names:
            raise ValueError("shared is given without module: it names tensors of the module")

    def parts(self) -> list[tuple[Blob, int]]:
        """Each tensor's `Blob`, and the address of slot 0 of it: what native code copies from and to."""
        return [(blob, rows.data_ptr()) for blob, rows in zip(self.layout, self._bytes, strict=True)]

    def with_tensor(self, name: str, tensor: Tensor) -> ExpertBlobs:
        """The same tensors, and one more at the end.

        Raises:
            ValueError: The tensor does not fit the others, or the name is taken.
        """
        if name in self._tensors:
            raise ValueError(f"{name} is there already")
        return ExpertBlobs({**self._tensors, name: tensor})

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._device

    def pack(self, slot: int, *, out: Tensor | None = None) -> Tensor:
        """Copies an expert out.

        Args:
            slot: which.
            out: uint8 [slot_bytes] on the tensors' device or on the CPU; a new tensor on the device if None. Bytes
                between the blobs are 0 in a new tensor, and stay as they are in `out`.

        Returns:
            uint8 [slot_bytes].

        Raises:
            ValueError: An argument is out of range, or not of this form.
        """
        self._require_slot(slot)
        if out is None:
            out = torch.zeros(self.slot_bytes, dtype=torch.uint8, device=self._device)
        self._require_packed("out", out)
        for blob, rows in zip(self.layout, self._bytes, strict=True):
            out[blob.offset : blob.offset + blob.num_bytes].copy_(rows[slot])
        return out

    def unpack(self, slot: int, packed: Tensor) -> None:
        """Writes an expert that `pack` gave into a slot.

        Args:
            slot: which.
            packed: uint8 [slot_bytes] on the tensors' device or on the CPU.

        Raises:
            ValueError: An argument is out of range, or not of this form. No slot has changed then.
        """
        self._require_slot(slot)
        self._require_packed("packed", packed)
        for blob, rows in zip(self.layout, self._bytes, strict=True):
            rows[slot].copy_(packed[blob.offset : blob.offset + blob.num_bytes])

    def _require_slot(self, slot: int) -> None:
        as_count("slot", slot, 0, self.num_slots - 1)

    def _require_packed(self, name: str, packed: Tensor) -> None:
        if not isinstance(packed, Tensor):
            raise ValueError(f"{name} is {shown(packed)}, expected a tensor")
        is_right = packed.dtype == torch.uint8 and packed.shape == (self.slot_bytes,) and packed.is_contiguous()
        if not is_right or packed.device not in (self._device, torch.device("cpu")):
            other = "" if self._device.type == "cpu" else " or cpu"
            raise ValueError(
                f"{name} is {packed.dtype} {list(packed.shape)} on {packed.device}; "
                f"it must be contiguous torch.uint8 [{self.slot_bytes}] on {self._device}{other}"
            )

    def _require_all_of(self, module: nn.Module, shared: tuple[str, ...]) -> None:
        found = dict(_tensors_of(module))
        for name in shared:
            if name not in found:
                raise ValueError(f"shared names {name!r}, which module does not have")
        named = [_range(tensor) for tensor in self._tensors.values()]
        for name, tensor in found.items():
            if name in shared or tensor.dim() == 0 or tensor.shape[0] != self.num_slots or tensor.nbytes == 0:
                continue
            begin, end = _range(tensor)
            if not any(first <= begin and end <= last for first, last in named):
                raise ValueError(
                    f"module has {name}, {tensor.dtype} {list(tensor.shape)} with a first dimension of "
                    f"{self.num_slots}, which would stay behind when experts move: name it among tensors, "
                    "or in shared if it is alike for all slots"
                )


def _require(tensors: Mapping[str, Tensor]) -> None:
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise ValueError(f"tensors is {shown(tensors)}, expected names and tensors")
    if not tensors:
        raise ValueError("there is no tensor: name those that experts have")
    first_name = next(iter(tensors))
    seen: list[tuple[str, int, int]] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a tensor [num_slots, ...]")
        if tensor.dim() == 0:
            raise ValueError(f"{name} is []; its first dimension must be the slots")
        first = tensors[first_name]
        if tensor.shape[0] != first.shape[0]:
            raise ValueError(f"{name} is {list(tensor.shape)}; {first_name} has {first.shape[0]} slots")
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device}, {first_name} on {first.device}: they must be on one device"
            )
        if tensor.nbytes == 0:
            raise ValueError(f"{name} is {list(tensor.shape)}, which has no bytes")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {list(tensor.shape)} with strides {list(tensor.stride())}; it must be contiguous"
            )
        begin, end = _range(tensor)
        for other, low, high in seen:
            if begin < high and low < end:
                raise ValueError(f"{name} and {other} are the same memory, or overlap: name it once")
        seen.append((name, begin, end))


def _names(shared: Any) -> tuple[str, ...]:
    return tuple(as_kind("a name of shared", name, str) for name in as_list("shared", shared))


def _range(tensor: Tensor) -> tuple[int, int]:
    """First byte of the elements, and the one behind the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain attributes of a module and those inside it."""
    for prefix, part in module.named_modules():
        at = f"{prefix}." if prefix else ""
        for name, parameter in part.named_parameters(recurse=False):
            yield at + name, parameter
        for name, buffer in part.named_buffers(recurse=False):
            yield at + name, buffer
        for name, value in vars(part).items():
            if name not in _INTERNAL:
                yield from _tensors_in(at + name, value)


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _tensors_in(f"{name}[{index}]", one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _tensors_in(f"{name}[{key!r}]", one)
