"""Makes the rounds of a run: inputs of every rank, the reference's routing, and the result that must come out."""

from __future__ import annotations

import torch

from putget_bench.contender import Round, make_round, with_output
from putget_bench.inputs import Source, StandInExperts
from putget_bench.settings import Settings

_Shape = tuple[object, ...]


class Rounds:
    """Rounds of any size and kind of row, from the seed alone. It keeps inputs, and the rounds of the last size.

    Args:
        rank: this rank.
        device: where it works.
        domain_of: the domain of each rank; None: all ranks are one.
    """

    def __init__(self, rank: int, device: torch.device, domain_of: tuple[int, ...] | None = None) -> None:
        self._rank = rank
        self._domain_of = domain_of
        self._device = device
        self._made: dict[_Shape, tuple[Source, StandInExperts]] = {}
        self._num_tokens: int | None = None
        self._rounds: dict[_Shape, Round] = {}

    def experts(self, settings: Settings) -> StandInExperts:
        """The experts for rows of this kind."""
        return self._parts(settings)[1]

    def make(self, settings: Settings, num_tokens: int) -> Round:
        """The round in which every rank sends so many tokens."""
        if num_tokens != self._num_tokens:
            self._num_tokens = num_tokens
            self._rounds.clear()
        shape = _shape(settings)
        if shape not in self._rounds:
            source, experts = self._parts(settings)
            round_ = make_round(settings, source, self._rank, num_tokens)
            self._rounds[shape] = with_output(settings, experts, round_, self._domain_of)
        return self._rounds[shape]

    def _parts(self, settings: Settings) -> tuple[Source, StandInExperts]:
        shape = _shape(settings)
        if shape not in self._made:
            self._made[shape] = Source(settings, self._device), StandInExperts(settings, self._device)
        return self._made[shape]


def _shape(settings: Settings) -> _Shape:
    """The settings that inputs and results depend on and that may differ between contenders of one run."""
    return settings.quant, settings.payload_dtype, settings.output(), settings.hidden_size, settings.top_k
