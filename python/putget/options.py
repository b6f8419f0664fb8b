"""How combine's rows travel, and how kernels are launched: what a caller may choose."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

import torch

from putget import _abi
from putget.payload import Payload

_DIRECTIONS = ("pull", "push")
_QUANTISED_PACK = 16  # a quantised row has a multiple of this many elements
_MOST_THREADS = 768


@dataclass(frozen=True)
class Wire:
    """How the rows of combine travel, checked.

    Attributes:
        pushes: Owners of rows put them into the inboxes of those that sum them; else those get them.
        type: ``_abi.WIRE_SAME``, ``WIRE_FP8_BLOCK`` or ``WIRE_FP8_STATIC``.
        scale: Of ``WIRE_FP8_STATIC``.
    """

    pushes: bool = False
    type: int = _abi.WIRE_SAME
    scale: float = 0.0

    @staticmethod
    def checked(direction: str, dtype: torch.dtype | None, scale: float | None, output: Payload) -> Wire:
        """From the constructor's combine_direction, combine_dtype and combine_scale.

        Raises:
            ValueError: One of them is not allowed, or not with the others.
        """
        if direction not in _DIRECTIONS:
            raise ValueError(f"combine_direction is {direction!r}, allowed are {' and '.join(map(repr, _DIRECTIONS))}")
        pushes = direction == "push"
        if dtype is None or dtype == output.dtype:
            if scale is not None:
                raise ValueError(f"combine_scale is {scale!r}, but combine_dtype is not torch.float8_e4m3fn")
            return Wire(pushes)
        if dtype != torch.float8_e4m3fn:
            raise ValueError(f"combine_dtype is {dtype!r}, allowed are {output.dtype} and torch.float8_e4m3fn")
        elements = output.row_bytes // output.dtype.itemsize
        if elements % _QUANTISED_PACK:
            raise ValueError(
                f"combine_dtype is torch.float8_e4m3fn, output has {elements} elements, "
                f"expected a multiple of {_QUANTISED_PACK}"
            )
        if scale is None:
            return Wire(pushes, _abi.WIRE_FP8_BLOCK)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 1e-30 <= scale <= 1e30:
            raise ValueError(f"combine_scale is {scale!r}, expected a number from 1e-30 to 1e30")
        return Wire(pushes, _abi.WIRE_FP8_STATIC, float(scale))

    def __str__(self) -> str:
        kinds = {
            _abi.WIRE_SAME: "as written",
            _abi.WIRE_FP8_BLOCK: "float8_e4m3fn, a scale for 128",
            _abi.WIRE_FP8_STATIC: f"float8_e4m3fn, scale {self.scale:g}",
        }
        return f"{'push' if self.pushes else 'pull'}, {kinds[self.type]}"


@dataclass(frozen=True)
class Launch:
    """The shape of one kernel launch. As an argument, a field of 0 is left to the rule (docs/protocol/launches.md).

    Attributes:
        blocks: CTAs; at most one an SM.
        threads: Of a CTA, a multiple of 32 up to 768.
        segment_bytes: Of a row, for one warp at a time: a multiple of 512.
        splits: Dispatch: warps that share the targets of one segment, a power of two up to 128. Combine: above 1, all
            blocks send rows that are their own flags, and ``movers`` of them do nothing else.
        movers: Combine: blocks that move rows before they are summed, or send those that are their own flags, where any
            are to be moved or sent; the other blocks sum meanwhile (see ``splits``), or where there are no others, the
            same ones.
        inline_flags: Combine, on CPU too: 2 for rows that are their own flags: whoever has them sends them, and what
            has come says so by its value; 1 for rows that are got, or pushed and told of. Where 2 cannot be had (rows
            whose bytes are no multiple of 16, more of them than the workspace has room for), it is 1. The result is
            the same. Each rank as it likes.

    Raises:
        ValueError: A field is out of range.
    """

    blocks: int = 0
    threads: int = 0
    segment_bytes: int = 0
    splits: int = 0
    movers: int = 0
    inline_flags: int = 0

    def __post_init__(self) -> None:
        ranges = (
            ("blocks", 1, 256),
            ("threads", 32, _MOST_THREADS),
            ("segment_bytes", 512, 1 << 26),
            ("splits", 1, 128),
            ("movers", 1, 256),
            ("inline_flags", 1, 2),
        )
        for name, multiple, most in ranges:
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most or value % multiple:
                raise ValueError(f"Launch {name} is {value!r}, expected a multiple of {multiple} from 0 to {most}")
        if self.splits & (self.splits - 1):
            raise ValueError(f"Launch splits is {self.splits!r}, expected a power of two")


def check_launch(name: str, launch: Launch | None) -> _abi.Launch:
    """For the C ABI.

    Raises:
        ValueError: It is no putget.Launch.
    """
    if launch is None:
        return _abi.Launch()
    if not isinstance(launch, Launch):
        raise ValueError(f"{name} is {launch!r}, expected a putget.Launch")
    return _abi.Launch(*astuple(launch))


def wire_row_bytes(wire: Wire, output: Payload) -> int:
    """Bytes of one row of combine as it travels."""
    if wire.type == _abi.WIRE_SAME:
        return output.row_bytes
    elements = output.row_bytes // output.dtype.itemsize
    scales = math.ceil(elements / 128) if wire.type == _abi.WIRE_FP8_BLOCK else 0
    return -(-(elements + 4 * scales) // 16) * 16
