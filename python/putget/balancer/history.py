"""The recent work of experts: counts of the last iterations, the newer ones with more weight."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from putget._arguments import as_count, as_number
from putget.balancer.placement import as_load

_MOST_WINDOW = 1 << 24


class LoadHistory:
    """Adds up the load of each expert over iterations.

    Args:
        window: how many iterations count; all if None.
        decay: what an iteration's weight is multiplied by at each later one, above 0 and at most 1; 1 forgets nothing.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, *, window: int | None = None, decay: float = 1.0) -> None:
        self._window = None if window is None else as_count("window", window, 1, _MOST_WINDOW)
        self._decay = as_number("decay", decay, 0, 1, above=True)
        self._kept: deque[NDArray[np.float64]] = deque()
        self._sum: NDArray[np.float64] | None = None

    def add(self, load: Any) -> None:
        """Adds an iteration. The load is copied.

        Args:
            load: [num_layers, num_experts], of one shape in all calls.

        Raises:
            ValueError: The shape differs, or a load is negative, NaN or infinite. The history stays as it is.
        """
        shape = (None, None) if self._sum is None else self._sum.shape
        new = as_load(load, *shape).copy()
        kept = deque(self._kept)
        with np.errstate(over="ignore"):
            total = self._total(kept, new)
            if not np.isfinite(total.sum(axis=1)).all():
                raise ValueError("load is too large: the sum of the history would be infinite")
        self._kept, self._sum = kept, total

    def _total(self, kept: deque[NDArray[np.float64]], new: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weighted sum with one iteration more, which is added to `kept` where there is a window."""
        if self._window is None:
            if self._sum is not None:
                np.add(new, self._sum * self._decay, out=new)
            return new
        kept.append(new)
        if len(kept) > self._window:
            kept.popleft()
        weights = self._decay ** np.arange(len(kept) - 1, -1, -1)
        total: NDArray[np.float64] = np.tensordot(weights, np.stack(kept), axes=1)
        return total

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
        found: NDArray[np.float64] = self._sum.copy()
        return found
