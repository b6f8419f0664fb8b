"""Where each expert of each layer lies in a host store: a part for each rank, records first, then experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from putget._arguments import check_int

RECORD_BYTES = 64  # a line of a CPU's cache: writers of neighbours do not meet
_EXPERT_ALIGNMENT = 4096  # bytes
_MOST_EXPERTS = 1 << 16
_MOST_LAYERS = 1 << 16
_MOST_EXPERT_BYTES = 1 << 40


@dataclass(frozen=True)
class Place:
    """Where one expert lies.

    Attributes:
        rank: whose part it is in.
        record: offset of its record in the part, in bytes.
        offset: of its bytes.
    """

    rank: int
    record: int
    offset: int


@dataclass(frozen=True)
class StoreLayout:
    """The same on all ranks.

    Attributes:
        expert_bytes: of each layer.
        num_experts: of each layer.
        num_ranks: that have a part. A rank has consecutive experts of all layers.
        alignment: of a part's size, in bytes.
    """

    expert_bytes: tuple[int, ...]
    num_experts: int
    num_ranks: int
    alignment: int

    @classmethod
    def of(cls, expert_bytes: Sequence[int], num_experts: int, num_ranks: int, alignment: int) -> StoreLayout:
        """Checks what the caller gave.

        Raises:
            ValueError: A number is out of range.
        """
        if not isinstance(expert_bytes, Sequence) or isinstance(expert_bytes, str | bytes):
            raise ValueError(f"expert_bytes is {expert_bytes!r}, expected the bytes of an expert of each layer")
        check_int("the length of expert_bytes", len(expert_bytes), 1, _MOST_LAYERS)
        for layer, num_bytes in enumerate(expert_bytes):
            check_int(f"expert_bytes[{layer}]", num_bytes, 1, _MOST_EXPERT_BYTES)
        check_int("num_experts", num_experts, 1, _MOST_EXPERTS)
        return cls(tuple(expert_bytes), num_experts, num_ranks, alignment)

    @property
    def num_layers(self) -> int:
        """Layers: the length of `expert_bytes`."""
        return len(self.expert_bytes)

    def first_of(self, rank: int) -> int:
        """The first expert of a rank's part."""
        return rank * self.num_experts // self.num_ranks

    def count_of(self, rank: int) -> int:
        """Experts of each layer in a rank's part."""
        return self.first_of(rank + 1) - self.first_of(rank)

    def part_bytes(self, rank: int) -> int:
        """Size of a rank's part; 0 if there are more ranks than experts and it has none."""
        count = self.count_of(rank)
        used = self._records(count) + count * sum(map(_stride, self.expert_bytes)) if count else 0
        return _round_up(used, self.alignment)

    def place(self, layer: int, expert: int) -> Place:
        """Where an expert lies.

        Raises:
            ValueError: There is no such layer or expert.
        """
        check_int("layer", layer, 0, self.num_layers - 1)
        check_int("expert", expert, 0, self.num_experts - 1)
        rank = ((expert + 1) * self.num_ranks - 1) // self.num_experts
        count, at = self.count_of(rank), expert - self.first_of(rank)
        before = count * sum(map(_stride, self.expert_bytes[:layer]))
        return Place(
            rank=rank,
            record=(layer * count + at) * RECORD_BYTES,
            offset=self._records(count) + before + at * _stride(self.expert_bytes[layer]),
        )

    def _records(self, count: int) -> int:
        return _round_up(self.num_layers * count * RECORD_BYTES, _EXPERT_ALIGNMENT)


def _stride(expert_bytes: int) -> int:
    return _round_up(expert_bytes, _EXPERT_ALIGNMENT)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
