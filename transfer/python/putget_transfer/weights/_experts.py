"""Slots of experts that a balancer writes, too: an update takes them before it writes, and gives them back."""

from __future__ import annotations

from typing import Protocol


class ExpertSlots(Protocol):
    """The place where all movers of experts take the slots of a rank: `putget.experts.ExpertSlots`."""

    @property
    def moved(self) -> int:
        """How often slots have got other experts."""

    def take(self, mover: object) -> str | None:
        """Give all slots to a mover, whose `str` is its name, and return None; or the name of the one that has them."""

    def put_in_force(self, mover: object, version: int | None) -> None:
        """Note the version that all slots hold; None while they are being written, and after an update that failed."""

    def give_back(self, mover: object) -> None:
        """End what `take` began."""


class Held:
    """The slots of experts of one rollout rank, as its updates take them. Without experts that move it does nothing."""

    def __init__(self, experts: ExpertSlots | None, rank: int, recorded: int | None) -> None:
        """Begin with what `experts.moved` was when the slots were recorded.

        Raises:
            ValueError: They were recorded without `experts`.
        """
        if experts is not None and recorded is None:
            raise ValueError(
                "experts: slots were recorded without them, so moves since then are not known: give them to record, too"
            )
        self._experts, self._rank = experts, rank
        self._moved = recorded
        self._has = False

    def __str__(self) -> str:
        return f"an update of weights, rollout rank {self._rank}"

    def take(self, version: int) -> None:
        """Take the slots.

        Raises:
            ValueError: Experts are on their way, or have moved since the slots of the schedule were recorded.
        """
        if self._experts is None:
            return
        other = self._experts.take(self)
        refused = f"version: {version} came for rollout rank {self._rank}, but"
        if other is not None:
            raise ValueError(f"{refused} {other} has the slots of its experts: wait until they lie still")
        self._has = True
        if self._experts.moved != self._moved:
            self.give_back()
            raise ValueError(f"{refused} experts have moved since its slots were recorded: record and plan anew")

    def put_in_force(self, version: int | None) -> None:
        """Say which version the slots hold; None while they are being written."""
        if self._experts is not None and self._has:
            self._experts.put_in_force(self, version)

    def give_back(self) -> None:
        """Let other movers have the slots."""
        if self._experts is not None and self._has:
            self._has = False
            self._experts.give_back(self)
