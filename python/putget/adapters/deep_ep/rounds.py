"""Objects that DeepEP's calls hand around: events, configurations, handles, and memory for two rounds under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from putget import Payload, ProtocolMisuse
from putget.adapters.rounds import Rounds
from putget.adapters.shared import engine_workspace_bytes
from putget.moe.pairs import PlacedPairs

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
    """Memory for up to two rounds under way; the oldest ends for a third. Its combine begins another one."""

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
    """One round of a lane."""

    lane: Lane
    number: int

    @property
    def is_open(self) -> bool:
        """Whether it is under way still."""
        return self.lane.number == self.number and self.lane.rounds.is_open


@dataclass
class LowLatencyHandle:
    """The handle that ``low_latency_dispatch`` gives and ``low_latency_combine`` takes: indexed as DeepEP's tuple.

    [0] is [experts, rows] int32, the source token of each row; [1] is [experts, ranks] int64, where the rows of each
    source begin, times 2 ** 32, and how many they are; then num_max_dispatch_tokens_per_rank, hidden, num_experts.
    """

    place: (
        torch.Tensor | None
    )  # [rows] int32: where each received row is in the result, or -1; None before they are there
    sent: torch.Tensor  # [num_tokens, top_k] int32 ids, each expert of a token once
    shape: tuple[int, int, int]  # of the result: experts, rows, hidden
    ep_size: int
    room: PlacedPairs  # the result
    lanes: Lanes
    ticket: Ticket

    def __getitem__(self, index: int) -> Any:
        experts, rows, hidden = self.shape
        numbers = {2: rows // self.ep_size, 3: hidden, 4: experts * self.ep_size}
        if index in numbers:
            return numbers[index]
        if index not in (0, 1):
            raise IndexError(f"handle[{index}]: it has 5 entries")
        if self.place is None:
            raise ProtocolMisuse("the hook of this handle's dispatch has not been called")
        return self.room.rows[-1][:, :, 0] if index == 0 else self._ranges(self.place)

    def _ranges(self, place: torch.Tensor) -> torch.Tensor:
        experts, rows, _ = self.shape
        source = torch.arange(place.numel(), device=place.device) % self.ep_size
        expert = torch.where(place < 0, experts, place // rows).long()
        found = torch.zeros(experts + 1, self.ep_size, dtype=torch.int64, device=place.device)
        found.view(-1).scatter_add_(0, expert * self.ep_size + source, torch.ones_like(expert))
        counts = found[:experts]
        return (counts.cumsum(1) - counts) << 32 | counts


def pairs_bytes(ep_size: int, max_pairs: int, hidden: int) -> int:
    """Symmetric bytes of low-latency rounds of so many (token, expert) pairs a rank."""
    output = Payload((hidden,), torch.bfloat16)
    return engine_workspace_bytes(
        ep_size=ep_size, max_tokens_per_rank=max_pairs, dispatch_bytes=output.row_bytes, output=output
    )


def packed(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows as they are, and their scales contiguous. Copies strided scales on the current stream."""
    return [rows[0], *(scales.contiguous() for scales in rows[1:])]


def as_given(x: Rows, rows: list[torch.Tensor]) -> Rows:
    """Rows, with scales where x had them."""
    return (rows[0], rows[1]) if isinstance(x, tuple) else rows[0]


def event_now(recorded: bool) -> EventOverlap:
    """An event on the current CUDA stream, or none."""
    return EventOverlap(torch.cuda.current_stream().record_event() if recorded else None)


def no_hook() -> None:
    """The rows are there already."""
