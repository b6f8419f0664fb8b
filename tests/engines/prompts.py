"""Prompts for the engines, and functions that their programs share: a port, where ranks seem to be, how they end."""

from __future__ import annotations

import contextlib
import fcntl
import random
import socket
import tempfile
from pathlib import Path
from typing import TextIO

PROMPTS = [[3, 17, 41, 5, 96, 2], [77], [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [50, 51], [1, 2, 3]]
NEW_TOKENS = [8, 3, 6, 8, 1]
_claims: list[TextIO] = []  # locked files: ports that were given away


def each_rank_on_a_host() -> None:
    """Has putget take each rank of this process's engine for one of a host of its own."""
    import torch

    from putget.group import meeting

    meeting.host_identity = lambda: f"host {torch.distributed.get_rank()}"


def free_port() -> int:
    """A port to listen at later. Not one of those that connections of any program get meanwhile, from 32768 on.

    Nor one that SGLang takes by itself, below 30000. Nobody gets it again while this process or a fork of it lives.
    """
    while True:
        port = random.SystemRandom().randrange(30000, 32768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port))
            claim = open(Path(tempfile.gettempdir(), f"putget_port_{port}"), "w")  # noqa: SIM115 - held open
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _claims.append(claim)
            return port


def kill_children() -> None:
    """All of them, and theirs. Those of a process that has just ended, as Python's resource tracker, end meanwhile."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
