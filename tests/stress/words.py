"""The expected value of every word of a stress round, computed on both sides from (round, source, token, column).

All of it is torch arithmetic on the rank's device, without synchronisation, so that a CUDA graph can capture it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PRIMES = (-1640531535, -2048144777, -1028477379, 668265263, 374761393)  # odd 32-bit constants, as signed numbers


def mix(*parts: Tensor | int) -> Tensor:
    """A hash of int32 tensors (broadcast together): int32, all 32 bits well mixed. Multiplication wraps."""
    total: Tensor | int = 0
    for part, prime in zip(parts, _PRIMES, strict=False):
        total = total + part * prime if isinstance(part, Tensor) else total + _wrapped(part * prime)
    assert isinstance(total, Tensor)
    h = total.to(torch.int32)
    h = (h ^ (h >> 15)) * 739982445
    h = (h ^ (h >> 12)) * 695872825
    return h ^ (h >> 15)


def small(h: Tensor, bound: int) -> Tensor:
    """Numbers in [0, bound) from a hash."""
    return (h & 0x7FFFFFFF) % bound


def _wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
