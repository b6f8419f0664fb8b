"""Python's garbage collection of a server: when it runs, and how long it stops the rank."""

from __future__ import annotations

import gc
import time

_YOUNG_EVERY = 64  # passes; what these leave in cycles is small
_ALL_EVERY = 4096


class Garbage:
    """Runs collections between passes, where no other rank waits for this one. All ranks run on meanwhile.

    A collection by itself comes in the middle of a layer, and looks at every module and weight of the model. So what is
    there after warm-up is left out for good (``gc.freeze``), and collections run at fixed passes and before sleep.

    Attributes:
        runs: Collections since ``start``.
        seconds: Their processor time.
        longest_s: Processor time of the longest.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.seconds = self.longest_s = 0.0
        self._passes = self._before_sleep = 0

    def start(self) -> None:
        """From now on, nothing is collected but by ``after_pass`` and ``before_sleep``."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_pass(self) -> None:
        """Called behind each pass."""
        self._passes += 1
        if self._passes % _ALL_EVERY == 0:
            self._collect(2)
        elif self._passes % _YOUNG_EVERY == 0:
            self._collect(0)

    def before_sleep(self) -> None:
        """Called when there is no work: collects all, if there were passes in the meantime."""
        if self._passes != self._before_sleep:
            self._before_sleep = self._passes
            self._collect(2)

    def end(self) -> None:
        """Python collects by itself again."""
        gc.enable()
        gc.unfreeze()

    def _collect(self, generation: int) -> None:
        began = time.thread_time()
        gc.collect(generation)
        took = time.thread_time() - began
        self.runs += 1
        self.seconds += took
        self.longest_s = max(self.longest_s, took)
