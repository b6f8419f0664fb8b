"""A payload: the shape and type of one row that travels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Payload:
    """One kind of row.

    Attributes:
        shape: Shape of one token's row, e.g. ``(7168,)``; ``()`` is one value. What takes rows takes up to 64 MiB each.
        dtype: Any torch dtype; rows are moved as bytes. Rows whose size is a multiple of 16 bytes move at full speed.

    Raises:
        ValueError: The shape has a size below 1, or dtype is not a torch.dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"Payload dtype is {self.dtype!r}, expected a torch.dtype")
        try:
            shape = tuple(self.shape)
        except TypeError:
            raise ValueError(f"Payload shape is {self.shape!r}, expected a tuple of sizes") from None
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in shape):
            raise ValueError(f"Payload shape is {self.shape!r}, expected sizes of at least 1")
        object.__setattr__(self, "shape", shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
