"""The result of dispatch: views into the workspace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from putget.core.expert_major import ExpertMajor, ExpertMajorMemory, FlatRows
from putget.core.geometry import Geometry
from putget.errors import ProtocolMisuse

# Groups the rows of a Received of so many max_rows, of the object's n-th dispatch.
Group = Callable[[int, int, int, bool, ExpertMajorMemory | None], ExpertMajor]


@dataclass(frozen=True)
class Received:
    """The received rows, token-major, indexed by source rank.

    Valid until this round ends (combine, release, next dispatch). Each dispatch returns one of its own.

    Attributes:
        payloads: Each [ep_size, max_rows, *shape], a view into the workspace.
        topk_ids: [ep_size, max_rows, top_k] int32: the ids as sent; -1 in every empty slot.
        topk_weights: [ep_size, max_rows, top_k] float32; undefined in empty slots.
        num_tokens: [ep_size] int32 on the device: rows that each source rank sent here.
        flat: The same memory as contiguous tensors.
        stats: [ep_size, num_stats] int32, a view into the workspace: the numbers that each rank gave its dispatch;
            zeros of a rank that gave none, is not active or did not come. None without ``AllToAll(num_stats=)``.
    """

    payloads: tuple[torch.Tensor, ...]
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens: torch.Tensor
    flat: FlatRows
    stats: torch.Tensor | None
    _group: Callable[[], Group | None] = field(repr=False, compare=False)
    _round: int = field(repr=False, compare=False, default=0)

    def of_round(self, number: int) -> Received:
        """The same views for the object's n-th dispatch."""
        fresh = object.__new__(Received)
        fresh.__dict__.update(self.__dict__, _round=number)  # a tenth of what dataclasses.replace costs
        return fresh

    def expert_major(
        self, alignment: int = 1, *, copy_rows: bool = True, memory: ExpertMajorMemory | None = None
    ) -> ExpertMajor:
        """Groups the rows by local expert, every payload at once, for a grouped GEMM.

        On CUDA it enqueues one or two kernels on the current stream: no host synchronisation, no host count; it can be
        captured in a graph. Rows are placed by prefix counts over the received ids, so their order is always the same,
        (expert, source rank, token), and the time goes with the rows that came, not with max_rows * ep_size.

        Args:
            alignment: Groups begin at multiples of this many rows, 1 to 4096.
            copy_rows: False: places alone, for kernels that fetch row i of a group from ``flat.payloads`` at
                ``source_rows[i]`` themselves. ``payloads`` is empty then, and the rows' bytes are neither read nor
                written.
            memory: Where to put them, from ``AllToAll.expert_major_memory``; by default memory of the AllToAll's own,
                allocated when these sizes are first used. Room for payloads may be left unused.

        Returns:
            The groups, valid until the round ends. ``combine(rows, layout=...)`` takes the experts' rows in this
            layout.

        Raises:
            ValueError: alignment is out of range, copy_rows no bool, or memory is made for other sizes.
            ProtocolMisuse: The round of these rows has ended, also where a later one is open; or nothing is allocated
                yet while a CUDA graph is captured.
        """
        group = self._group()
        if group is None:
            raise ProtocolMisuse("expert_major: the AllToAll of these rows is gone")
        return group(self.payloads[0].shape[1], self._round, alignment, copy_rows, memory)


def flat_view(memory: torch.Tensor, offset: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[rows, *shape] over a region of uint8 memory."""
    span = memory[offset : offset + rows * math.prod(shape) * dtype.itemsize]
    return span.view(dtype).view(rows, *shape)


def by_source(flat: torch.Tensor, ep_size: int) -> torch.Tensor:
    """[max_rows * ep_size, ...] slot-major to a view [ep_size, max_rows, ...]."""
    return flat.view(flat.shape[0] // ep_size, ep_size, *flat.shape[1:]).transpose(0, 1)


def received_views(
    memory: torch.Tensor,
    geometry: Geometry,
    max_rows: int,
    num_tokens: torch.Tensor,
    group: Callable[[], Group | None],
) -> Received:
    """The first max_rows slots of every source, over uint8 symmetric memory."""
    layout, ep_size = geometry.layout(), geometry.ep_size
    rows = max_rows * ep_size
    payloads = tuple(
        flat_view(memory, layout.payload[index], rows, payload.shape, payload.dtype)
        for index, payload in enumerate(geometry.payloads)
    )
    ids = flat_view(memory, layout.topk_ids, rows, (geometry.top_k,), torch.int32)
    weights = flat_view(memory, layout.topk_weights, rows, (geometry.top_k,), torch.float32)
    return Received(
        payloads=tuple(by_source(payload, ep_size) for payload in payloads),
        topk_ids=by_source(ids, ep_size),
        topk_weights=by_source(weights, ep_size),
        num_tokens=num_tokens,
        flat=FlatRows(payloads, ids, weights),
        stats=_stats_view(memory, geometry, int(layout.stats)),
        _group=group,
    )


def _stats_view(memory: torch.Tensor, geometry: Geometry, offset: int) -> torch.Tensor | None:
    if geometry.num_stats == 0:
        return None
    return flat_view(memory, offset, geometry.ep_size, (geometry.num_stats,), torch.int32)


def combine_input_view(memory: torch.Tensor, geometry: Geometry, max_rows: int) -> torch.Tensor:
    """[ep_size, max_rows, *shape] over combine_input, with the attribute ``flat``."""
    output = geometry.output
    flat = flat_view(memory, geometry.layout().output, max_rows * geometry.ep_size, output.shape, output.dtype)
    view = by_source(flat, geometry.ep_size)
    setattr(view, "flat", flat)  # noqa: B010  (not an attribute that torch.Tensor declares)
    return view
