"""DeepEP's expanded layout: a row for each (token, local expert), grouped by expert. On the device, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Expanded:
    """Where each (received row, choice) lies among rows that are grouped by expert.

    Attributes:
        counts: [local experts] int32, rows of each.
        aligned: [local experts] int32, the same rounded up.
        slots: [rows, top_k] int64, -1 for experts of other ranks.
    """

    counts: torch.Tensor
    aligned: torch.Tensor
    slots: torch.Tensor

    @property
    def begins(self) -> torch.Tensor:
        """[local experts] int32: where the rows of each begin."""
        return (self.aligned.cumsum(0) - self.aligned).int()


def expand(local: torch.Tensor, num_local: int, alignment: int) -> Expanded:
    """The layout; within an expert rows keep their order.

    Args:
        local: [rows, top_k] ids of this rank's experts, -1 for others.
        num_local: Experts of this rank.
        alignment: Groups begin at multiples of it.
    """
    chosen = torch.where(local >= 0, local, num_local).flatten().long()
    counts = count(chosen, num_local)
    aligned = -(-counts // alignment) * alignment
    one_more = torch.zeros(1, dtype=torch.int32, device=local.device)
    first = torch.cat([one_more, counts.cumsum(0).int()])
    begins = torch.cat([aligned.cumsum(0).int() - aligned, one_more])
    order = chosen.argsort(stable=True)
    expert = chosen[order]
    slot = torch.arange(len(chosen), device=local.device) - first[expert] + begins[expert]
    slots = torch.empty_like(chosen).scatter_(0, order, torch.where(expert < num_local, slot.long(), -1))
    return Expanded(counts, aligned, slots.view(local.shape))


def count(values: torch.Tensor, kinds: int) -> torch.Tensor:
    """[kinds] int32: how often each of 0 to kinds - 1 occurs; other values up to kinds are left out.

    (``torch.bincount`` waits for the device.)
    """
    flat = values.flatten()
    found = torch.zeros(kinds + 1, dtype=torch.int32, device=flat.device)
    return found.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))[:kinds]


def sources(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """[num_slots] int64: which (row, choice), counted through, lies in each slot; -1 for none."""
    flat = slots.flatten()
    place = torch.where((flat >= 0) & (flat < num_slots), flat, num_slots)
    found = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=slots.device)
    return found.scatter_(0, place, torch.arange(len(flat), device=slots.device))[:num_slots]


def take(rows: torch.Tensor, index: torch.Tensor, zeros: bool) -> torch.Tensor:
    """rows[index] along the first dimension; where index is -1 some row, or zeros."""
    if not len(rows):
        return rows.new_zeros(len(index), *rows.shape[1:])
    taken = rows[index.clamp(min=0)]
    if zeros:
        nothing = (index < 0).view(-1, *[1] * (rows.dim() - 1))
        taken.view(torch.uint8).masked_fill_(nothing, 0) if taken.dim() > 1 else taken.masked_fill_(nothing, 0)
    return taken


def fold(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[n, *]: for each received row the sum of its experts' rows in float32, in their order, in the dtype of rows."""
    total = torch.zeros(len(slots), *rows.shape[1:], dtype=torch.float32, device=rows.device)
    for choice in slots.T:
        if len(rows):
            total += torch.where((choice >= 0)[:, None], rows[choice.clamp(min=0)].float(), 0.0)
    return total.to(rows.dtype)


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same scales in column-major order; columns begin at multiples of 16 bytes."""
    per_column = -(-len(scales) // 4) * 4
    place = scales.new_empty(scales.shape[1], per_column).T[: len(scales)]
    return place.copy_(scales)
