"""How the ranks of a torch.distributed group meet: what they agree on first, who is near whom, what joins them.

torch.distributed is used here and never again. Every step is one gather, in which a rank that cannot go on says why:
all ranks raise then, instead of waiting for it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from putget.errors import BackendUnavailable, PutgetError
from putget.group.domains import Network, join_options
from putget.group.files import require_descriptors
from putget.group.handshake import Listener, Meeting, host_identity
from putget.group.mesh import Deadline, Mesh, logger
from putget.group.networks import EngineNetwork, NativeNetwork
from putget.hardware import gpus

_CONNECT_TIMEOUT_S = 60.0
_KINDS: dict[str, type[Exception]] = {"argument": ValueError, "unavailable": BackendUnavailable}


class Joined(NamedTuple):
    """A rank's connections once all have met."""

    mesh: Mesh
    domain_of: tuple[int, ...]
    network: NativeNetwork | None


def _tell(group: Any, step: str) -> None:
    """Logs where this rank is: torch.distributed does not say whom it waits for."""
    logger.warning(
        "putget: rank %d is at Communicator, step %r, and has waited %.0f s in torch.distributed.all_gather_object for "
        "ranks that have not called it; that ends by the group's own time-out",
        dist.get_rank(group),
        step,
        _CONNECT_TIMEOUT_S / 2,
    )


def _gather(group: Any, size: int, step: str, make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """The result of every rank's ``make``, by rank; all ranks raise where one cannot, instead of waiting for it.

    Raises:
        ValueError, BackendUnavailable, PutgetError: A rank cannot.
    """
    try:
        own = make()
    except (OSError, PutgetError, ValueError) as error:
        kind = "unavailable" if isinstance(error, BackendUnavailable) else "other"
        own = {"error": str(error), "kind": "argument" if isinstance(error, ValueError) else kind}
    everyone: list[Any] = [None] * size
    waits = threading.Timer(_CONNECT_TIMEOUT_S / 2, _tell, (group, step))
    waits.daemon = True
    waits.start()
    try:
        dist.all_gather_object(everyone, own, group=group)
    finally:
        waits.cancel()
    for rank, made in enumerate(everyone):
        if "error" in made:
            raise _KINDS.get(made["kind"], PutgetError)(f"rank {rank}: {made['error']}")
    return everyone


def meet(group: Any, rank: int, size: int, network: Network | None) -> Joined:
    """Connects this rank with all others of the group.

    Raises:
        ValueError: Ranks have different networks, or a domain's ranks are on several hosts.
        PeerTimeout: A rank did not connect in time.
        BackendUnavailable: The network that a rank asks for is not there.
        PutgetError: A rank cannot be reached, or may not open enough descriptors.
    """

    def describe() -> dict[str, Any]:
        require_descriptors(size + 2)
        wanted = {} if network is None else network.agreed()
        return {"host": host_identity(), "network": wanted, "secret": "" if rank else secrets.token_hex(32)}

    found = _gather(group, size, "hosts", describe)
    _require_equal([one["network"] for one in found])
    hosts = [one["host"] for one in found]
    if network is None and len(set(hosts)) > 1:
        clusters = [one["clusters"] for one in _gather(group, size, "clusters", lambda: {"clusters": _clusters()})]
        network = None if _is_one_cluster(clusters) else Network()
    domain_of = (0,) * size if network is None else network.domain_of(size, hosts)
    joined: NativeNetwork | None = None
    if network is not None and max(domain_of) > 0:
        secret = bytes.fromhex(found[0]["secret"])
        made: list[NativeNetwork] = []

        def join() -> dict[str, Any]:
            one_host = len(set(hosts)) == 1
            provider, nics = ("auto", ()) if network.engine else join_options(network, one_host)
            made.append(EngineNetwork(rank, size, provider, nics, secret, network.staging, network.engine))
            return {}

        _gather(group, size, "network", join)
        joined = made[0]
    return Joined(_connect(group, rank, hosts), domain_of, joined)


def _clusters() -> list[str]:
    """The NVLink clusters of this process's GPUs, "" for a GPU in none; whose memory hosts of one cluster can map."""
    return sorted({f"{gpu.cluster_uuid}/{gpu.clique}" if gpu.fabric and gpu.cluster_uuid else "" for gpu in gpus()})


def _is_one_cluster(clusters: list[list[str]]) -> bool:
    """Whether every rank's GPUs are in the same one."""
    first = clusters[0]
    return len(first) == 1 and first[0] != "" and all(one == first for one in clusters)


def _require_equal(networks: list[dict[str, Any]]) -> None:
    for rank, theirs in enumerate(networks):
        for name in dict.fromkeys([*networks[0], *theirs]):
            first, other = networks[0].get(name), theirs.get(name)
            if first != other:
                raise ValueError(f"network {name} differs between ranks: rank 0 has {first}, rank {rank} has {other}")


def _connect(group: Any, rank: int, hosts: list[str]) -> Mesh:
    """A connection with every other rank: a UNIX socket inside a host, TCP between hosts."""
    near = {peer for peer, host in enumerate(hosts) if host == hosts[rank]} - {rank}
    far = set(range(len(hosts))) - near - {rank}
    one_host = len(set(hosts)) == 1
    with contextlib.ExitStack() as stack:
        listeners: dict[str, Listener] = {}

        def listen() -> dict[str, Any]:
            for name, on_host, peers in (("near", True, near or one_host), ("far", False, far)):
                if peers:
                    listeners[name] = Listener(on_host)
                    stack.callback(listeners[name].close)
            return {name: listener.card() for name, listener in listeners.items()}

        cards = _gather(group, len(hosts), "addresses", listen)
        deadline = Deadline(_CONNECT_TIMEOUT_S)
        met: dict[int, socket.socket] = {}
        try:
            for name, peers in (("near", near), ("far", far)):
                if peers:
                    own = [card.get(name, {}) for card in cards]
                    met.update(Meeting(rank, own, listeners[name], deadline, peers).run())
        except BaseException:
            for sock in met.values():
                sock.close()
            raise
        return Mesh(rank, met, one_host)
