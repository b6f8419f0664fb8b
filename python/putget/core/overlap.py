"""Which of a caller's tensors may share bytes with a workspace, or with each other.

Peers write into a workspace while a round runs, and kernels read and write in no order that a caller knows. So two
tensors of one call share no bytes, unless every element is read before it is written, by the same thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from putget import _abi
from putget.core.geometry import Geometry
from putget.memory.native_memory import Memory


class Span:
    """The bytes of a workspace on this rank, as one object uses them.

    Args:
        memory: Of the workspace on this rank.
        geometry: Of the object.
    """

    def __init__(self, memory: Memory, geometry: Geometry) -> None:
        self._begin = memory.address(memory.ep_rank)
        self._end = self._begin + memory.num_bytes
        # No tensor of a call is so long that it begins before this address and ends in the workspace.
        rows = (8 * geometry.top_k, *(row.row_bytes for row in (*geometry.payloads, geometry.output)))
        self._near = self._begin - geometry.max_tokens_per_rank * max(rows)
        self._geometry = geometry
        self._layout: _abi.Layout = geometry.layout()
        self._output = self._begin + int(self._layout.output)

    def addresses(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Addresses of contiguous tensors that lie outside.

        Raises:
            ValueError: A byte of one lies in the workspace.
        """
        near, end = self._near, self._end
        found = [tensor.data_ptr() for tensor in tensors]
        for index, begin in enumerate(found):
            if near < begin < end:
                self._check(names[index], tensors[index])
        return found

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        begin = tensor.data_ptr()
        if begin < self._end and begin + tensor.nbytes > self._begin:
            raise ValueError(f"{name} lies in the workspace, expected memory outside: clone it first")

    def result(self, out: torch.Tensor, addend: torch.Tensor | None, moved: tuple[int, int]) -> tuple[int, int | None]:
        """The addresses of what combine writes and of what it adds, which may be the same tensor.

        Args:
            out: Contiguous.
            addend: Contiguous, as long as out, or None.
            moved: First address, and that behind the last, of the rows from outside that combine takes.

        Raises:
            ValueError: One of them lies in the workspace, or out overlaps what is read.
        """
        near, end = self._near, self._end
        begin = out.data_ptr()
        if near < begin < end:
            self._check("out", out)
        if begin < moved[1] and moved[0] < begin + out.nbytes:
            raise ValueError("out overlaps x, expected memory of its own")
        if addend is None:
            return begin, None
        added = addend.data_ptr()
        if near < added < end:
            self._check("addend", addend)
        if added != begin and abs(added - begin) < out.nbytes:
            raise ValueError("out overlaps addend, expected memory of its own, or addend itself")
        return begin, added

    def may_read_late(self, x: torch.Tensor, out: torch.Tensor | None) -> bool:
        """Whether combine may read contiguous x until its end, by accesses of 16 bytes.

        Not in the workspace, where peers may write their next rows before that, nor where it writes out; nor if it is
        empty, as where a rank has no expert.
        """
        begin, num_bytes = x.data_ptr(), x.nbytes
        if not num_bytes or begin % 16 or (self._begin < begin + num_bytes and begin < self._end):
            return False
        return out is None or out.data_ptr() >= begin + num_bytes or begin >= out.data_ptr() + out.nbytes

    def takes_in_place(self, x: torch.Tensor, strides: tuple[int, int], max_rows: int) -> bool:
        """Whether rows for combine are ``combine_input`` itself.

        Args:
            x: Rows.
            strides: In bytes, (slot, source).
            max_rows: Slots of each source.

        Raises:
            ValueError: They lie in the workspace otherwise than as ``combine_input``, or as a received payload, in
                its own order. Of a payload each source overwrites its own rows alone, when it has them all back.
        """
        begin = x.data_ptr()
        if begin >= self._end or begin + extent(x) <= self._begin:
            return False
        output = self._geometry.output
        if begin == self._output and self._in_order(strides, output.row_bytes, max_rows):
            return True
        for index, payload in enumerate(self._geometry.payloads):
            offset = begin - self._begin - int(self._layout.payload[index])
            fits = 0 <= offset <= payload.row_bytes - output.row_bytes
            if fits and self._in_order(strides, payload.row_bytes, max_rows):
                return False
        raise ValueError(
            "x lies in the workspace, expected combine_input or a received payload, whole and in its own order, or "
            "memory outside: clone it first"
        )

    def _in_order(self, strides: tuple[int, int], row_bytes: int, max_rows: int) -> bool:
        """Whether row (slot, source) is where dispatch puts it. The stride of a single row says nothing."""
        slot, source = strides
        ep_size = self._geometry.ep_size
        return (max_rows == 1 or slot == row_bytes * ep_size) and (ep_size == 1 or source == row_bytes)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to behind its last, those between its elements included."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def check_no_grad(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError where autograd would have to follow a tensor: gradients do not pass through combine."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad, expected a tensor that does not: detach it, or use torch.no_grad()")
