"""Which call may come next: refuses what is out of turn before it has an effect.

The host knows only what it has called itself. Where graphs replay without it, the device judges.
"""

from __future__ import annotations

import torch

from putget.errors import ProtocolMisuse
from putget.workspace import Workspace


class Turns:
    """What the host knows about the round of one object."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._open: bool | None = False  # None: unknown, because graphs replay without the host
        self._started: str | None = None  # the half whose finish has not come

    def require_round(self, call: str) -> None:
        """Raises ProtocolMisuse, or the fault that stands, where no round is open."""
        if self._open is False:
            self._workspace.raise_fault()
            raise ProtocolMisuse(f"{call}: no dispatch came before it")

    def require_finished(self, call: str) -> None:
        """Raises ProtocolMisuse, or the fault that stands, where a start half waits for its finish."""
        if self._started is not None:
            self._workspace.raise_fault()
            finish = self._started.replace("start", "finish")
            raise ProtocolMisuse(f"{call}: {self._started} came before it, and {finish} has not come yet")

    def require_started(self, start: str, finish: str) -> None:
        """Raises ProtocolMisuse, or the fault that stands, where this start half did not come last."""
        if self._started != start:
            self._workspace.raise_fault()
            raise ProtocolMisuse(f"{finish}: no {start} came before it")

    def start(self, half: str) -> None:
        """A start half has been called."""
        self._started = half

    def open(self) -> None:
        """A dispatch has been called, or its finish half."""
        self._pass(True)

    def end(self) -> None:
        """A combine, its finish half or a release has been called."""
        self._pass(False)

    def _pass(self, is_open: bool) -> None:
        self._started = None
        if self._open is None:
            return
        on_gpu = self._workspace.device.type == "cuda"
        self._open = None if on_gpu and torch.cuda.is_current_stream_capturing() else is_open

    def forget(self) -> None:
        """The workspace has been started again."""
        self._started = None
        self._open = False
