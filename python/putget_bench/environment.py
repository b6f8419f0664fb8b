"""Where and with what a run was made: what a figure needs beside it to mean anything."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import putget
from putget import config, hardware


def describe(commit: str | None = None) -> dict[str, Any]:
    """Date, commit, versions and machine. No host name and no path: results are published.

    Args:
        commit: what the user says that putget's commit is; by default the environment's word, then git's.
    """
    build = hardware.build()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or config.commit() or checkout_commit(),
        "versions": {
            "putget": putget.__version__,
            "native": build.version,
            "native_has_cuda": build.cuda,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": nccl_version(),
        },
        "machine": {
            "os": f"{platform.system()} {platform.release()}",
            "arch": platform.machine(),
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": [
                {
                    "name": gpu.name,
                    "compute_capability": list(gpu.compute_capability),
                    "num_sms": gpu.num_sms,
                    "total_bytes": gpu.total_bytes,
                }
                for gpu in hardware.gpus()
            ],
            "driver": driver_version(),
        },
    }


def checkout_commit() -> str | None:
    """The commit of the checkout that putget runs from, with "-dirty" if it was changed; None outside of a checkout."""
    package = Path(putget.__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
        tracked = subprocess.run(
            ["git", "-C", str(package), "ls-files", "--error-unmatch", "__init__.py"],
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # Installed into a virtual environment inside of somebody's checkout: that commit says nothing about putget.
    return found if found and tracked.returncode == 0 else None


def cpu_name() -> str:
    """The processor's model."""
    for line in _read_lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def driver_version() -> str | None:
    """The NVIDIA kernel driver's version, or None."""
    for line in _read_lines(Path("/proc/driver/nvidia/version")):
        for word in line.split():
            if word[0].isdigit() and "." in word:
                return word
    return None


def nccl_version() -> str | None:
    """The version of torch's NCCL, or None where it has no use."""
    if not torch.cuda.is_available():
        return None
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
