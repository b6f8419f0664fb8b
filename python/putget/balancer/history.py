"""What experts had to do lately: counts of the last iterations, the newer ones with more weight."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from putget.balancer.placement import as_load


class LoadHistory:
    """Adds up the load of each expert over iterations.

    Args:
        window: how many iterations count; all if None.
        decay: what an iteration's weight is multiplied by at each later one, above 0 and at most 1; 1 forgets nothing.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, *, window: int | None = None, decay: float = 1.0) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window is {window}, allowed are numbers from 1 on, or None")
        if not 0 < decay <= 1:
            raise ValueError(f"decay is {decay}, allowed are numbers above 0 and at most 1")
        self._window = window
        self._decay = decay
        self._kept: deque[NDArray[np.float64]] = deque()
        self._sum: NDArray[np.float64] | None = None

    def add(self, load: Any) -> None:
        """Adds an iteration.

        Args:
            load: [num_layers, num_experts], of one shape in all calls.

        Raises:
            ValueError: The shape differs.
        """
        shape = (None, None) if self._sum is None else self._sum.shape
        new = as_load(load, *shape)
        if self._window is None:
            self._sum = new.copy() if self._sum is None else self._sum * self._decay + new
            return
        self._kept.append(new)
        if len(self._kept) > self._window:
            self._kept.popleft()
        weights = self._decay ** np.arange(len(self._kept) - 1, -1, -1)
        self._sum = np.tensordot(weights, np.stack(self._kept), axes=1)

    @property
    def is_empty(self) -> bool:
        """Whether no iteration was added."""
        return self._sum is None

    @property
    def load(self) -> NDArray[np.float64]:
        """The weighted sum, float64 [num_layers, num_experts].

        Raises:
            ValueError: No iteration was added.
        """
        if self._sum is None:
            raise ValueError("the history is empty: add an iteration first")
        return self._sum
