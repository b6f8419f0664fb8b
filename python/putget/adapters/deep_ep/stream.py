"""The communication stream of DeepEP's ``Buffer``: the order between its calls and the current stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from putget.adapters.deep_ep.rounds import EventOverlap


def check_order(previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """Raises ValueError where DeepEP's rule is broken: who allocates on the stream says when it begins and ends."""
    if allocate_on_comm_stream and (previous_event is None or not async_finish):
        raise ValueError(
            f"allocate_on_comm_stream is True with previous_event {previous_event} and async_finish {async_finish}, "
            "expected an event and True: else the current stream could not know when memory is free"
        )


class Turn:
    """One call of a buffer, and the streams that its tensors are used on.

    Attributes:
        event: Its end, where async_finish asked for it.
    """

    def __init__(self, streams: tuple[Any, ...]) -> None:
        self._streams = streams
        self.event = EventOverlap()

    def share(self, *things: Any) -> None:
        """Tensors, or sequences of them, that both streams use: none is given to another before both are done."""
        if not self._streams:
            return
        for thing in things:
            if isinstance(thing, torch.Tensor):
                for stream in self._streams:
                    thing.record_stream(stream)
            elif isinstance(thing, tuple | list):
                self.share(*thing)


class Here(Turn):
    """A call on the current stream, behind all calls so far: what is enqueued inside of ``with`` is part of it."""

    def __init__(self, streams: CommStream) -> None:
        super().__init__(())
        self._comm = streams

    def __enter__(self) -> Turn:
        self._streams = self._comm.begin_here()
        return self

    def __exit__(self, *_: object) -> None:
        self._comm.end_here()


class CommStream:
    """A stream of a buffer's own, on which its asynchronous calls run; on the CPU they run where they stand.

    A call that the current stream waits for runs on the current stream: the way there and back would cost the host more
    than the call. Calls run one after the other, wherever they do.

    Args:
        device: Where the rows live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._stream: Any = None
        self._is_ahead = False  # calls of the stream that no call on the current stream has waited for
        self._here: Any = None  # the current stream of the last call that ran on it
        self._end_here: Any = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> Any:
        """The ``torch.cuda.Stream``; None on the CPU."""
        if self._stream is None and self._is_cuda:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._stream

    def join(self) -> None:
        """The current stream waits for all calls so far."""
        self.begin_here()

    def begin_here(self) -> tuple[Any, ...]:
        """The current stream waits for all calls so far; returns the streams that use the next call's tensors."""
        if not self._is_cuda:
            return ()
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)  # a fourth of what a Stream object costs
        if self._here is None or self._here.cuda_stream != raw:
            before, self._here = self._here, torch.cuda.current_stream(self._device)
            # A capture may not wait for work outside of it: before one begins, the device is waited for.
            if before is not None and not torch.cuda.is_current_stream_capturing():
                self._here.wait_stream(before)
        if self._stream is None:
            return ()
        if self._is_ahead:
            self._here.wait_stream(self._stream)
            self._is_ahead = False
        return (self._stream, self._here)

    def end_here(self) -> None:
        """A call on the current stream has been enqueued."""
        if self._is_cuda and not torch.cuda.is_current_stream_capturing():
            self._end_here.record(self._here)

    def turn(
        self, previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool = False
    ) -> AbstractContextManager[Turn]:
        """A call, on the stream where one of these is asked for: what it allocates there belongs to the stream.

        Args:
            previous_event: What it waits for; None: all that the current stream has been given.
            async_finish: The current stream does not wait for it: the turn's event is for that.
            allocate_on_comm_stream: Said for the caller's sake; memory is always that of the stream.

        Raises:
            ValueError: See ``check_order``.
        """
        check_order(previous_event, async_finish, allocate_on_comm_stream)
        if not self._is_cuda or (previous_event is None and not async_finish):
            return Here(self)
        return self._beside(previous_event, async_finish)

    @contextlib.contextmanager
    def _beside(self, previous_event: EventOverlap | None, async_finish: bool) -> Iterator[Turn]:
        """A call on the stream."""
        stream = self.stream
        current = torch.cuda.current_stream(self._device)
        if previous_event is not None and previous_event.event is not None:
            stream.wait_event(previous_event.event)
        else:
            stream.wait_stream(current)
        if not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._end_here)  # of the last call that another stream has run
        elif self._here == current:
            stream.wait_stream(current)  # a call of the same capture may have run there, which records no event
        self._is_ahead = True
        turn = Turn((stream, current))
        with torch.cuda.stream(stream):
            yield turn
        if async_finish:
            turn.event.event = stream.record_event()
        else:
            current.wait_stream(stream)

    def turn_or_here(self, here: bool, async_finish: bool) -> AbstractContextManager[Turn]:
        """The same; or a call on the current stream: one with a hook.

        Raises:
            ValueError: Both are asked for.
        """
        if not here:
            return self.turn(None, async_finish)
        if async_finish:
            raise ValueError("return_recv_hook and async_finish are both True, expected one: the hook is what waits")
        return Here(self)
