"""How much memory this process may still take, by what the kernel shows of it.

A kernel does not refuse memory that it does not have: it ends a process when pages are touched. So it is asked before:
/proc/meminfo for the host, and every cgroup that this process is in, version 2 (kernel documentation, cgroup-v2.rst,
memory.max) or 1 (cgroup-v1/memory.rst, memory.limit_in_bytes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from putget.errors import PutgetError

HOST = "host"
_UNLIMITED = 1 << 60  # cgroups of version 1 without a limit say a number above it


@dataclass(frozen=True)
class Limit:
    """One bound on memory.

    Attributes:
        identity: The same in every process that the bound counts together.
        name: For messages.
        most: Bytes that may be taken in all.
        free: Bytes that may still be taken; caches of files, which give way, are among them.
    """

    identity: str
    name: str
    most: int
    free: int


def limits(root: Path = Path("/")) -> list[Limit]:
    """All bounds that this process can see, as of now."""
    found = list(_host(root))
    swap = _number_of(root / "proc" / "meminfo", "SwapFree:") or 0
    with contextlib.suppress(OSError):
        for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found += _chain(root / "sys" / "fs" / "cgroup", path, _version_2, swap * 1024)
            elif "memory" in controllers.split(","):
                found += _chain(root / "sys" / "fs" / "cgroup" / "memory", path, _version_1, 0)
    return found


def require_room(num_bytes: int, found: list[Limit], sharing: Mapping[str, int]) -> None:
    """Whether a workspace can be had.

    Args:
        num_bytes: Of each rank.
        found: The bounds, from before any rank took its memory.
        sharing: Ranks by the identity of the bound that counts them together; 1 where it is not there.

    Raises:
        PutgetError: There is not enough; it says how much is wanted, free and allowed.
    """
    for limit in found:
        ranks = sharing.get(limit.identity, 1)
        if ranks * num_bytes > limit.free:
            each = "" if ranks == 1 else f", {num_bytes} for each of {ranks} ranks"
            raise PutgetError(
                f"num_bytes: the workspace wants {ranks * num_bytes} bytes of shared memory{each}; free are "
                f"{limit.free} of the {limit.most} bytes of {limit.name}"
            )


def _host(root: Path) -> Iterator[Limit]:
    path = root / "proc" / "meminfo"
    free = [_number_of(path, name) for name in ("MemAvailable:", "SwapFree:")]
    most = [_number_of(path, name) for name in ("MemTotal:", "SwapTotal:")]
    if free[0] is not None and most[0] is not None:
        yield Limit(HOST, "this host (MemTotal and SwapTotal of /proc/meminfo)", _kibibytes(most), _kibibytes(free))


def _kibibytes(counts: list[int | None]) -> int:
    return 1024 * sum(count or 0 for count in counts)


def _chain(mount: Path, path: str, read: Callable[[Path, int], Limit | None], swap_bytes: int) -> Iterator[Limit]:
    """The cgroup and those around it. A container may see its own one as the mount's root, under another path."""
    folder = mount / path.lstrip("/")
    for place in [folder, *folder.parents]:
        if place.is_dir() and place.is_relative_to(mount):
            limit = read(place, swap_bytes)
            if limit is not None:
                yield limit


def _version_2(folder: Path, swap_bytes: int) -> Limit | None:
    most, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    if most is None or used is None:
        return None
    cached = sum(_number_of(folder / "memory.stat", name) or 0 for name in ("active_file", "inactive_file"))
    swap_most, swap_used = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
    swap = swap_bytes if swap_most is None else min(swap_bytes, max(0, swap_most - (swap_used or 0)))
    return Limit(_identity(folder), f"{folder / 'memory.max'}", most, max(0, most - used + cached + swap))


def _version_1(folder: Path, swap_bytes: int) -> Limit | None:
    most, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if most is None or used is None or most > _UNLIMITED:
        return None
    names = ("total_active_file", "total_inactive_file")
    cached = sum(_number_of(folder / "memory.stat", name) or 0 for name in names)
    name = f"{folder / 'memory.limit_in_bytes'}"
    return Limit(_identity(folder), name, most, max(0, most - used + cached + swap_bytes))


def _identity(folder: Path) -> str:
    status = folder.stat()
    return f"{status.st_dev}:{status.st_ino}"


def _number(path: Path) -> int | None:
    """None where the file is not there, or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _number_of(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == name:
                return int(words[1])
    return None
