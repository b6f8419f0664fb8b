"""NUMA nodes of this host: which there are, their CPUs, and which one is near a GPU. Linux's sysfs says so."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_ROOT = Path("/")


def nodes(root: Path = _ROOT) -> tuple[int, ...]:
    """The nodes that are online; none where the kernel shows none."""
    return _numbers(root / "sys/devices/system/node/online")


def cpus_of(node: int, root: Path = _ROOT) -> frozenset[int]:
    """The CPUs of a node; none for a node that is memory alone."""
    return frozenset(_numbers(root / f"sys/devices/system/node/node{node}/cpulist"))


def own_node(root: Path = _ROOT) -> int | None:
    """The node that has all CPUs of this thread's affinity; None if there is no such node."""
    allowed = os.sched_getaffinity(0)
    for node in nodes(root):
        if allowed <= cpus_of(node, root):
            return node
    return None


def node_of_gpu(device: torch.device, root: Path = _ROOT) -> int | None:
    """The node whose CPUs are near a CUDA device, by its PCI address; None where the kernel does not know it."""
    properties = torch.cuda.get_device_properties(device)
    ids = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in ids:  # an older torch
        return None
    domain, bus, slot = ids
    found = _word(root / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node")
    return int(found) if found.isdigit() else None  # -1: the firmware does not say


def _numbers(path: Path) -> tuple[int, ...]:
    """A list as the kernel writes it: 0-3,8."""
    found: list[int] = []
    for part in filter(None, _word(path).split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
