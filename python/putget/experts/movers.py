"""Rules that hold for every mover of experts."""

from __future__ import annotations

from putget.group.communicator import Communicator

MOST_SMS = 1024  # of a kernel that moves or takes


def require_one_domain(comm: Communicator) -> None:
    """Raises ValueError unless all ranks of the group map each other's memory."""
    if comm.network is not None:
        raise ValueError(
            f"comm has {len(comm.domains)} domains; experts move between ranks that map each other's memory"
        )
