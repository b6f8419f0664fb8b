"""Rounds built from a seed: every rank can make its own arguments, and the oracle those of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import putget
from putget import reference

Row = tuple[tuple[int, ...], torch.dtype]

DISPATCH, COMBINE = 1, 2  # for Round.halves
APART, SENTINEL = False, True  # for Case.sentinel_rows
# How a round hands the experts' rows to combine, or ends without it.
ENDINGS = ("zero_copy", "zero_copy_flat", "flat", "strided", "transposed", "release", "open")


@dataclass(frozen=True)
class Round:
    """One dispatch and what follows it.

    Attributes:
        seed: source of ids, weights, payload bytes and expert rows.
        num_tokens: tokens of each rank.
        ending: one of ENDINGS; "open" leaves the round to the next dispatch.
        ids_dtype: torch.int32 or torch.int64.
        table: experts' ranks to copy into expert_to_rank before the round; None keeps what is there.
        max_rows: max_rows of each rank, None for the capacity.
        num_valid: num_valid_tokens of each rank, None for no padding.
        out: whether combine writes into a tensor of the caller.
        addend: whether combine adds one.
        no_expert: share of ids that are -1.
        invalid: share of ids that are out of range.
        topk_ids: ids of each rank instead of random ones.
        halves: what each rank runs in two halves, DISPATCH, COMBINE or their sum; () for nothing.
    """

    seed: int
    num_tokens: tuple[int, ...]
    ending: str = "zero_copy"
    ids_dtype: torch.dtype = torch.int32
    table: tuple[int, ...] | None = None
    max_rows: tuple[int | None, ...] | None = None
    num_valid: tuple[int | None, ...] | None = None
    out: bool = False
    addend: bool = False
    no_expert: float = 0.0
    invalid: float = 0.0
    topk_ids: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    halves: tuple[int, ...] = ()

    def in_halves(self, rank: int, operation: int) -> bool:
        return bool(self.halves) and bool(self.halves[rank] & operation)


@dataclass(frozen=True)
class Case:
    """The shape of an AllToAll and the rounds run on it.

    Attributes:
        table: the constructor's expert_to_rank; None for the default.
        wire: combine_dtype, or None.
        active: the active ranks; the rounds run on these alone.
        sentinel_rows: of combine; likewise.
        blocks: of both calls, which on CPU are threads; None: as the rule has it.
        num_stats: numbers of each rank.
        domain_of: the domain of each rank; None: one.
    """

    ep_size: int
    rounds: tuple[Round, ...]
    num_experts: int = 8
    top_k: int = 2
    max_tokens_per_rank: int = 8
    payloads: tuple[Row, ...] = (((4,), torch.float32),)
    output: Row = ((4,), torch.float32)
    table: tuple[int, ...] | None = None
    wire: torch.dtype | None = None
    active: tuple[bool, ...] | None = field(default=None)
    sentinel_rows: bool | None = None
    blocks: int | None = None
    num_stats: int = 0
    domain_of: tuple[int, ...] | None = None

    def options(self) -> dict[str, object]:
        """The arguments of the constructor."""
        options: dict[str, object] = {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "payloads": [putget.Payload(*row) for row in self.payloads],
            "output": putget.Payload(*self.output),
            "combine_dtype": self.wire,
            "num_stats": self.num_stats,
        }
        if self.sentinel_rows is not None or self.blocks is not None:
            combine = putget.tuning.Launch(self.blocks, sentinel_rows=self.sentinel_rows)
            options["tuning"] = putget.tuning.Tuning(dispatch=putget.tuning.Launch(self.blocks), combine=combine)
        if self.table is not None:
            options["expert_to_rank"] = torch.tensor(self.table, dtype=torch.int32)
        return options

    def table_of(self, index: int) -> Tensor:
        """The expert_to_rank in force in round `index`."""
        table = self.table
        for played in self.rounds[: index + 1]:
            table = played.table or table
        if table is None:
            return reference.default_expert_to_rank(self.num_experts, self.ep_size)
        return torch.tensor(table, dtype=torch.int32)

    def max_rows_of(self, index: int, rank: int) -> int:
        asked = self.rounds[index].max_rows
        rows = None if asked is None else asked[rank]
        return self.max_tokens_per_rank if rows is None else rows

    def sent(self, index: int, rank: int) -> reference.Sent:
        """The input of `rank` for dispatch in round `index`."""
        played = self.rounds[index]
        num_tokens = played.num_tokens[rank]
        generator = torch.Generator().manual_seed(played.seed * 1009 + rank)
        if played.topk_ids is not None:
            ids = torch.tensor(played.topk_ids[rank], dtype=torch.int64).reshape(num_tokens, self.top_k)
        else:
            ids = torch.randint(self.num_experts, (num_tokens, self.top_k), generator=generator)
            chance = torch.rand(num_tokens, self.top_k, generator=generator)
            wrong = torch.tensor([self.num_experts, -2, 2**31 - 1, -(2**31), self.num_experts + 7])
            if played.ids_dtype == torch.int64:
                # Truncated to 32 bits these would be experts 0 and 1.
                wrong = torch.cat([wrong, torch.tensor([2**32, -(2**32) + 1, 2**63 - 1, -(2**63)])])
            choice = torch.randint(len(wrong), (num_tokens, self.top_k), generator=generator)
            ids = torch.where(chance < played.no_expert, -1, ids)
            ids = torch.where(chance > 1 - played.invalid, wrong[choice], ids)
        return reference.Sent(
            topk_ids=ids.to(played.ids_dtype),
            topk_weights=torch.rand(num_tokens, self.top_k, generator=generator),
            payloads=tuple(random_rows((num_tokens,), row, generator) for row in self.payloads),
            num_valid_tokens=None if played.num_valid is None else played.num_valid[rank],
        )

    def stats(self, index: int, rank: int) -> Tensor | None:
        """The numbers that `rank` gives in round `index`, if it gives any."""
        generator = torch.Generator().manual_seed(self.rounds[index].seed * 1009 + 300 + rank)
        numbers = torch.randint(-(2**31), 2**31, (self.num_stats,), generator=generator).int()
        return None if self.num_stats == 0 or (index + rank) % 3 == 2 else numbers

    def told(self, index: int) -> Tensor:
        """[ep_size, num_stats]: what every rank holds then."""
        zeros = torch.zeros(self.num_stats, dtype=torch.int32)
        given = [self.stats(index, rank) for rank in range(self.ep_size)]
        return torch.stack([zeros if numbers is None else numbers for numbers in given])

    def needs(self, index: int, rank: int, other: int) -> bool:
        """Whether a combine of `rank` sums any row of `other`, in a round whose ids are all valid."""
        ids = self.sent(index, rank).topk_ids.long()
        return bool((self.table_of(index)[ids] == other).any())

    def expert_rows(self, index: int, rank: int) -> Tensor:
        """The output of the experts of `rank` in round `index`: [ep_size, max_rows, *shape], every slot."""
        shape, dtype = self.output
        generator = torch.Generator().manual_seed(self.rounds[index].seed * 1009 + 500 + rank)
        size = (self.ep_size, self.max_rows_of(index, rank), *shape)
        values = random_values(size, dtype, generator)
        if self.wire is None:
            return values
        if self.domain_of is not None:
            values = values / 64  # a sum that overflows before it is quantised is NaN everywhere in its block
        # One very large element leaves only zeros of its block: in most rows there is none.
        plain = torch.rand(size[:2], generator=generator).reshape(*size[:2], *[1] * len(shape)) < 0.8
        return torch.where(plain, torch.randn(size, generator=generator).to(dtype), values)

    def addend(self, index: int, rank: int) -> Tensor | None:
        if not self.rounds[index].addend:
            return None
        shape, dtype = self.output
        generator = torch.Generator().manual_seed(self.rounds[index].seed * 1009 + 900 + rank)
        return random_values((self.rounds[index].num_tokens[rank], *shape), dtype, generator)


def random_rows(count: tuple[int, ...], row: Row, generator: torch.Generator) -> Tensor:
    """Rows of random bytes, [*count, *shape]: a payload is opaque, so NaNs and all other patterns must survive."""
    shape, dtype = row
    if dtype == torch.bool:
        return torch.randint(2, (*count, *shape), generator=generator).bool()
    numel = torch.Size((*count, *shape)).numel()
    flat = torch.randint(256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return flat.view(dtype).reshape(*count, *shape)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Finite numbers of very different size, so that any other order of addition or rounding shows in the bits.

    Zeros of both signs, subnormal numbers and ones whose sum overflows are among them. No sum is NaN, because the bits
    of a NaN differ between processors.
    """
    values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-10, 11, shape, generator=generator)
    kind = torch.randint(40, shape, generator=generator)
    values = torch.where(kind == 0, -0.0, values)
    values = torch.where(kind == 1, values * torch.finfo(dtype).smallest_normal * 2.0**-4, values)
    values = torch.where(kind == 2, torch.finfo(dtype).max, values)
    return values.to(dtype)
