"""The stages before the write: parameters brought together, sliced, rounded and quantised."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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


class Ahead:
    """Parts of offloaded parameters that are on their way to a GPU, on a stream of their own.

    A GPU's stages are timed by its own events, because calls return before their work is done.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self.device = device
        on_gpu = torch.device(device).type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.parts: dict[Any, Any] = {}
        self.copied: Any = None
        self.copies: list[tuple[Any, Any]] = []
        self.work: list[tuple[Any, Any]] = []
        self.begun: Any = None
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                self.first, self.since = self._event(), time.perf_counter()

    def fetch(self, parts: Mapping[Any, Any]) -> None:
        """Begin to copy parts that lie on the host. Parts that nobody has taken are forgotten."""
        import torch

        self.parts.clear()
        if self.stream is None:
            return
        with torch.cuda.stream(self.stream):
            begun = self._event()
            for key, part in parts.items():
                if part.device.type == "cpu":
                    self.parts[key] = part.to(self.device, non_blocking=True)
            self.copied = self._event()
            self.copies.append((begun, self.copied))

    def _event(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take(self, key: Any) -> Any:
        """Return the copy of a part for work that is launched from now on; None without one."""
        import torch

        if self.stream is None:
            return None
        part = self.parts.pop(key, None)
        if part is not None:
            current = torch.cuda.current_stream(part.device)
            current.wait_event(self.copied)
            # The memory must not be used again before that work is over.
            part.record_stream(current)
        self.begun = self._event()
        return part

    def launched(self) -> None:
        """Note that work on the part that was taken has been launched."""
        if self.begun is not None:
            self.work.append((self.begun, self._event()))
            self.begun = None

    def add_times(self, report: Report) -> None:
        """Add the GPU's times to a report."""
        if self.stream is None:
            return
        self.stream.synchronize()
        for stage, times in (("gather", self.copies), ("prepare", self.work)):
            for begin, end in times:
                span = (self.since + self.first.elapsed_time(event) / 1e3 for event in (begin, end))
                report.ran(stage, *span)


class Preparer:
    """Prepares items of one version. One parameter that was brought together is kept, for the items that follow."""

    def __init__(self, schedule: Schedule, tensors: Mapping[str, Any], report: Report, device: Any) -> None:
        self.params, self.tensors, self.report, self.device = schedule.params, tensors, report, device
        self.whole: tuple[int, Any] | None = None
        self.quantised: tuple[Any, Any] | None = None
        self.ahead = Ahead(device)

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
            self.quantised = None
            source = self._here(param, first, count, origin, tensor)
            self.quantised = (key, blocks(source, scale))
        values, scales = self.quantised[1]
        if of_blocks:
            return scales
        return values[_slices(start, size, first)]

    def _here(self, param: int, start: list[int], size: list[int], origin: Any, tensor: Any) -> Any:
        """Return a part on the device that prepares."""
        found = self.ahead.take((param, tuple(start), tuple(size)))
        if found is not None:
            return found
        return tensor[_slices(start, size, origin)].to(self.device, non_blocking=True)

    def fetch(self, items: Sequence[_Item]) -> None:
        """Begin to bring what items are made of to the device, while earlier items are prepared there."""
        parts = {}
        for param, recipe, _, start, size, gathered, _, num_bytes in items:
            if gathered or not num_bytes or self.ahead.stream is None:
                continue
            if recipe != "copy":
                of_blocks = recipe.endswith("_scale")
                start, size = _widened(start, size, self.params[param][1], of_blocks=of_blocks)
            key = (param, tuple(start), tuple(size))
            # The blocks that were quantised last are kept.
            if self.quantised is None or (self.quantised[0][0], *self.quantised[0][2:]) != key:
                origin, tensor = local(self.tensors[self.params[param][0]])
                parts[key] = tensor[_slices(start, size, origin)]
        self.ahead.fetch(parts)

    def prepare(self, item: _Item, to: Any) -> None:
        """Prepare an item's bytes in `to`, flat memory of as many bytes."""
        import torch

        param, recipe, dtype, start, size, gathered, _, _ = item
        origin, tensor = self._source(param, gathered)
        begin = time.perf_counter()
        if to.numel():
            if recipe == "copy":
                made = self._here(param, start, size, origin, tensor)
            else:
                made = self._blocks(item, origin, tensor)
            room = to.view(getattr(torch, dtype)).view(size)
            if dtype == "float8_e8m0fnu":
                made = (torch.frexp(made)[1] - 1 + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
            room.copy_(made)
            self.ahead.launched()
        if self.ahead.stream is None:
            self.report.ran("prepare", begin, time.perf_counter())
