"""A second stream of a GPU, for what can run beside the current one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Beside:
    """Work on a second stream, beside what the current stream does meanwhile. On the CPU it is done where it stands.

    Tensors that the work allocates are for the current stream after ``join``, and are given up before the next
    ``fork``; so are those of the current stream that it reads. Then no memory is handed out again while it is used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        """Work that is enqueued from now on waits for the work that the current stream has been given up to here."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def on_it(self) -> contextlib.AbstractContextManager[Any]:
        """Work that is enqueued inside of ``with`` goes to the second stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The current stream waits for all that has been enqueued on the second one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
