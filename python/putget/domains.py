"""Domains, ranks that map each other's memory, and the network that joins several of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from putget import _abi

PROVIDERS = ("auto", "verbs", "efa", "tcp", "shm", "nvlink", "sim")


@dataclass(frozen=True)
class Network:
    """How domains are joined, for ``Communicator.local(network=)``.

    Attributes:
        provider: "sim" or "auto": threads of this process copy what ranks write, in random order. Networks between
            hosts ("verbs", "efa", "tcp", "shm", "nvlink") are names that this version knows and does not have.
        domain_size: Ranks of a domain; the last domain has what is left. None: all ranks are one domain.

    Raises:
        ValueError: provider is no name of one, or domain_size is no int from 1 to 128.
    """

    provider: str = "auto"
    domain_size: int | None = None

    def __post_init__(self) -> None:
        if self.provider not in PROVIDERS:
            raise ValueError(f"provider is {self.provider!r}, expected one of {', '.join(PROVIDERS)}")
        size: Any = self.domain_size
        if size is None:
            return
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _abi.MAX_RANKS:
            raise ValueError(f"domain_size is {size!r}, expected None or an int from 1 to {_abi.MAX_RANKS}")

    def domain_of(self, size: int) -> tuple[int, ...]:
        """The domain of each of ``size`` ranks: contiguous blocks, numbered from 0."""
        block = self.domain_size or size
        return tuple(rank // block for rank in range(size))


def check_local(network: Network | None) -> Network:
    """The network between ranks of this process.

    Raises:
        ValueError: It is no putget.Network, or one between hosts.
    """
    if network is None:
        return Network()
    if not isinstance(network, Network):
        raise ValueError(f"network is {network!r}, expected None or a putget.Network")
    if network.provider not in ("auto", "sim"):
        raise ValueError(f"network provider is {network.provider!r}, ranks of one process have 'sim' alone")
    return network
