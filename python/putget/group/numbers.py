"""Numbers of objects over several domains: what travels between domains names its object by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from putget.errors import PutgetError

MOST_NUMBERS = 4096  # that messages tell apart; then they begin again


class Numbers:
    """The numbers that the objects of one communicator have on this rank.

    Ranks give an object the same number if they have agreed since the last failure: a step that failed may have taken
    numbers on some ranks alone, and ranks close objects by themselves.

    Attributes:
        next: How many have been taken, in all.
    """

    def __init__(self) -> None:
        self.next = 0
        self._held: set[int] = set()  # by objects of this rank
        self._avoided: set[int] = set()  # held on any rank when ranks have agreed last, or taken since then

    def said(self) -> list[int]:
        """The word of this rank. ``agree`` takes the one that others heard: the collector may end an object since."""
        return [self.next, *sorted(self._held)]

    def agree(self, said: Iterable[Sequence[int]]) -> None:
        """Goes on behind what all ranks have said, this one too."""
        words = list(said)
        self.next = max(word[0] for word in words)
        self._avoided = {number for word in words for number in word[1:]}

    def take(self) -> int:
        """A number below MOST_NUMBERS that no object has.

        Raises:
            PutgetError: Objects have all of them.
        """
        if len(self._avoided) == MOST_NUMBERS:
            raise PutgetError(f"{MOST_NUMBERS} objects of this communicator are open, the most there may be")
        while self.next % MOST_NUMBERS in self._avoided:
            self.next += 1
        number = self.next % MOST_NUMBERS
        self._avoided.add(number)
        self.next += 1
        return number

    def hold(self, number: int, before: int | None) -> None:
        """An object has the number; the one that it had before is free."""
        self.retire(before)
        self._held.add(number)

    def retire(self, number: int | None) -> None:
        """The object of this number has ended."""
        if number is not None:
            self._held.discard(number)
