"""Host memory that ranks share: what this machine allows, and mappings of it that live as long as views of them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from putget import _abi, _abi_balancer
from putget.experts import numa
from putget.memory import host_memory

_ROOT = Path("/")
_THP = "sys/kernel/mm/transparent_hugepage"
_USUAL_HUGE_PAGE_BYTES = 1 << 21
_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts


@dataclass(frozen=True)
class HostSettings:
    """The settings of this machine for shared host memory.

    Attributes:
        huge_page_bytes: size of a transparent huge page.
        shared_huge_pages: the kernel's setting for shared memory (``shmem_enabled``); a `HostStore` gets huge pages
            with "advise", "always" and "within_size". "" where the kernel has none.
        numa_nodes: nodes that are online.
        has_memfd: whether this Python and kernel make anonymous shared memory.
        limit: name of the bound on memory with the least room: the host or a cgroup. "" where none can be seen.
        free_bytes: its room.
        most_bytes: what it allows in all.
    """

    huge_page_bytes: int
    shared_huge_pages: str
    numa_nodes: tuple[int, ...]
    has_memfd: bool
    limit: str
    free_bytes: int
    most_bytes: int


def host_settings(root: Path = _ROOT) -> HostSettings:
    """The settings of this machine now.

    Args:
        root: where /proc and /sys are.
    """
    chosen = re.search(r"\[(\w+)\]", _text(root / _THP / "shmem_enabled"))
    tightest = min(host_memory.limits(root), key=lambda limit: limit.free, default=None)
    return HostSettings(
        huge_page_bytes=huge_page_bytes(root),
        shared_huge_pages=chosen.group(1) if chosen else "",
        numa_nodes=numa.nodes(root),
        has_memfd=_has_memfd(),
        limit="" if tightest is None else tightest.name,
        free_bytes=0 if tightest is None else tightest.free,
        most_bytes=0 if tightest is None else tightest.most,
    )


def huge_page_bytes(root: Path = _ROOT) -> int:
    """Size of a transparent huge page; the usual one where the kernel has none."""
    found = _text(root / _THP / "hpage_pmd_size").strip()
    return int(found) if found.isdigit() else _USUAL_HUGE_PAGE_BYTES


def make_descriptor(name: str, num_bytes: int) -> int:
    """Anonymous shared memory of this size, which nobody can make smaller. The caller closes the descriptor.

    Raises:
        OSError: The kernel refuses.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Pages:
    """A mapping of shared memory. It is given up when neither this object nor a view of it is left.

    Args:
        descriptor: the memory; the caller may close it afterwards.
        num_bytes: its size, a multiple of alignment.
        alignment: of the address, in bytes.
        fill: whether all pages are got now, instead of at their first use.
        numa_node: node that the pages should come from; it counts where `fill` is True.

    Attributes:
        address: of the first byte.
        num_bytes: its size.
        near_node, huge_allowed, filled_here: what the kernel took, see putget_balancer.h.
        is_registered: whether CUDA has it as page-locked memory.

    Raises:
        PutgetError: The kernel does not give the memory.
    """

    def __init__(self, descriptor: int, num_bytes: int, alignment: int, *, fill: bool, numa_node: int | None) -> None:
        args = _abi_balancer.HostPages(
            descriptor=descriptor,
            numa_node=-1 if numa_node is None else numa_node,
            fill=int(fill),
            bytes=num_bytes,
            alignment=alignment,
        )
        _abi.call("putget_host_pages_map", ctypes.byref(args))
        self.address = int(args.address)
        self.num_bytes = num_bytes
        self.near_node = bool(args.got & _abi_balancer.HOST_NEAR_NODE)
        self.huge_allowed = bool(args.got & _abi_balancer.HOST_HUGE_ALLOWED)
        self.filled_here = bool(args.got & _abi_balancer.HOST_FILLED_HERE)
        self._registered: list[torch.device] = []
        end = weakref.finalize(self, _give_up, self.address, num_bytes, self._registered, os.getpid())
        end.atexit = False  # handlers and threads may still read views when the interpreter ends

    @property
    def is_registered(self) -> bool:
        """See the class."""
        return bool(self._registered)

    def register(self, device: torch.device) -> str | None:
        """Locks the pages for a CUDA device; why CUDA refuses, or None."""
        with torch.cuda.device(device):
            error = _cuda_runtime().cudaHostRegister(self.address, self.num_bytes, _PORTABLE)
        if int(error) != 0:
            return f"cudaHostRegister refuses {self.num_bytes} bytes: {error}"
        self._registered.append(device)
        return None

    def bytes(self) -> Tensor:
        """uint8 [num_bytes]: the memory itself, which stays mapped as long as the tensor or a view of it lives."""
        array = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        array._pages = self  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)

    def huge_bytes(self) -> int:
        """How much of it is mapped in huge pages now."""
        return mapped_huge(_text(_ROOT / "proc/self/smaps"), self.address, self.num_bytes)

    def bytes_by_node(self) -> dict[int, int]:
        """How much of it lies on which NUMA node; nothing where the kernel does not tell."""
        return mapped_by_node(_text(_ROOT / "proc/self/numa_maps"), self.address, self.num_bytes)


def mapped_huge(smaps: str, address: int, num_bytes: int) -> int:
    """Bytes in huge pages of a range of addresses, by the text of /proc/self/smaps."""
    total, is_inside = 0, False
    for line in smaps.splitlines():
        start = re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line)
        if start:
            is_inside = address <= int(start.group(1), 16) < address + num_bytes
        elif is_inside and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
            total += 1024 * int(line.split()[1])
    return total


def mapped_by_node(numa_maps: str, address: int, num_bytes: int) -> dict[int, int]:
    """Bytes on each node of a range of addresses, by the text of /proc/self/numa_maps."""
    found: dict[int, int] = {}
    for line in numa_maps.splitlines():
        words = line.split()
        if not words or not address <= int(words[0], 16) < address + num_bytes:
            continue
        page = [int(word.partition("=")[2]) for word in words if word.startswith("kernelpagesize_kB=")] or [4]
        for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
            found[int(node)] = found.get(int(node), 0) + 1024 * page[0] * int(pages)
    return found


def _give_up(address: int, num_bytes: int, registered: list[torch.device], process: int) -> None:
    if os.getpid() != process:  # a forked child: its copy of the mapping ends with it
        return
    for _ in registered:
        _cuda_runtime().cudaHostUnregister(address)
    _abi.call("putget_host_pages_unmap", address, num_bytes)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("putget", os.MFD_CLOEXEC))
    except (AttributeError, OSError):
        return False
    return True


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
