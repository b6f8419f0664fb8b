"""This machine's hardware, as far as putget is concerned. Never raises for want of a GPU."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from putget import _abi
from putget._version import __version__
from putget.errors import BackendUnavailable, PutgetError

_ABLATED = ("", "deadlines", "waits")  # by putget_ablation


@dataclass(frozen=True)
class BuildInfo:
    """The native library.

    Attributes:
        version: Version of the package.
        cuda: Whether the library has its CUDA part.
        library: Its path; "" where it cannot be loaded.
        ablated: What a build for benchmarks leaves out: "deadlines" or "waits"; "" for the product.
    """

    version: str
    cuda: bool
    library: str
    ablated: str = ""


@dataclass(frozen=True)
class GpuInfo:
    """One GPU.

    Attributes:
        index: CUDA device number.
        name: As the driver calls it.
        compute_capability: (major, minor).
        num_sms: Streaming multiprocessors.
        uuid: As nvidia-smi shows it.
        total_bytes: Device memory.
        posix_fd: Symmetric memory can be shared by POSIX descriptors (one host).
        fabric: ... by fabric handles (hosts of one NVLink cluster).
        cluster_uuid: NVLink cluster; None where there is none.
        clique: Within the cluster.
        peers: Device numbers that this one reaches directly.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    uuid: str
    total_bytes: int
    posix_fd: bool
    fabric: bool
    cluster_uuid: str | None
    clique: int
    peers: tuple[int, ...]


def _hyphenated(raw: bytes) -> str:
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def build() -> BuildInfo:
    """The build of the installed native library."""
    try:
        ablated = _ABLATED[_abi.library().putget_ablated()]
    except BackendUnavailable:
        return BuildInfo(__version__, False, "")
    cuda = True
    try:
        _count()
    except BackendUnavailable as error:
        cuda = "no CUDA part" not in str(error)
    return BuildInfo(__version__, cuda, str(_abi.library_path()), ablated)


def _count() -> int:
    count = ctypes.c_uint32()
    _abi.call("putget_gpu_count", ctypes.byref(count))
    return count.value


def why_no_cuda() -> str | None:
    """Why device="cuda" does not work here, or None where it does."""
    try:
        if _count() == 0:
            return "the CUDA driver sees no GPU"
    except PutgetError as error:
        return str(error)
    import torch

    if not torch.cuda.is_available():
        return "torch cannot use CUDA (torch.cuda.is_available() is False)"
    return None


@functools.cache
def gpus() -> tuple[GpuInfo, ...]:
    """The GPUs that CUDA shows to this process; none where there is no driver."""
    try:
        count = _count()
    except PutgetError:
        return ()
    found = []
    for index in range(count):
        gpu = _abi.Gpu()
        _abi.call("putget_gpu_report", index, ctypes.byref(gpu))
        cluster = bytes(gpu.cluster_uuid)
        found.append(
            GpuInfo(
                index=index,
                name=gpu.name.decode(errors="replace"),
                compute_capability=(gpu.compute_major, gpu.compute_minor),
                num_sms=gpu.num_sms,
                uuid="GPU-" + _hyphenated(bytes(gpu.uuid)),
                total_bytes=gpu.total_bytes,
                posix_fd=bool(gpu.posix_descriptors),
                fabric=bool(gpu.fabric_handles),
                cluster_uuid=_hyphenated(cluster) if any(cluster) else None,
                clique=gpu.clique,
                peers=tuple(peer for peer in range(count) if gpu.peers >> peer & 1),
            )
        )
    return tuple(found)
