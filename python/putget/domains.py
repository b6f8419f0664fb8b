"""Domains, ranks that map each other's memory, and the network that joins several of them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from putget import _abi
from putget._networks import EngineNetwork, LocalNetwork, NativeNetwork

PROVIDERS = ("auto", "verbs", "efa", "tcp", "shm", "nvlink", "sim")
NAMED_NICS = ("tcp", "verbs")  # where a caller may say which
MOST_NICS = 4
LOCAL_PROVIDERS = ("auto", "sim", "tcp", "shm")
LOOPBACK = ("127.0.0.1",)


@dataclass(frozen=True)
class Network:
    """How domains are joined, for ``Communicator.local(network=)``.

    Attributes:
        provider: "sim" or "auto": threads of this process copy what ranks write, in random order. "tcp" and "shm": a
            transfer engine for each rank (the package putget_transfer), over sockets or this host's shared memory.
            "verbs", "efa" and "nvlink" are names that this version knows and does not have.
        nics: Of "tcp": this host's addresses, 1 to 4. None: the loopback.
        domain_size: Ranks of a domain; the last domain has what is left. None: all ranks are one domain.

    Raises:
        ValueError: provider is no name of one, nics are none, or domain_size is no int from 1 to 128.
    """

    provider: str = "auto"
    nics: tuple[str, ...] | None = None
    domain_size: int | None = None

    def __post_init__(self) -> None:
        if self.provider not in PROVIDERS:
            raise ValueError(f"provider is {self.provider!r}, expected one of {', '.join(PROVIDERS)}")
        self._check_nics(self.nics)
        size: Any = self.domain_size
        if size is None:
            return
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _abi.MAX_RANKS:
            raise ValueError(f"domain_size is {size!r}, expected None or an int from 1 to {_abi.MAX_RANKS}")

    def _check_nics(self, nics: Any) -> None:
        if nics is None:
            return
        if not isinstance(nics, tuple) or not all(isinstance(nic, str) and nic for nic in nics):
            raise ValueError(f"nics is {nics!r}, expected None or a tuple of names")
        if not 1 <= len(nics) <= MOST_NICS:
            raise ValueError(f"nics has {len(nics)} names, allowed are 1 to {MOST_NICS}")
        if self.provider not in NAMED_NICS:
            raise ValueError(f"nics is {nics!r}, but provider {self.provider!r} has none to choose from")

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
    if network.provider not in LOCAL_PROVIDERS:
        raise ValueError(f"network provider is {network.provider!r}, ranks of one process have 'sim', 'tcp' and 'shm'")
    return network


def join_local(network: Network, size: int) -> list[NativeNetwork]:
    """The network of each of ``size`` ranks of this process.

    Raises:
        BackendUnavailable: The transfer engine is not there, or has no such network.
        PutgetError: The operating system refused.
    """
    if network.provider in ("auto", "sim"):
        return [LocalNetwork(size)] * size
    secret = secrets.token_bytes(32)
    nics = network.nics or (LOOPBACK if network.provider == "tcp" else ())
    return [EngineNetwork(rank, size, network.provider, nics, secret) for rank in range(size)]
