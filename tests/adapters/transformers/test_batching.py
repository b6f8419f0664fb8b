"""A request to the manager's thread while that looks for one (putget/adapters/transformers/batching.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from putget.adapters.transformers.batching import LockstepBatching

STOP = object()


class Asked(LockstepBatching):
    """A manager that another thread asks as its own one has looked, and found nothing."""

    found: Any = None
    looks = 0

    @property
    def _asked(self) -> Any:
        before, self.looks = self.found, self.looks + 1
        if self.looks == 1:
            self.found = lambda spread: SimpleNamespace(**vars(spread), word="asked")
        return before

    @_asked.setter
    def _asked(self, value: Any) -> None:
        self.found = value


def test_a_request_that_comes_as_the_thread_looks_is_kept() -> None:
    manager = Asked()
    manager.spread = SimpleNamespace(lockstep=SimpleNamespace(close=lambda: None))  # type: ignore[assignment]
    manager.background_thread_status = SimpleNamespace(local_status=STOP)
    manager._statuses = SimpleNamespace(HARD_STOP=STOP)
    for _ in range(2):
        assert not manager._generation_loop_body(None, bootstrapping=False)
    assert vars(manager.spread)["word"] == "asked"
