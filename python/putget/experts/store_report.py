"""The memory that a host store got from the machine, as opposed to the memory that it asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from putget.experts.host_pages import Pages


@dataclass(frozen=True)
class HostStoreReport:
    """The memory that this rank got.

    Attributes:
        num_bytes: of all ranks' parts.
        own_bytes: of this rank's part.
        huge_bytes: of this rank's part, in huge pages.
        numa_node: node that the part was to come from; None if there was none to ask for.
        bytes_by_node: where the part lies, by NUMA node; empty where the kernel does not tell.
        is_registered: whether all parts are locked for the GPU.
        num_threads: threads that copy.
        cpus: CPUs that they run on.
        notes: what could not be had, and why; a sentence each.
    """

    num_bytes: int
    own_bytes: int
    huge_bytes: int
    numa_node: int | None
    bytes_by_node: dict[int, int]
    is_registered: bool
    num_threads: int
    cpus: tuple[int, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        wanted = "none asked for" if self.numa_node is None else f"node {self.numa_node} asked for"
        nodes = ", ".join(f"{count} on node {node}" for node, count in sorted(self.bytes_by_node.items()))
        lines = [
            f"{self.num_bytes} bytes in all, {self.own_bytes} of this rank",
            f"huge pages: {self.huge_bytes} of {self.own_bytes} bytes",
            f"NUMA: {wanted}; {nodes or 'the kernel does not tell where pages lie'}",
            f"locked for the GPU: {'yes' if self.is_registered else 'no'}",
            f"copy threads: {self.num_threads} on CPUs {', '.join(map(str, self.cpus))}",
            *self.notes,
        ]
        return "\n".join(lines)


def report_of(
    parts: Sequence[Pages | None],
    rank: int,
    num_bytes: int,
    node: int | None,
    cpus: Collection[int],
    num_threads: int,
    refused: Sequence[str],
) -> HostStoreReport:
    """The report of a rank.

    Args:
        parts: of all ranks; None where one has no expert.
        rank: this one.
        num_bytes: of all parts.
        node: asked for.
        cpus: of the copy threads.
        num_threads: that copy.
        refused: why memory is not locked for the GPU.
    """
    own = parts[rank]
    huge = 0 if own is None else own.huge_bytes()
    by_node = {} if own is None else own.bytes_by_node()
    notes = [*refused]
    if own is not None:
        if not own.huge_allowed:
            notes.append("the kernel knows no transparent huge pages")
        elif huge < own.num_bytes:
            notes.append(
                f"{own.num_bytes - huge} bytes are in small pages: huge ones need shmem_enabled to be advise, always "
                "or within_size (putget doctor), and memory that is not fragmented"
            )
        if not own.filled_here:
            notes.append("pages were got by fallocate, which gives small ones: the kernel is older than 5.14")
        if node is not None and not own.near_node:
            notes.append(f"the kernel did not take node {node} as the preferred one")
    return HostStoreReport(
        num_bytes=num_bytes,
        own_bytes=0 if own is None else own.num_bytes,
        huge_bytes=huge,
        numa_node=node,
        bytes_by_node=by_node,
        is_registered=all(part is None or part.is_registered for part in parts),
        num_threads=num_threads,
        cpus=tuple(sorted(cpus)),
        notes=tuple(notes),
    )
