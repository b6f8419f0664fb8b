"""File descriptors: how many this process may still open, and errors that say so."""

from __future__ import annotations

import errno
import os
import resource
import sys

from putget.errors import PutgetError

_SPARE = 64  # for shares on their way, and for the caller
_FEW = 2
_RAN_OUT = (errno.EMFILE, errno.ENFILE)


def require_descriptors(count: int) -> None:
    """Makes sure that this process may open so many descriptors more: raises its soft limit up to the hard one.

    Raises:
        PutgetError: The hard limit is too low.
    """
    needed = len(os.listdir("/proc/self/fd")) + count + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise PutgetError(f"{needed} descriptors are needed, the limit is {hard} (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def left() -> int:
    """How many descriptors this process may still open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        names = os.listdir("/proc/self/fd")  # one of them is the folder's own
    except OSError as error:
        if ran_out(error):
            return 0
        raise
    return soft + 1 - sum(int(name) < soft for name in names)


def needed_for_shares(ranks: int, shares: int = 1) -> int:
    """Descriptors that a rank opens while so many ranks, with this one, send each other so many shares.

    Its own memories and their shares, those of the others, and a few for what the libraries open meanwhile.
    """
    return shares * (ranks + 1) + _FEW


def require_left(rank: int, needed: int) -> None:
    """Asks before shares travel: a descriptor that finds no room is lost on its way.

    Raises:
        PutgetError: This process may open fewer.
    """
    found = left()
    if found < needed:
        raise lacking(rank, found, needed)


def lacking(rank: int, found: int, needed: int | str) -> PutgetError:
    """The error of a rank that has fewer descriptors than it needs."""
    return PutgetError(
        f"rank {rank} has {found} file descriptors left, needs {needed}: close files there, or raise its limit "
        "(ulimit -n)"
    )


def stuck(rank: int, unsent: dict[int, int]) -> PutgetError:
    """The error of a rank that could not send so many descriptors, by receiver, before its deadline."""
    receivers = ", ".join(str(peer) for peer in sorted(unsent))
    return PutgetError(
        f"rank {rank} could not send {max(unsent.values())} file descriptors to each of rank(s) {receivers}: "
        "too many of this user's are on their way and not read; raise the rank's limit (ulimit -n)"
    )


def named(error: BaseException, rank: int) -> BaseException:
    """An error in the words of ``lacking`` where a call found no room for a file; else the error itself."""
    return lacking(rank, left(), f"more ({error})") if ran_out(error) else error


def ran_out(error: BaseException) -> bool:
    """Whether a call failed because this process, or the machine, may open no more files."""
    if isinstance(error, OSError):
        return error.errno in _RAN_OUT
    return isinstance(error, PutgetError) and any(os.strerror(code) in str(error) for code in _RAN_OUT)
