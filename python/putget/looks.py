"""Looks of tensors: an equal call needs no checks again, because its tensors look as they did when the checks passed.

A check looks at shapes, dtypes, devices and strides alone; addresses, which change with every call, are checked every
time. A tensor can change in place, so what a check looks at is compared each time, and never the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# type, shape, dtype, device and strides
Looks = tuple[tuple[Any, ...], ...]


def looks_of(values: Sequence[Any]) -> Looks | None:
    """Returns, for each contiguous tensor, the properties that checks read; None if one value is no tensor.

    Strides are not compared but for their being contiguous, because those of a dimension of length 1 say nothing.
    """
    try:
        return tuple([(type(x), x.shape, x.dtype, x.device, x.is_contiguous()) for x in values])
    except (AttributeError, TypeError, RuntimeError):  # the checks say what it is instead
        return None


def strided_looks_of(value: Any) -> Looks | None:
    """The same for one tensor whose strides matter."""
    try:
        return ((type(value), value.shape, value.dtype, value.device, value.stride()),)
    except (AttributeError, TypeError, RuntimeError):
        return None


def kinds_of(values: Sequence[Any]) -> Looks | None:
    """The same for rows of tensors, whose number may be another in each call."""
    try:
        return tuple([(type(x), x.shape[1:], x.dtype, x.device, x.is_contiguous()) for x in values])
    except (AttributeError, TypeError, RuntimeError):
        return None
