"""The worth of each idea: variants of putget, timed in one run beside putget as it is by default.

A variant is a name, what it changes, the settings that it runs with, and how to build its contender. Variants that
answer one question make a group, a generator that is given the run's settings:

    @group("halves")
    def halves(settings: Settings) -> Iterator[Variant]:
        yield Variant("halves", "start and finish instead of one call", settings, lambda bench: HalvedPutget(*bench))

The name of the group is then a value of `putget ablate --only`. A group that has nothing to try on a machine yields
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from putget import Communicator
from putget_bench.contender import PHASES, Contender
from putget_bench.inputs import StandInExperts
from putget_bench.settings import Settings


class Bench(NamedTuple):
    """The arguments of `Putget`, in order, from which a contender is built."""

    communicator: Communicator
    settings: Settings
    experts: StandInExperts
    device: torch.device


@dataclass(frozen=True)
class Variant:
    """One row of the table of `putget ablate`.

    Attributes:
        name: of the row; becomes the contender's name.
        changes: what it does differently from putget by default, in a few words.
        settings: the run's settings, or a copy with other rows.
        build: makes the contender on one rank. Collective.
        phases: what is timed of it.
    """

    name: str
    changes: str
    settings: Settings
    build: Callable[[Bench], Contender]
    phases: tuple[str, ...] = PHASES


Group = Callable[[Settings], Iterator[Variant]]
GROUPS: dict[str, Group] = {}


def group(name: str) -> Callable[[Group], Group]:
    """Registers a group of variants under a name."""

    def register(variants: Group) -> Group:
        GROUPS[name] = variants
        return variants

    return register
