"""Domains, ranks that map each other's memory, and the network that joins several of them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from putget import _abi
from putget.errors import BackendUnavailable, PutgetError
from putget.group.networks import EngineNetwork, LocalNetwork, NativeNetwork, engine_handle
from putget.group.reach import own_address

PROVIDERS = ("auto", "verbs", "efa", "tcp", "host", "nvlink", "sim")
NAMED_NICS = ("tcp", "verbs")  # where a caller may say which
MOST_NICS = 4
LOCAL_PROVIDERS = ("auto", "sim", "tcp", "host")
GROUP_PROVIDERS = ("auto", "tcp", "host", "nvlink", "verbs", "efa")
ENGINE_PROVIDERS = ("tcp", "host", "nvlink", "verbs", "efa")
ONE_HOST_PROVIDERS = ("host", "nvlink")
GPU_PROVIDERS = ("sim", "nvlink", "verbs", "efa")  # which reach the memory of GPUs
HOST_PROVIDERS = ("auto", "tcp", "host", "verbs", "efa", "sim")  # ... and of hosts
LOOPBACK = ("127.0.0.1",)
STAGINGS = ("auto", "host", "device")


@dataclass(frozen=True)
class Network:
    """How domains are joined, for ``Communicator(network=)`` and ``Communicator.local(network=)``.

    Attributes:
        provider: "tcp" and "host": a transfer engine for each rank (the package putget_transfer), over sockets or one
            host's shared memory. "nvlink": the engine between processes and GPUs of one host; it copies with the
            device that is current when ranks meet. "verbs" and "efa": the engine over InfiniBand or RoCE, and over
            libfabric, between processes; the first is tested over soft-RoCE, the second not. "sim": for ranks of one
            process, threads copy what ranks write, in random order. "auto": "sim" for ranks of one process, "host" on
            one host, else "tcp".
        nics: This host's, 1 to 4: addresses for "tcp", devices for "verbs". None: the loopback on one host; over
            "tcp" between hosts where ranks meet, see ``GLOO_SOCKET_IFNAME``; else those that the engine chooses.
        staging: Where rows wait for the network. "host": in host memory, which a GPU maps, and which any network
            reaches. "device": in the memory of the GPU that is current when ranks meet, for objects on CUDA. "nvlink"
            reaches that alone, "sim" both, "verbs" and "efa" where driver and NIC have GPUDirect; wait for the stream
            before a copy to memory that is not pinned. "auto": "host", over "nvlink" "device".
        domain_size: Ranks of a domain, which share a host; the last domain has what is left. None: a domain for each
            host.
        engine: This process's ``putget_transfer.Engine``, whose threads, connections and first device group the rounds
            use. All ranks bring one, of the same provider and secret, or none does. It stays open until the
            communicator and its objects are closed. None: each rank makes an engine.

    Raises:
        ValueError: provider or staging is no name of one, the provider does not reach such memory, nics are none,
            domain_size is no int from 1 to 128, the engine is closed or none, or provider or nics came with it.
        BackendUnavailable: An engine came, and putget_transfer cannot be loaded.
    """

    provider: str = "auto"
    nics: tuple[str, ...] | None = None
    domain_size: int | None = None
    staging: str = "auto"
    engine: Any = None

    def __post_init__(self) -> None:
        if self.provider not in PROVIDERS:
            raise ValueError(f"provider is {self.provider!r}, expected one of {', '.join(PROVIDERS)}")
        if self.staging not in STAGINGS:
            raise ValueError(f"staging is {self.staging!r}, expected one of {', '.join(STAGINGS)}")
        if self.engine is not None:
            if self.provider != "auto" or self.nics is not None:
                raise ValueError(
                    f"provider is {self.provider!r} and nics is {self.nics!r}, but the engine has its own: "
                    "leave both out"
                )
            engine_handle(self.engine)
        if self.staging == "device" and self.engine is None and self.provider not in GPU_PROVIDERS:
            raise ValueError(
                f"staging is 'device', but provider {self.provider!r} reaches host memory alone; GPUs are "
                f"reached by {', '.join(map(repr, GPU_PROVIDERS))}"
            )
        if self.staging == "host" and self.provider not in HOST_PROVIDERS:
            raise ValueError(f"staging is 'host', but provider {self.provider!r} reaches memory of GPUs alone")
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

    def agreed(self) -> dict[str, Any]:
        """The fields that all ranks have alike. NICs have other names on other hosts."""
        shared = "none" if self.engine is None else "the caller's"
        return {
            "provider": self.provider,
            "domain_size": self.domain_size,
            "staging": self.staging,
            "engine": shared,
        }

    def domain_of(self, size: int, hosts: Sequence[str] | None = None) -> tuple[int, ...]:
        """The domain of each of ``size`` ranks, numbered from 0: contiguous blocks, or the hosts.

        Raises:
            ValueError: A domain's ranks are on several hosts.
        """
        if hosts is None:
            hosts = [""] * size
        if self.domain_size is None:
            numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
            return tuple(numbers[host] for host in hosts)
        domains = tuple(rank // self.domain_size for rank in range(size))
        for rank, domain in enumerate(domains):
            if hosts[rank] != hosts[domain * self.domain_size]:
                raise ValueError(
                    f"domain_size is {self.domain_size}, but ranks {domain * self.domain_size} and {rank} are on "
                    "different hosts"
                )
        return domains


def check_local(network: Network | None) -> Network:
    """The network between ranks of this process.

    Raises:
        ValueError: It is no putget.Network, or one between hosts.
    """
    if network is None:
        return Network()
    if not isinstance(network, Network):
        raise ValueError(f"network is {network!r}, expected None or a putget.Network")
    if network.engine is not None:
        raise ValueError("network engine: one engine joins processes; ranks of one process each make one")
    if network.provider not in LOCAL_PROVIDERS:
        raise ValueError(f"network provider is {network.provider!r}, ranks of one process have 'sim', 'tcp' and 'host'")
    return network


def check_group(network: Network | None) -> None:
    """Whether a network can join the processes of a group.

    Raises:
        ValueError: It is no putget.Network, or none between processes in this version.
    """
    if network is None:
        return
    if not isinstance(network, Network):
        raise ValueError(f"network is {network!r}, expected None or a putget.Network")
    if network.provider not in GROUP_PROVIDERS:
        raise ValueError(
            f"network provider is {network.provider!r}, ranks of several processes have "
            f"{', '.join(map(repr, GROUP_PROVIDERS))}"
        )


def join_options(network: Network, one_host: bool) -> tuple[str, tuple[str, ...]]:
    """Provider and NICs of a rank's transfer engine. Over sockets they are where the ranks' own connections are.

    Raises:
        ValueError: It joins processes of one host alone, and there are several.
    """
    provider = network.provider
    if provider in ONE_HOST_PROVIDERS and not one_host:
        raise ValueError(f"network provider is {provider!r}, which joins ranks of one host; these are on several")
    if provider == "auto":
        provider = "host" if one_host else "tcp"
    if network.nics or provider != "tcp":
        return provider, network.nics or ()
    address = None if one_host else own_address()
    return provider, LOOPBACK if one_host else () if address is None else (address,)


def join_local(network: Network, size: int) -> list[NativeNetwork]:
    """The network of each of ``size`` ranks of this process.

    Raises:
        BackendUnavailable: The transfer engine is not there, or has no such network.
        PutgetError: The operating system refused.
    """
    if network.provider in ("auto", "sim"):
        return [LocalNetwork(size, staging=network.staging)] * size
    secret = secrets.token_bytes(32)
    options = join_options(network, one_host=True)
    return [EngineNetwork(rank, size, *options, secret, network.staging) for rank in range(size)]


def why_not(provider: str) -> str | None:
    """Why ranks of several processes cannot have this provider on this machine; None where they can.

    Opens a network of it and closes it again.

    Args:
        provider: One of the transfer engine's, ENGINE_PROVIDERS.

    Raises:
        ValueError: It is none of these.
    """
    if provider not in ENGINE_PROVIDERS:
        raise ValueError(f"provider is {provider!r}, expected one of {', '.join(ENGINE_PROVIDERS)}")
    try:
        EngineNetwork(0, 2, provider, (), secrets.token_bytes(32))
    except (BackendUnavailable, PutgetError) as error:
        return str(error)
    return None
