"""The rows of experts, as grouped products take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertRows:
    """Rows, and which expert has which.

    Attributes:
        codes: [capacity, k] float8_e4m3fn, contiguous, k a multiple of 128; or bfloat16, k a multiple of 64.
        scales: [capacity, k / 128] float32, contiguous: one per 128 values; None of bfloat16.
        starts: [num_experts] int32: the first row of each expert.
        counts: [num_experts] int32: its rows.
    """

    codes: Tensor
    scales: Tensor | None
    starts: Tensor
    counts: Tensor

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return len(self.codes)
