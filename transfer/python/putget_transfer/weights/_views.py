"""Views of contiguous tensors, as boxes of their elements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_PARTS = 4096
"""A view that falls into more boxes is refused."""


@dataclass(frozen=True)
class Located:
    """A box of a base tensor that a view shows, or a part of it.

    Attributes:
        start: Its first element in the base.
        size: Its size in each dimension of the base.
        steps: For each dimension of the base, which dimension of the view runs along it, and how many elements of
            that dimension one element of the base is: (dimension, step); None where the size is 1.
        first: Where the box begins in each dimension of the view.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    steps: tuple[tuple[int, int] | None, ...]
    first: tuple[int, ...]

    def strides(self, view_strides: Sequence[int]) -> tuple[list[int], int]:
        """Return strides along the base's dimensions and the offset of the box, in a tensor of the view's shape."""
        strides = [view_strides[step[0]] * step[1] if step else 0 for step in self.steps]
        return strides, sum(first * stride for first, stride in zip(self.first, view_strides, strict=True))


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return strides[::-1]


def _splits(view: Sequence[tuple[int, int, int]], shape: Sequence[int], base: Sequence[int]) -> Any:
    """Split each dimension of a view (number, size, stride) into those of the base that it runs along.

    Returns:
        Lists of (base dimension, view dimension, size, step in the view, step in the base).
    """
    found = []
    for number, size, stride in view:
        left, step = size, 1
        for dim in reversed(range(len(shape))):
            if left == 1:
                break
            if shape[dim] == 1 or stride * step < base[dim]:
                continue
            along = stride * step // base[dim]
            if stride * step % base[dim] or along >= shape[dim]:
                continue
            room = shape[dim] // along if shape[dim] % along == 0 else -(-shape[dim] // along)
            take = min(left, room)
            if left % take:
                raise ValueError(f"a view of size {size} and stride {stride} of a tensor of shape {tuple(shape)}")
            found.append((dim, number, take, step, along))
            left, step = left // take, step * take
        if left != 1:
            raise ValueError(f"a view of size {size} and stride {stride} of a tensor of shape {tuple(shape)}")
    return found


def locate(view: Any, shape: tuple[int, ...]) -> list[Located]:
    """Return the boxes of a contiguous tensor of `shape` that a view of it shows.

    Raises:
        ValueError: The view repeats elements, or falls into too many boxes.
    """
    base, start, left = _contiguous(shape), [], int(view.storage_offset())
    for stride, size in zip(base, shape, strict=True):
        start.append(left // stride if size else 0)
        left -= start[-1] * stride
    sizes, strides = list(view.shape), list(view.stride())
    if 0 in sizes:
        return []
    dims = [(number, size, strides[number]) for number, size in enumerate(sizes) if size != 1]
    if any(stride == 0 for _, _, stride in dims):
        raise ValueError(f"a view of shape {tuple(sizes)} repeats elements of a tensor of shape {shape}")
    steps: list[tuple[int, int] | None] = [None] * len(shape)
    box = [1] * len(shape)
    apart = []
    # The finest step along each dimension of the base stays a dimension of the box; the others make several boxes.
    for dim, number, count, step, along in sorted(_splits(dims, shape, base), key=lambda split: split[4]):
        if along == 1 and steps[dim] is None:
            steps[dim], box[dim] = (number, step), count
        else:
            apart.append((dim, number, count, step, along))
    for dim, count in enumerate(box):
        if start[dim] + count > shape[dim]:
            raise ValueError(f"a view of shape {tuple(sizes)} leaves a dimension of a tensor of shape {shape}")
    boxes = 1
    for split in apart:
        boxes *= split[2]
    if boxes > MOST_PARTS:
        raise ValueError(f"a view of shape {tuple(sizes)} falls into {boxes} parts of a tensor of shape {shape}")
    located = []
    for at in itertools.product(*(range(split[2]) for split in apart)):
        own, first = list(start), [0] * len(sizes)
        for index, (dim, number, _, step, along) in zip(at, apart, strict=True):
            own[dim] += index * along
            first[number] += index * step
        located.append(Located(tuple(own), tuple(box), tuple(steps), tuple(first)))
    return located


def compose(part: Located, through: Located) -> Located:
    """Return where a part of a copy lies in the tensor that was copied.

    `through` says where the copy's whole lies there; its view is the copy's shape.
    """
    start, size = list(through.start), [1] * len(through.size)
    steps: list[tuple[int, int] | None] = [None] * len(through.size)
    strides, _ = through.strides([0] * len(through.first))
    assert len(strides) == len(start)
    taken: dict[int, list[int]] = {}
    for dim, step in enumerate(through.steps):
        if step is not None:
            taken.setdefault(step[0], []).append(dim)
    for own, (first, count) in enumerate(zip(part.start, part.size, strict=True)):
        left_first, left_count, scale = first, count, 1
        # Several dimensions of the tensor may have become one of the copy: the last one runs fastest.
        for dim in sorted(taken.get(own, []), key=lambda dim: through.steps[dim][1]):  # type: ignore[index]
            room = through.size[dim]
            inside = left_first % room
            take = min(left_count, room - inside)
            if left_count > take and (inside or left_count % room):
                raise ValueError(f"a part {part} of a copy is no box of what was copied")
            start[dim] += inside
            size[dim] = take
            if part.steps[own] is not None:
                number, along = part.steps[own]  # type: ignore[misc]
                steps[dim] = (number, along * scale)
            left_first, left_count, scale = left_first // room, -(-left_count // take), scale * take
    return Located(tuple(start), tuple(size), tuple(steps), part.first)
