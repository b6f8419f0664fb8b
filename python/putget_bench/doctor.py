"""`putget doctor`: what this machine can do with putget, and what to do about the rest."""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import putget
from putget import hardware
from putget.balancer import host_settings
from putget.group.domains import ENGINE_PROVIDERS, why_not
from putget_bench import environment

SCHEMA = "putget.doctor/1"
_SYS = Path("/sys")
_BETWEEN = {  # the ends of a provider, and the remedy where it is missing
    "tcp": ("between processes and hosts, over sockets", "bring a network interface up (ip link)"),
    "host": ("between processes of one host", "give the process room in /dev/shm"),
    "nvlink": ("between processes and GPUs of one host", "needs a CUDA GPU: see those above"),
    "verbs": ("between processes and hosts, over InfiniBand or RoCE", "needs libibverbs1 and an active port"),
    "efa": ("between processes and hosts, over EFA", "needs libfabric with its provider efa, and such a NIC"),
}
_GIVE_HUGE_PAGES = ("advise", "always", "within_size")  # to memory that is asked for in huge pages


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: "putget", "cpu", "gpu", "links", "memory", "nic", "transport" or "domains".
        name: what.
        status: "ok", "missing" (could be had) or "absent" (this machine has none).
        detail: what was found.
        remedy: what to install or do, or None.
    """

    area: str
    name: str
    status: str
    detail: str
    remedy: str | None = None


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Prints the findings. Always returns 0: nothing that is missing here is an error."""
    findings = examine()
    if args.json:
        document = {
            "schema": SCHEMA,
            **environment.describe(),
            "findings": [asdict(finding) for finding in findings],
            "runs": what_runs(findings),
        }
        print(json.dumps(document, indent=1))
        return 0
    _show(findings)
    return 0


def examine() -> list[Finding]:
    """Looks at everything."""
    return [
        *_package(),
        *_cpu(),
        *_gpus(),
        *_links(),
        *_handles(),
        *_host_store(),
        *_nics(_SYS),
        *_transports(),
        *_domains(),
    ]


def what_runs(findings: Sequence[Finding]) -> dict[str, bool]:
    """Which backends can be used here."""
    by_name = {(finding.area, finding.name): finding.status == "ok" for finding in findings}
    library = by_name.get(("putget", "native library"), False)
    cuda = library and by_name.get(("putget", "CUDA part"), False) and by_name.get(("gpu", "GPUs"), False)
    return {"cpu": library, "cuda": cuda, "cuda_multi_gpu": cuda and by_name.get(("links", "peer access"), False)}


def _package() -> list[Finding]:
    build = hardware.build()
    findings = [Finding("putget", "version", "ok", putget.__version__)]
    if not build.library:
        return [
            *findings,
            Finding(
                "putget", "native library", "missing", "cannot be loaded", "in a checkout: make build, or pip install ."
            ),
        ]
    findings.append(Finding("putget", "native library", "ok", build.library))
    if build.ablated:
        why = f"built for benchmarks, without {build.ablated}: UNSAFE"
        findings.append(
            Finding("putget", "protocol", "missing", why, "in a checkout: pip install ., or unset PUTGET_LIBRARY")
        )
    if build.cuda:
        findings.append(Finding("putget", "CUDA part", "ok", "built in"))
    else:
        remedy = "in a checkout on x86-64 Linux: pip install --force-reinstall . brings the CUDA compiler from PyPI"
        findings.append(Finding("putget", "CUDA part", "missing", "this build is for CPUs only", remedy))
    return findings


def _cpu() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch_detail = f"{torch.__version__}, CUDA {torch.version.cuda or 'no'}"
    return [
        Finding("cpu", "processor", "ok", f"{environment.cpu_name()}, {cores} cores, {memory / 2**30:.0f} GiB"),
        Finding("cpu", "torch", "ok", torch_detail),
    ]


def _gpus() -> list[Finding]:
    gpus = hardware.gpus()
    if not gpus:
        why = hardware.why_no_cuda() or "none found"
        if environment.driver_version() is None:
            why = "no NVIDIA driver on this machine"
            remedy = "with an NVIDIA GPU: install its driver (https://www.nvidia.com/drivers); without: --device cpu"
            return [Finding("gpu", "GPUs", "absent", why, remedy)]
        return [Finding("gpu", "GPUs", "missing", why, "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container")]
    findings = []
    unusable = hardware.why_no_cuda()
    detail = f"{len(gpus)}, driver {environment.driver_version() or 'unknown'}"
    if unusable is None:
        findings.append(Finding("gpu", "GPUs", "ok", detail))
    else:
        remedy = "install a torch that is built for this driver's CUDA version (https://pytorch.org/get-started)"
        findings.append(Finding("gpu", "GPUs", "missing", f"{detail}: {unusable}", remedy))
    for gpu in gpus:
        major, minor = gpu.compute_capability
        detail = f"{gpu.name}, sm_{major}{minor}, {gpu.num_sms} SMs, {gpu.total_bytes / 2**30:.0f} GiB"
        if gpu.compute_capability >= (9, 0):
            findings.append(Finding("gpu", f"GPU {gpu.index}", "ok", detail))
        else:
            remedy = "putget's CUDA part is for compute capability 9.0 (Hopper) and later; use --device cpu"
            findings.append(Finding("gpu", f"GPU {gpu.index}", "missing", detail, remedy))
    return findings


def _links() -> list[Finding]:
    gpus = hardware.gpus()
    if len(gpus) < 2:
        return [Finding("links", "peer access", "absent", f"needs two GPUs, there are {len(gpus)}")]
    short = [gpu.index for gpu in gpus if len(set(gpu.peers) - {gpu.index}) < len(gpus) - 1]
    if not short:
        return [Finding("links", "peer access", "ok", f"each of {len(gpus)} GPUs reaches all others")]
    reached = "; ".join(f"GPU {gpu.index}: {sorted(set(gpu.peers) - {gpu.index})}" for gpu in gpus)
    remedy = "check nvidia-smi topo -p2p r, the fabric manager (nvidia-fabricmanager) and the container's GPU flags"
    return [Finding("links", "peer access", "missing", reached, remedy)]


def _handles() -> list[Finding]:
    gpus = hardware.gpus()
    if not gpus:
        return [Finding("memory", "CPU ranks", "ok", "shared memory between processes of one host")]
    posix = all(gpu.posix_fd for gpu in gpus)
    findings = [
        Finding("memory", "CPU ranks", "ok", "shared memory between processes of one host"),
        Finding("memory", "POSIX descriptors", "ok", "symmetric memory within this host")
        if posix
        else Finding("memory", "POSIX descriptors", "missing", "not offered by this driver", "install a newer driver"),
    ]
    clusters = {f"{gpu.cluster_uuid}, clique {gpu.clique}" for gpu in gpus if gpu.cluster_uuid}
    if all(gpu.fabric for gpu in gpus) and clusters:
        findings.append(Finding("memory", "fabric handles", "ok", f"NVLink cluster {'; '.join(sorted(clusters))}"))
    elif clusters:
        remedy = "start the IMEX daemon (nvidia-imex) and give the process /dev/nvidia-caps-imex-channels"
        findings.append(Finding("memory", "fabric handles", "missing", "GPUs are in an NVLink cluster", remedy))
    else:
        findings.append(Finding("memory", "fabric handles", "absent", "the GPUs are in no NVLink cluster"))
    return findings


def _host_store() -> list[Finding]:
    """The host memory that `putget.balancer.HostStore` can have."""
    found = host_settings()
    nodes = ", ".join(map(str, found.numa_nodes)) or "none shown"
    room = f"; free are {found.free_bytes / 2**30:.0f} GiB of {found.limit}" if found.limit else ""
    detail = f"NUMA nodes {nodes}{room}"
    if not found.has_memfd:
        return [Finding("memory", "host store", "missing", "no memfd_create", "needs Linux 3.17 or later")]
    findings = [Finding("memory", "host store", "ok", detail)]
    size = f"{found.huge_page_bytes / 2**20:g} MiB"
    if found.shared_huge_pages in _GIVE_HUGE_PAGES:
        findings.append(Finding("memory", "huge pages", "ok", f"{size}, shmem_enabled is {found.shared_huge_pages}"))
    elif found.shared_huge_pages:
        remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        why = f"shmem_enabled is {found.shared_huge_pages}: a host store gets small pages"
        findings.append(Finding("memory", "huge pages", "missing", why, remedy))
    else:
        findings.append(Finding("memory", "huge pages", "absent", "the kernel has none for shared memory"))
    return findings


def _nics(sys: Path) -> list[Finding]:
    findings = []
    for device in _children(sys / "class/infiniband"):
        for port in _children(device / "ports"):
            state, rate = _word(port / "state"), _word(port / "rate")
            layer = _word(port / "link_layer")
            detail = f"port {port.name}: {layer}, {rate}, {state}"
            if "ACTIVE" in state:
                findings.append(Finding("nic", device.name, "ok", detail))
            else:
                findings.append(Finding("nic", device.name, "missing", detail, "connect the port (ibstat, ip link)"))
    if not findings:
        findings.append(Finding("nic", "RDMA devices", "absent", "none in /sys/class/infiniband"))
    for device in _children(sys / "class/net"):
        if device.name == "lo":
            continue
        speed, state = _word(device / "speed"), _word(device / "operstate") or "unknown"
        detail = state
        if speed.isdigit():
            detail += f", {speed} Mb/s"
        findings.append(Finding("nic", device.name, "absent" if state == "down" else "ok", detail))
    return findings


def _transports() -> list[Finding]:
    findings = []
    for library, package, purpose in (
        ("ibverbs", "libibverbs1 ibverbs-providers", "RDMA over InfiniBand and RoCE"),
        ("fabric", "libfabric1", "EFA, TCP and shared memory through libfabric"),
    ):
        found = ctypes.util.find_library(library)
        if found:
            findings.append(Finding("transport", f"lib{library}", "ok", f"{found}: {purpose}"))
        else:
            remedy = f"apt-get install {package}"
            findings.append(Finding("transport", f"lib{library}", "missing", f"not found: {purpose}", remedy))
    return findings


def _domains() -> list[Finding]:
    """Which networks can join domains (`putget.Network`)."""
    if not hardware.build().library:
        return []
    findings = [Finding("domains", "sim", "ok", "between ranks of one process")]
    if importlib.util.find_spec("putget_transfer") is None:
        why = "the others need the package putget_transfer"
        return [
            *findings,
            Finding("domains", "engine", "missing", why, "in a checkout: make transfer, or pip install ./transfer"),
        ]
    for provider in ENGINE_PROVIDERS:
        why_missing = why_not(provider)
        detail, remedy = _BETWEEN[provider]
        if why_missing is None:
            findings.append(Finding("domains", provider, "ok", detail))
        else:
            findings.append(Finding("domains", provider, "missing", why_missing, remedy))
    return findings


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _show(findings: Sequence[Finding]) -> None:
    rows = []
    area = ""
    for finding in findings:
        rows.append((finding.area if finding.area != area else "", finding.name, finding.status, finding.detail))
        area = finding.area
    try:
        _show_table(rows)
    except ModuleNotFoundError:  # a bare install has no rich
        _show_text(rows)
    runs = what_runs(findings)
    print(
        f"CPU ranks: {_yes(runs['cpu'])}.  CUDA: {_yes(runs['cuda'])}.  Several GPUs: {_yes(runs['cuda_multi_gpu'])}."
    )
    remedies = [finding for finding in findings if finding.remedy is not None]
    if remedies:
        print("\nFor the rest:")
    for finding in remedies:
        print(f"  {finding.name}: {finding.remedy}")


_COLUMNS = ("area", "what", "status", "found")


def _show_table(rows: Sequence[tuple[str, str, str, str]]) -> None:
    """With the package rich.

    Raises:
        ModuleNotFoundError: It is not there; nothing has been printed.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from putget_bench.progress import make_console

    styles = {"ok": "green", "missing": "yellow", "absent": "dim"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for area, name, status, detail in rows:
        table.add_row(area, name, Text(status, style=styles[status]), detail)
    make_console().print(table)


def _show_text(rows: Sequence[tuple[str, str, str, str]]) -> None:
    """The same in plain text; the last column is as long as it is."""
    lines = [_COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS) - 1)]
    for line in lines:
        print("  ".join((*map(str.ljust, line, widths), line[-1])))
    print()


def _yes(works: bool) -> str:
    return "yes" if works else "no"
