"""Forward steps of a prefill rank: how far each is, said to its prefiller layer by layer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import putget_transfer as pt
from putget_transfer import kv

logger = logging.getLogger(__name__)

Work = tuple[str, int, list[list[int]]]
"""A request's name, how many of its tokens are computed after the step, and its pages in each group."""


def never() -> bool:
    """Return False: where there are no streams, nothing is captured."""
    return False


class Steps:
    """The steps of one prefiller, one after the other.

    On a CPU a layer is computed when its call returns. On a GPU kernels say so: `begin` stamps the step on the stream,
    and `layer_done` launches one kernel, which a graph may capture. That kernel reports whichever step was stamped
    before it runs. The word that it stores never goes back, so passes that belong to no step (warm-up, capture, dummy
    batches) change nothing.
    """

    def __init__(
        self,
        prefiller: kv.Prefiller,
        index: Mapping[str, int],
        *,
        stream: Callable[[], Any] | None = None,
        captures: Callable[[], bool] = never,
        by_layer: bool = True,
    ) -> None:
        """Begin before the first step.

        Args:
            prefiller: It sends what is computed.
            index: The layers' numbers by name, in the order in which they are computed.
            stream: Returns the stream that layers are computed on, as `Prefiller.layer_done` takes it. None: a CPU.
            captures: Says whether that stream is being captured.
            by_layer: False: a layer's call does not say that all of it is computed, so steps are reported as a whole.
        """
        self.prefiller, self.index, self.by_layer = prefiller, index, by_layer
        self.stream, self.captures = stream or (lambda: None), captures
        self.last = len(index) - 1
        self.step = 0
        self.computes = False
        """A step with prefills is under way."""
        self.names: list[str] = []
        """Requests of that step."""
        self.late: Sequence[Work] = ()
        """Work of a step that leaves when the step is over."""

    def begin(self, work: Sequence[Work]) -> None:
        """Say what the next forward step computes, before anything of it is launched."""
        self.abandon()
        self.step += 1
        self.computes, self.names = True, [name for name, *_ in work]
        try:
            self.prefiller.begin_step(self.step, work, self.stream())
        except (ValueError, pt.EngineBusy) as error:
            # One of them is not to stop the others. Each gets a step of its own, and a later step would say that
            # an earlier one is computed: so they leave when they are.
            logger.warning("a step of prefills: %s. Each leaves alone when it is computed", error)
            self.late = work

    def begin_without(self) -> None:
        """Say that the next pass computes nothing for others."""
        self.abandon()

    def abandon(self) -> None:
        """Fail the requests of a step that never ended.

        Its pages are not computed, which the next step's word would say, and may be others' by now.
        """
        if not self.computes:
            return
        self.computes, self.late = False, ()
        for name in self.names:
            with contextlib.suppress(ValueError):  # it has ended already
                self.prefiller.fail(name, "its forward pass did not end")
        self.prefiller.end_step(self.stream())

    def reports(self) -> bool:
        """Return whether `layer_done` is to be called for the layers of this pass: in a step, and in a capture."""
        return self.by_layer and (self.computes or self.captures())

    def layer_done(self, name: str) -> None:
        """Say that a layer is computed, and those before it: by one store, or by one kernel on the stream."""
        layer = self.index.get(name)
        if layer is not None and self.reports():
            self.prefiller.layer_done(layer, self.stream())

    def end(self) -> None:
        """Say that all layers are computed, also those that nobody reports, once all that is launched so far is."""
        if not self.computes:
            return
        late, self.late = self.late, ()
        stream = self.stream()
        self.prefiller.layer_done(self.last, stream)
        self.computes = False
        for work in late:
            self.step += 1
            try:
                self.prefiller.begin_step(self.step, [work], stream)
            except (ValueError, pt.EngineBusy) as error:
                logger.warning("%s: it is not handed over: %s", work[0], error)
            else:
                self.prefiller.layer_done(self.last, stream)
