"""The stages before the write: parameters brought together, sliced, rounded and quantised."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from putget_transfer.weights._describe import is_dtensor, local
from putget_transfer.weights._native import Schedule
from putget_transfer.weights._quantise import BLOCK, blocks
from putget_transfer.weights._report import Report

_Item = tuple[int, str, str, list[int], list[int], bool, int, int]


def _slices(start: Any, size: Any, origin: Any) -> tuple[slice, ...]:
    return tuple(
        slice(first - zero, first - zero + count) for first, count, zero in zip(start, size, origin, strict=True)
    )


def _widened(start: list[int], size: list[int], shape: Any, *, of_blocks: bool) -> tuple[list[int], list[int]]:
    """Return the elements of the blocks that an area touches; the area may be one of the grid of blocks."""
    start, size = list(start), list(size)
    for dim in range(len(shape) - 2, len(shape)):
        first, end = start[dim], start[dim] + size[dim]
        if not of_blocks:
            first, end = first // BLOCK, -(-end // BLOCK)
        start[dim] = first * BLOCK
        size[dim] = min(end * BLOCK, shape[dim]) - start[dim]
    return start, size


class Preparer:
    """Prepares items of one version. One parameter that was brought together is kept, for the items that follow."""

    def __init__(self, schedule: Schedule, tensors: Mapping[str, Any], report: Report, device: Any) -> None:
        self.params, self.tensors, self.report, self.device = schedule.params, tensors, report, device
        self.whole: tuple[int, Any] | None = None
        self.quantised: tuple[Any, Any] | None = None

    def _source(self, param: int, gathered: bool) -> tuple[Any, Any]:
        """Return where a tensor begins in its parameter, and the tensor."""
        tensor = self.tensors[self.params[param][0]]
        if not gathered:
            return local(tensor)
        if self.whole is None or self.whole[0] != param:
            self.whole = None
            begin = time.perf_counter()
            full = tensor.full_tensor().detach() if is_dtensor(tensor) else tensor.detach()
            self.report.ran("gather", begin, time.perf_counter())
            self.whole = (param, full)
        return (0,) * self.whole[1].dim(), self.whole[1]

    def _blocks(self, item: _Item, origin: Any, tensor: Any) -> Any:
        """Return the item's FP8 values or scales."""
        param, recipe, _, start, size, _, _, _ = item
        of_blocks = recipe.endswith("_scale")
        scale = recipe.removesuffix("_scale").removeprefix("fp8_")
        first, count = _widened(start, size, self.params[param][1], of_blocks=of_blocks)
        key = (param, scale, tuple(first), tuple(count))
        if self.quantised is None or self.quantised[0] != key:
            source = self._here(tensor[_slices(first, count, origin)])
            self.quantised = (key, blocks(source, scale))
        values, scales = self.quantised[1]
        if of_blocks:
            return scales
        return values[_slices(start, size, first)]

    def _here(self, tensor: Any) -> Any:
        """Return a tensor on the device that prepares."""
        return tensor.to(self.device, non_blocking=True)

    def prepare(self, item: _Item, to: Any) -> None:
        """Prepare an item's bytes in `to`, flat memory of as many bytes."""
        import torch

        param, recipe, dtype, start, size, gathered, _, _ = item
        origin, tensor = self._source(param, gathered)
        begin = time.perf_counter()
        if to.numel():
            if recipe == "copy":
                made = self._here(tensor[_slices(start, size, origin)])
            else:
                made = self._blocks(item, origin, tensor)
            room = to.view(getattr(torch, dtype)).view(size)
            if dtype == "float8_e8m0fnu":
                made = (torch.frexp(made)[1] - 1 + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
            room.copy_(made)
        self.report.ran("prepare", begin, time.perf_counter())
