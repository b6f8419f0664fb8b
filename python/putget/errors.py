"""Exceptions of putget.

A caller's mistake is a ``ValueError`` that names the argument, what came and what was allowed. Everything else is a
``PutgetError``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any


class PutgetError(RuntimeError):
    """Base class of what putget raises besides ``ValueError``."""


_ROUND = "; this is no mask of ranks: call recover() on all ranks, it asks who goes on"
# By phase, what to call next.
_NEXT = {
    "dispatch": _ROUND,
    "combine": _ROUND,
    "setup": "; when they live, call the same constructor again on all ranks, or make a Communicator without them",
    "close": ", which the network has not delivered to; memory that it may still touch is kept, at least until then",
    "set_placement": "; set this placement again on all active ranks, or the one before",
    "set_active_ranks": "; call it again, without those that are gone, or call recover()",
}


class PeerTimeout(PutgetError):
    """A wait for other ranks passed its deadline, or they are known to be out of reach.

    After a round has raised it, call ``AllToAll.recover``, which asks all ranks who goes on. ``missing`` of a round is
    no mask: across domains it can name a healthy rank, one that waited for the lost rank itself.

    Attributes:
        phase: What was going on: "setup", "dispatch", "combine", "check", "set_active_ranks", "close",
            "set_placement", "exchange" (experts), "lockstep" (the passes of ``putget.lockstep``).
        rank: The rank that waited (of the expert-parallel group).
        said_by: The rank whose deadline has passed, where another rank of this attempt has said it; else None.
        epoch: The round, counted from the start of the workspace; 0 during set-up.
        missing: The ranks that did not answer this one.
        lost: Of these, the ones that are out of reach: their process has closed its sockets, or the network between
            domains does not deliver to them. Who is missing and not lost may only be slow.
        timeout_s: The deadline of the wait in seconds; None where the report has none.
    """

    def __init__(
        self,
        phase: str,
        rank: int,
        epoch: int,
        missing: Iterable[int],
        timeout_s: float | None = None,
        lost: Iterable[int] = (),
        said_by: int | None = None,
    ) -> None:
        self.said_by = said_by
        self.phase = phase
        self.rank = rank
        self.epoch = epoch
        self.missing = tuple(sorted(missing))
        self.lost = tuple(sorted(lost))
        self.timeout_s = timeout_s
        within = "" if timeout_s is None else f" within {timeout_s:g} s"
        silent = [peer for peer in self.missing if peer not in self.lost]
        found = []
        if silent or not self.lost:
            found.append(f"heard nothing from {_ranks(silent)}{within}")
        if self.lost:
            found.append(f"has lost the connection to {_ranks(self.lost)}")
        by = rank if said_by is None else said_by
        told = "" if said_by is None else f"; rank {rank} was waiting with it, and ends too"
        super().__init__(f"{phase}, round {epoch}: rank {by} {' and '.join(found)}{told}{_NEXT.get(phase, '')}")

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self.phase, self.rank, self.epoch, self.missing, self.timeout_s, self.lost, self.said_by)
        return PeerTimeout, facts


class PeerLeft(PeerTimeout):
    """Another rank has left a collective call by an error of its own, so this rank has ended the call too, at once.

    Nothing that the call began is left on this rank. Call it again on all ranks: the next attempt starts afresh.

    Attributes:
        peer: The rank that left; ``missing`` has it alone.
        what: The call, such as "AllToAll".
        reason: What that rank raised.
    """

    def __init__(self, phase: str, rank: int, peer: int, what: str, reason: str) -> None:
        super().__init__(phase, rank, 0, (peer,))
        self.peer = peer
        self.what = what
        self.reason = reason
        self.args = (f"rank {peer} has left {what}: {reason}; call it again on all ranks",)

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerLeft, (self.phase, self.rank, self.peer, self.what, self.reason)


def _some(numbers: Sequence[int], most: int = 16) -> str:
    """The first of these numbers, and how many follow."""
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"{', '.join(map(str, numbers[:most]))}{more}"


def _ranks(ranks: Iterable[int]) -> str:
    return f"rank(s) {', '.join(map(str, ranks))}"


class QuorumLost(PutgetError, ValueError):
    """``set_active_ranks`` was to go on with fewer ranks than its ``quorum``; nothing has happened on any rank.

    Attributes:
        num_ranks: Ranks that the mask names.
        quorum: The fewest that were allowed.
    """

    def __init__(self, num_ranks: int, quorum: int) -> None:
        self.num_ranks = num_ranks
        self.quorum = quorum
        super().__init__(f"mask names {num_ranks} ranks, quorum is {quorum}")

    def __reduce__(self) -> tuple[Any, ...]:
        return QuorumLost, (self.num_ranks, self.quorum)


class CapacityExceeded(PutgetError):
    """A source sent more rows than ``dispatch(max_rows=...)`` on this rank allowed.

    Attributes:
        source: The rank that sent them.
        rows: How many it sent.
        max_rows: How many this rank allowed.
        epoch: The round.
    """

    def __init__(self, source: int, rows: int, max_rows: int, epoch: int) -> None:
        self.source = source
        self.rows = rows
        self.max_rows = max_rows
        self.epoch = epoch
        super().__init__(f"dispatch, round {epoch}: rank {source} sent {rows} rows, max_rows here is {max_rows}")

    def __reduce__(self) -> tuple[Any, ...]:
        return CapacityExceeded, (self.source, self.rows, self.max_rows, self.epoch)


class ProtocolMisuse(PutgetError):
    """Calls came in an order, or with sizes, that do not make a round."""


class InvalidExpertIds(PutgetError, ValueError):
    """``topk_ids`` held ids outside [-1, num_experts); they counted as "no expert".

    Attributes:
        count: How many since the last ``check()``.
    """

    def __init__(self, count: int, num_experts: int) -> None:
        self.count = count
        self.num_experts = num_experts
        super().__init__(f"topk_ids: {count} ids outside [-1, {num_experts}) were taken as -1 (no expert)")

    def __reduce__(self) -> tuple[Any, ...]:
        return InvalidExpertIds, (self.count, self.num_experts)


class ExpertsLost(PutgetError):
    """A layer would go on without experts of ranks that were left out; nothing has happened.

    Attributes:
        experts: Those that lie on these ranks alone.
        partly: Those that have replicas there, by the placement in force, and others.
        ranks: The ranks.
        since: When the first of them was left out, in seconds of ``time.time()``.
    """

    def __init__(self, experts: Iterable[int], partly: Iterable[int], ranks: Iterable[int], since: float) -> None:
        self.experts = tuple(experts)
        self.partly = tuple(partly)
        self.ranks = tuple(ranks)
        self.since = since
        found = [f"expert(s) {_some(self.experts)} are lost" if self.experts else ""]
        found.append(f"replicas of expert(s) {_some(self.partly)} are lost" if self.partly else "")
        moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since))
        super().__init__(
            f"{' and '.join(filter(None, found))} with {_ranks(self.ranks)} since {moment}: outputs would miss them. "
            "Bring them back by Balancer.set_active_ranks with a HostStore, by set_placement, or by set_active_ranks "
            "with their ranks; or accept it on every rank: layer.degraded = True"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ExpertsLost, (self.experts, self.partly, self.ranks, self.since)


class ForkedChild(PutgetError, ValueError):
    """A forked child has called an object of its parent; nothing has happened. The parent goes on with it.

    Attributes:
        rank: The parent's rank.
        what: The object.
        parent_pid: The process that made the object.
        pid: The child.
    """

    def __init__(self, rank: int, what: str, parent_pid: int, pid: int) -> None:
        self.rank = rank
        self.what = what
        self.parent_pid = parent_pid
        self.pid = pid
        super().__init__(
            f"this process (pid {pid}) is a fork of rank {rank} (pid {parent_pid}), and is no rank itself: the "
            f"{what} is refused here and goes on there. Make a Communicator in this process, or start it by spawn"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkedChild, (self.rank, self.what, self.parent_pid, self.pid)


class BackendUnavailable(PutgetError):
    """This machine or this build lacks something that the call needs; the message says what."""
