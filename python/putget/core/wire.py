"""How the rows of combine travel, as the constructor's arguments say."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from putget import _abi
from putget.payload import Payload
from putget.tuning import Tuning

_QUANTISED_PACK = 16  # a quantised row has a multiple of this many elements


@dataclass(frozen=True)
class Wire:
    """How the rows of combine travel, checked.

    Attributes:
        type: ``_abi.WIRE_SAME`` or ``_abi.WIRE_FP8``.
    """

    type: int = _abi.WIRE_SAME

    @staticmethod
    def checked(dtype: torch.dtype | None, output: Payload) -> Wire:
        """From the constructor's combine_dtype.

        Raises:
            ValueError: It is not allowed.
        """
        if dtype is None or dtype == output.dtype:
            return Wire()
        if dtype != torch.float8_e4m3fn:
            raise ValueError(f"combine_dtype is {dtype!r}, allowed are {output.dtype} and torch.float8_e4m3fn")
        elements = output.row_bytes // output.dtype.itemsize
        if elements % _QUANTISED_PACK:
            raise ValueError(
                f"combine_dtype is torch.float8_e4m3fn, output has {elements} elements, "
                f"expected a multiple of {_QUANTISED_PACK}"
            )
        return Wire(_abi.WIRE_FP8)

    def __str__(self) -> str:
        return "as written" if self.type == _abi.WIRE_SAME else "float8_e4m3fn, a scale for 128"


def check_tuning(tuning: Tuning | None, wire: Wire) -> Tuning:
    """Tuning, empty for None.

    Raises:
        ValueError: It is no putget.tuning.Tuning, or not for rows that travel so.
    """
    if tuning is None:
        return Tuning()
    if not isinstance(tuning, Tuning):
        raise ValueError(f"tuning is {tuning!r}, expected a putget.tuning.Tuning")
    if wire.type != _abi.WIRE_SAME and tuning.combine is not None and tuning.combine.sentinel_rows is False:
        raise ValueError("sentinel_rows is False in tuning.combine, but rows of combine_dtype travel in no other way")
    return tuning
