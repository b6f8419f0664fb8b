"""What DeepEP's calls hand around: events, configurations, handles, and memory for two rounds under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from putget import Payload, ProtocolMisuse
from putget.adapters.deep_ep_layout import Compact
from putget.adapters.rounds import Rounds
from putget.adapters.shared import engine_workspace_bytes

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
MAX_RANKS = 32  # experts of a token, which are ranks in normal rounds


@dataclass(frozen=True)
class Config:
    """Accepted where DeepEP takes one; not used."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 128


class EventOverlap:
    """A point in a CUDA stream, or in a CPU program, where there is nothing to wait for.

    Args:
        event: A recorded ``torch.cuda.Event``, or None.
        extra_tensors: Kept alive with the event.
    """

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """The current stream waits for the event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


@dataclass
class Lane:
    """Memory for one round under way."""

    rounds: Rounds
    number: int = 0  # the round that was begun here last


class Lanes:
    """Memory for up to two rounds under way; the oldest is given up for a third."""

    def __init__(self, make: Callable[[], Rounds]) -> None:
        self._make = make
        self._lanes: list[Lane] = []
        self._rounds_begun = 0

    def begin(self) -> Lane:
        """A lane without an open round."""
        closed = [lane for lane in self._lanes if not lane.rounds.is_open]
        if closed:
            lane = closed[0]
        elif len(self._lanes) < 2:
            lane = Lane(self._make())
            self._lanes.append(lane)
        else:
            lane = min(self._lanes, key=lambda lane: lane.number)
            lane.rounds.release()
        self._rounds_begun += 1
        lane.number = self._rounds_begun
        return lane

    def close(self) -> None:
        """Frees the memory."""
        while self._lanes:
            self._lanes.pop().rounds.shared.close()


@dataclass
class Ticket:
    """One round under way."""

    lane: Lane
    number: int

    def rounds(self) -> Rounds:
        """Where it is open.

        Raises:
            ProtocolMisuse: It is not, any more.
        """
        if self.lane.number != self.number or not self.lane.rounds.is_open:
            raise ProtocolMisuse(
                "combine: this handle's round is over; two rounds can be under way, and each ends once"
            )
        return self.lane.rounds


@dataclass
class Handle:
    """What ``dispatch`` gives, and ``combine`` and cached dispatches take."""

    ids: torch.Tensor  # [num_tokens, ep_size] int32: the ranks of each token, -1 elsewhere
    places: Compact
    is_worst: bool  # the number of rows is num_worst_tokens
    ticket: Ticket


@dataclass
class LowLatencyHandle:
    """What ``low_latency_dispatch`` gives, and ``low_latency_combine`` takes."""

    place: torch.Tensor | None  # [rows] int64: where each received row is in the result; None before they are there
    num_tokens: int
    top_k: int
    shape: tuple[int, int, int]  # of the result: experts, rows, hidden
    ticket: Ticket


def pairs_bytes(ep_size: int, max_pairs: int, hidden: int) -> int:
    """Symmetric bytes of low-latency rounds of so many (token, expert) pairs a rank."""
    output = Payload((hidden,), torch.bfloat16)
    return engine_workspace_bytes(
        ep_size=ep_size, max_tokens_per_rank=max_pairs, dispatch_bytes=output.row_bytes, output=output
    )


def as_given(x: Rows, rows: list[torch.Tensor]) -> Rows:
    """Rows, with scales where x had them."""
    return (rows[0], rows[1]) if isinstance(x, tuple) else rows[0]


def event_now(recorded: bool) -> EventOverlap:
    """An event on the current CUDA stream, or none."""
    return EventOverlap(torch.cuda.current_stream().record_event() if recorded else None)


def no_hook() -> None:
    """The rows are there already."""
