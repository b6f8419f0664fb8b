"""Which call may come next on a workspace: what is out of turn is refused before it has an effect.

The host knows only what it has called itself. Once calls have been captured in a graph, which replays without it, it
knows nothing any more, and the device judges (docs/protocol.md, *Deadlines and faults*).
"""

from __future__ import annotations

import torch


class Turns:
    """The host's knowledge of the rounds of one workspace. Objects are told apart by an owner of any kind.

    Methods that judge return why a call is refused, or None.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._known = True
        self._opened_by: object = None
        self._started: tuple[object, str] | None = None  # owner and name of the half whose finish has not come

    @property
    def known(self) -> bool:
        """Whether the host has seen every round: none was captured in a graph."""
        return self._known

    def refuse_unfinished(self, call: str) -> str | None:
        """For calls that may not stand between a start half and its finish."""
        if not self._known or self._started is None:
            return None
        _, start = self._started
        return f"{call}: {start} came before it, and {start.replace('start', 'finish')} has not come yet"

    def refuse_unstarted(self, owner: object, finish: str) -> str | None:
        """For finish halves."""
        start = finish.replace("finish", "start")
        return None if not self._known or self._started == (owner, start) else f"{finish}: no {start} came before it"

    def refuse_without_round(self, owner: object, call: str) -> str | None:
        """For combine."""
        return None if not self._known or self._opened_by is owner else f"{call}: no dispatch came before it"

    def start(self, owner: object, half: str) -> None:
        """A start half has been called."""
        self._note_capture()
        self._started = owner, half

    def open(self, owner: object) -> None:
        """A dispatch has been called, or its finish half."""
        self._note_capture()
        self._started = None
        self._opened_by = owner

    def end(self) -> None:
        """A combine, its finish half or a release has been called, or the workspace has been started again."""
        self._note_capture()
        self._started = None
        self._opened_by = None

    def _note_capture(self) -> None:
        if self._on_gpu and self._known:
            self._known = not torch.cuda.is_current_stream_capturing()
