"""Everything that the environment decides. The only module that reads ``os.environ``."""

from __future__ import annotations

import os
from pathlib import Path


def library_override() -> Path | None:
    """``PUTGET_LIBRARY``: load this file instead of the package's own native library."""
    value = os.environ.get("PUTGET_LIBRARY")
    return Path(value) if value else None


def commit() -> str | None:
    """``PUTGET_COMMIT``: the commit that reports name, for a copy of the sources without its git history."""
    return os.environ.get("PUTGET_COMMIT") or None


def carries_engines() -> bool:
    """``PUTGET_ENGINES``: whether the plug-ins that engines find by themselves do anything.

    Raises:
        ValueError: Another value than "", "0" and "1".
    """
    value = os.environ.get("PUTGET_ENGINES", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"PUTGET_ENGINES is {value!r}, allowed are 0 and 1")
    return value == "1"


def engine_timeout_s() -> float:
    """``PUTGET_ENGINE_TIMEOUT_S``: deadline of a round's waits inside SGLang and vLLM, in seconds; 30 by default.

    A server's clients wait as long for a rank that stands still. Set-up and first rounds have a longer one.

    Raises:
        ValueError: No number above 0.
    """
    value = os.environ.get("PUTGET_ENGINE_TIMEOUT_S", "") or "30"
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"PUTGET_ENGINE_TIMEOUT_S is {value!r}, expected seconds above 0")
    return seconds


def log_level() -> str | None:
    """``PUTGET_LOG``: what putget writes to stderr: "debug", "info", "warning" or "error". Unset: logging's own choice.

    Raises:
        ValueError: Another value.
    """
    value = os.environ.get("PUTGET_LOG", "")
    if value.lower() not in ("", "debug", "info", "warning", "error"):
        raise ValueError(f"PUTGET_LOG is {value!r}, allowed are debug, info, warning and error")
    return value.upper() or None


def launcher() -> tuple[int, int, int] | None:
    """``(rank, world_size, local_rank)`` as torchrun or srun sets them; None when started alone."""
    for rank, size, local in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        # The step's size, not the job's: a batch script outside of a step has SLURM_NTASKS too, and is alone.
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size]), int(os.environ.get(local, os.environ[rank]))
    return None


def master() -> str | None:
    """``MASTER_ADDR``: where the ranks of a launcher meet."""
    return os.environ.get("MASTER_ADDR") or None


def socket_interface() -> str | None:
    """``GLOO_SOCKET_IFNAME``: the interface to other hosts, as for torch.distributed's gloo; the first of several."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None


def rendezvous() -> str:
    """``init_method`` for torch.distributed under a launcher: its address, or a port derived from the Slurm step."""
    alone = "MASTER_ADDR" not in os.environ and os.environ.get("SLURM_STEP_NUM_NODES") == "1"
    if not alone:
        return "env://"
    step = int(os.environ["SLURM_JOB_ID"]) * 7 + int(os.environ.get("SLURM_STEP_ID", "0"))
    return f"tcp://127.0.0.1:{20000 + step % 20000}"
