"""The stages before the write: parameters brought together, brought to the device, sliced, rounded and quantised."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from putget_transfer.weights import _kernel
from putget_transfer.weights._describe import dtype_name, is_dtensor, local
from putget_transfer.weights._quantise import BLOCK, blocks_into, scratch_bytes
from putget_transfer.weights._report import Report
from putget_transfer.weights._staging import padded

_Item = tuple[int, str, str, list[int], list[int], bool, int, int]


def slices(start: Any, size: Any, origin: Any) -> tuple[slice, ...]:
    """Return an index of an area in a tensor that begins at `origin`."""
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


@dataclass
class Part:
    """A part of a parameter, and what a task makes of it.

    Attributes:
        param: The parameter.
        start: Its first element.
        size: Its size; that of whole blocks where it is quantised.
        gathered: All ranks bring the parameter together first.
        copies: Items that it is copied to.
        values: The item with its FP8 values, if there is one.
        scales: The item with its scales, if there is one.
        num_bytes: Memory for it on the device; 0 if it can be read where it lies.
        outside: Other memory that preparing it takes: the parameter that is brought together, and temporaries.
    """

    param: int
    start: list[int]
    size: list[int]
    gathered: bool
    copies: list[_Item] = field(default_factory=list)
    values: _Item | None = None
    scales: _Item | None = None
    num_bytes: int = 0
    outside: int = 0


@dataclass(frozen=True)
class Work:
    """A task's parts, and the temporary memory that it needs: on the device in one piece each, and besides."""

    num_bytes: int
    parts: list[Part]

    @property
    def pieces(self) -> list[int]:
        """Bytes of its pieces: prepared bytes, then each part that is brought to the device."""
        return [self.num_bytes, *(part.num_bytes for part in self.parts if part.num_bytes)]

    @property
    def outside(self) -> int:
        """Bytes of other memory; parts are prepared one after the other."""
        return max((part.outside for part in self.parts), default=0)

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(map(padded, self.pieces)) + self.outside

    def uses(self, param: int) -> bool:
        """Say whether a parameter is brought together for it."""
        return any(part.gathered and part.param == param for part in self.parts)


def work_of(task: Any, params: Sequence[Any], tensors: Mapping[str, Any], device: Any) -> Work:
    """Return what a task needs: values and scales of the same blocks are made at once."""
    found: dict[Any, Part] = {}
    parts = []
    for item in task.items:
        param, recipe, _, start, size, gathered, _, num_bytes = item
        if recipe == "copy" or not num_bytes:
            # Parts that are copied, and those that only take part in bringing a parameter together.
            part = Part(param, start, size, gathered, [item] if num_bytes else [])
            parts.append(part)
            continue
        of_blocks = recipe.endswith("_scale")
        kind = recipe.removesuffix("_scale")
        first, count = _widened(start, size, params[param][1], of_blocks=of_blocks)
        key = (param, kind, tuple(first), tuple(count), gathered)
        known = found.get(key)
        if known is None or (known.scales if of_blocks else known.values) is not None:
            known = found[key] = Part(param, first, count, gathered)
            parts.append(known)
        if of_blocks:
            known.scales = item
        else:
            known.values = item
    for part in parts:
        _measure(part, tensors[params[part.param][0]], device)
    return Work(task.num_bytes, parts)


def _measure(part: Part, tensor: Any, device: Any) -> None:
    """Note the memory that a part takes."""
    import torch

    width, wanted = tensor.element_size(), torch.device(device)
    if part.gathered and is_dtensor(tensor):
        # Shards come in one piece, and are put in their order in another one.
        part.outside = 2 * tensor.numel() * width
    if not (part.copies or part.values or part.scales):
        return
    volume = 1
    for size in part.size:
        volume *= size
    if tensor.device.type != wanted.type or (wanted.index is not None and tensor.device.index != wanted.index):
        part.num_bytes = volume * width
    if part.values or part.scales:
        takes = dtype_name(tensor.dtype) in _kernel.DTYPES and _kernel.is_loaded(device)
        part.outside += 0 if takes else scratch_bytes(part.size)


def on(device: Any) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one."""
    import torch

    found = torch.device(device)
    return torch.cuda.device(found) if found.type == "cuda" else nullcontext()


class Clock:
    """Times of work on a GPU by its own events, because calls return before their work is done."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, Any]] = []
        self.first, self.since = self.event(), time.perf_counter()

    def event(self) -> Any:
        """Return an event at the end of the current stream's work."""
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add_times(self, report: Report) -> None:
        """Add the times to a report; the work is over."""
        for stage, begin, end in self.spans:
            span = (self.since + self.first.elapsed_time(event) / 1e3 for event in (begin, end))
            report.ran(stage, *span)


class Preparer:
    """Prepares tasks of one version.

    On a GPU, parts of offloaded parameters come on a stream of their own, and work is ordered on the current stream:
    calls return before it is done. One parameter that was brought together is kept, for the parts that follow.
    """

    def __init__(self, params: Sequence[Any], tensors: Mapping[str, Any], report: Report, device: Any) -> None:
        import torch

        self.params, self.tensors, self.report = params, tensors, report
        self.starts: dict[Any, Any] = {}
        self.device = torch.device(device)
        self.whole: tuple[int, Any] | None = None
        self.gathers = 0
        self.stream: Any = None
        self.began: Any = None  # behind work that may write the parameters
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            # Work that writes the parameters may be under way there.
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self.clock = Clock()
            self.began = self.clock.first

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parameter that is kept."""
        return self.whole[1].numel() * self.whole[1].element_size() if self.whole else 0

    def add_times(self) -> None:
        """Add the times of a GPU, whose work is over, to the report."""
        if self.stream is not None:
            self.clock.add_times(self.report)

    def wait(self) -> None:
        """Wait for the end of all work that was ordered."""
        import torch

        if self.stream is not None:
            self.stream.synchronize()
            torch.cuda.current_stream(self.device).synchronize()

    def _source(self, part: Part) -> Any:
        """Return a part where it lies."""
        import torch

        tensor = self.tensors[self.params[part.param][0]]
        if not part.gathered:
            with torch.no_grad():
                origin, own = local(tensor, self.starts)
            return self._own(part, origin, own)
        if self.whole is None or self.whole[0] != part.param:
            self.whole = None
            begin = time.perf_counter()
            full = tensor.full_tensor().detach() if is_dtensor(tensor) else tensor.detach()
            self.report.ran("gather", begin, time.perf_counter())
            self.whole = (part.param, full)
            self.gathers += 1
        wanted = part.copies or part.values or part.scales
        return self.whole[1][slices(part.start, part.size, [0] * len(part.size))] if wanted else None

    def _own(self, part: Part, origin: Sequence[int], own: Any) -> Any:
        """Return a part of what this rank holds, which is the plan's as a rule: a model may have been divided anew."""
        if own.shape == tuple(part.size) and tuple(origin) == tuple(part.start):
            return own
        areas = zip(part.start, part.size, origin, own.shape, strict=True)
        if not all(zero <= first and first + count <= zero + held for first, count, zero, held in areas):
            name = self.params[part.param][0]
            here = f"{list(own.shape)} from {list(origin)} on"
            raise ValueError(f"model: of {name!r} this rank has {here}; the plan, {part.size} from {part.start} on")
        return own[slices(part.start, part.size, origin)]

    def _moved(self, source: Any, to: Any) -> Any:
        """Begin to copy a part to its place on the device."""
        found = to.view(source.dtype).view(source.shape)
        # Memory of the host is used at once: its copies have to be over.
        return found.copy_(source, non_blocking=self.stream is not None)

    def _make(self, part: Part, source: Any, memory: Any) -> None:
        """Make a part's items, in flat memory of the task's bytes."""
        import torch

        def room(item: _Item) -> Any:
            _, _, dtype, _, size, _, offset, num_bytes = item
            return memory[offset : offset + num_bytes].view(getattr(torch, dtype)).view(size)

        for item in part.copies:
            room(item).copy_(source)
        if part.values is None and part.scales is None:
            return
        window, values, scales = (0, 0, 0, 0), None, None
        if part.values is not None:
            values, (start, size) = room(part.values), part.values[3:5]
            window = (start[-2] - part.start[-2], start[-1] - part.start[-1], size[-2], size[-1])
        if part.scales is not None:
            scales = room(part.scales)
        recipe = (part.values or part.scales or ("", ""))[1]
        blocks_into(source, values, window, scales, powers_of_two="ue8m0" in recipe)

    def prepare(self, work: Work, memory: Sequence[Any]) -> Any:
        """Prepare a task in flat memory for its pieces; return the event behind it on a GPU, or None: it is done."""
        moved = iter(memory[1:])
        places = [next(moved) if part.num_bytes else None for part in work.parts]
        if self.stream is None:
            for part, place in zip(work.parts, places, strict=True):
                source = self._source(part)
                begin = time.perf_counter()
                if place is not None:
                    source = self._moved(source, place)
                self._make(part, source, memory[0])
                self.report.ran("prepare", begin, time.perf_counter())
            return None
        ready = self._brought(work, places)
        begin = self.clock.event()
        for number, (part, place) in enumerate(zip(work.parts, places, strict=True)):
            source = ready.get(number)
            if source is None:
                source = self._source(part)
                if place is not None:
                    source = self._moved(source, place)
            self._make(part, source, memory[0])
        self.clock.spans.append(("prepare", begin, self.clock.event()))
        return self.clock.spans[-1][2]

    def _brought(self, work: Work, places: Sequence[Any]) -> dict[int, Any]:
        """Begin to copy what this rank holds on the host; return the copies, for work that is ordered from now on."""
        import torch

        found = {}
        with torch.cuda.stream(self.stream):
            begin = self.clock.event()
            for number, (part, place) in enumerate(zip(work.parts, places, strict=True)):
                if place is not None and not part.gathered:
                    found[number] = self._moved(self._source(part), place)
            end = self.clock.event()
        if found:
            self.clock.spans.append(("gather", begin, end))
            torch.cuda.current_stream(self.device).wait_event(end)
        return found
