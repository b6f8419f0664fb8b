"""Received rows in the order of their sources, or with another word in slots without a token: one kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from putget import _abi, _abi_moe
from putget.memory.workspace import current_stream


class BySource:
    """Copies rows whose places stay the same from call to call. It reads the counts on the device.

    Args:
        num_tokens: [ep_size] int32 on the device: rows that each source sent.
        rows: Flat contiguous [max_rows * ep_size, *] for each kind of rows, as they arrived.
        into: Contiguous memory of as many bytes for each of them, on the same device: by source rank,
            [ep_size, max_rows, *].
        max_rows: Slots of each source.
        filled: Which of them has ``word`` in each 4 bytes of a slot without a token. Others have zeros there.
        word: int32.
        in_order_of_arrival: ``into`` has the order of ``rows`` instead.
    """

    def __init__(
        self,
        num_tokens: torch.Tensor,
        rows: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        max_rows: int,
        *,
        filled: int | None = None,
        word: int = 0,
        in_order_of_arrival: bool = False,
    ) -> None:
        self._device = num_tokens.device
        self._kept = (num_tokens, *rows, *into)
        self._args = self._struct(num_tokens, rows, into, max_rows)
        self._args.filled = len(rows) if filled is None else filled
        self._args.word = word
        self._args.to_order = _abi.BY_SLOT if in_order_of_arrival else _abi.BY_SOURCE
        self._ref = ctypes.byref(self._args)
        self._function = _abi.library().putget_moe_by_source

    def _struct(
        self, num_tokens: torch.Tensor, rows: Sequence[torch.Tensor], into: Sequence[torch.Tensor], max_rows: int
    ) -> _abi_moe.MoeBySourceArgs:
        slots = num_tokens.numel() * max_rows
        args = _abi_moe.MoeBySourceArgs(
            device=_abi.DEVICE_CUDA if self._device.type == "cuda" else _abi.DEVICE_CPU,
            ordinal=self._device.index or 0,
            num_tokens=num_tokens.data_ptr(),
            ep_size=num_tokens.numel(),
            max_rows=max_rows,
            from_order=_abi.BY_SLOT,
            num_payloads=len(rows),
        )
        for index, (source, target) in enumerate(zip(rows, into, strict=True)):
            args.from_rows[index] = source.data_ptr()
            args.to_rows[index] = target.data_ptr()
            args.row_bytes[index] = source.nbytes // slots
        return args

    def run(self) -> None:
        """Enqueues the kernel on the current stream; on CPU it has been done when this returns."""
        self._args.stream = current_stream(self._device)
        status = self._function(self._ref)
        if status != _abi.OK:
            _abi.raise_status(status)


def fill_empty(num_tokens: torch.Tensor, rows: torch.Tensor, max_rows: int, word: int) -> None:
    """Writes a word into slots without a token of rows [ep_size, max_rows, *] that lie by source, in place."""
    filling = BySource(num_tokens, [rows], [rows], max_rows, filled=0, word=word)
    filling._args.from_order = _abi.BY_SOURCE
    filling.run()
