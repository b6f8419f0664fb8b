"""The plan of a stress run, round by round, known to every rank from the seed: sizes, endings, layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COMBINE, RELEASE, LEAVE_OPEN = ENDINGS = (0, 1, 2)
NUM_LAYERS = 2


@dataclass(frozen=True)
class Plan:
    """Tables on the CPU.

    Attributes:
        sizes: [rounds, ranks] int32, tokens of each rank, 0 included.
        endings: [rounds] int64, COMBINE, RELEASE or LEAVE_OPEN (the next dispatch releases the round).
        layers: [rounds] int64, which of the NUM_LAYERS objects that share the workspace.
        replayed: [rounds, ranks] bool, whether the rank replays a graph; each rank for itself.
    """

    sizes: Tensor
    endings: Tensor
    layers: Tensor
    replayed: Tensor

    @property
    def rounds(self) -> int:
        return self.sizes.shape[0]


def make_plan(rounds: int, ranks: int, max_tokens: int, replay_share: float, seed: int) -> Plan:
    """Random sizes: an eighth zero, an eighth full, one round in 64 without any token; one in 8 is not combined."""
    generator = torch.Generator().manual_seed(seed)

    def draw(bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=generator)

    sizes = draw(max_tokens + 1, rounds, ranks)
    kind = draw(8, rounds, ranks)
    sizes = torch.where(kind == 0, 0, torch.where(kind == 1, max_tokens, sizes))
    sizes[draw(64, rounds) == 0] = 0
    ending = draw(16, rounds)
    endings = torch.where(ending == 0, RELEASE, torch.where(ending == 1, LEAVE_OPEN, COMBINE))
    replayed = torch.rand(rounds, ranks, generator=generator) < replay_share
    return Plan(sizes.to(torch.int32), endings, draw(NUM_LAYERS, rounds), replayed)


def batches_for(max_tokens: int) -> tuple[int, ...]:
    """The batch sizes that graphs are captured for: powers of two, and the capacity."""
    sizes = [0]
    size = 1
    while size < max_tokens:
        sizes.append(size)
        size *= 4
    return (*sizes, max_tokens)
