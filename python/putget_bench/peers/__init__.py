"""Other ways to do the same, timed beside putget. Each is optional: what is not there is named, with the reason.

A peer is found without importing it, and made on the ranks, which is when everything that it lacks shows. It takes part
only if all ranks have it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from putget_bench.contender import Contender
from putget_bench.inputs import StandInExperts
from putget_bench.peers import collectives, deepep, flashinfer
from putget_bench.settings import Settings

MEASURED, ABSENT, NOT_SUPPORTED = "measured", "absent", "not supported"


@dataclass(frozen=True)
class PeerStatus:
    """Whether a peer takes part.

    Attributes:
        name: as given on the command line.
        status: MEASURED, ABSENT (not installed, or not importable) or NOT_SUPPORTED (on this machine, or of this
            shape).
        detail: what it is, or why it is missing.
    """

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class Peer:
    """One entry of `--peers`.

    Attributes:
        package: the Python package that it needs; None where torch is enough.
        devices: where it runs.
        describe: what it is and which version, on a device; called after `make`.
        make: its contenders on this rank. Collective. It raises ImportError for a package that is not usable, and any
            other exception for a shape or a machine that it does not support.
    """

    package: str | None
    devices: tuple[str, ...]
    describe: Callable[[str], str]
    make: Callable[[Settings, StandInExperts, torch.device], list[Contender]]


REGISTRY = {
    "nccl": Peer(None, ("cpu", "cuda"), collectives.describe, collectives.make),
    "flashinfer": Peer("flashinfer", ("cuda",), flashinfer.describe, flashinfer.make),
    "deepep": Peer("deep_ep", ("cuda",), deepep.describe, deepep.make),
}


def find(name: str, device: str) -> PeerStatus:
    """Says whether a peer is worth trying on this machine; `make` has the last word."""
    peer = REGISTRY[name]
    if peer.package is not None and importlib.util.find_spec(peer.package) is None:
        return PeerStatus(name, ABSENT, f"the Python package {peer.package} is not installed")
    if device not in peer.devices:
        return PeerStatus(name, NOT_SUPPORTED, f"it runs on {' and '.join(peer.devices)}, this run is on {device}")
    return PeerStatus(name, MEASURED, peer.package or "torch.distributed")


def make(
    names: tuple[str, ...], settings: Settings, experts: StandInExperts, device: torch.device
) -> tuple[dict[str, list[Contender]], list[PeerStatus]]:
    """The contenders of the peers that all ranks can have, by the peer's name, and what became of each peer.

    Collective: the same on every rank.
    """
    made: dict[str, list[Contender]] = {}
    statuses = []
    for name in names:
        status = find(name, device.type)
        contenders: list[Contender] = []
        if status.status == MEASURED:
            try:
                contenders = REGISTRY[name].make(settings, experts, device)
                status = PeerStatus(name, MEASURED, REGISTRY[name].describe(device.type))
            except ImportError as error:
                status = PeerStatus(name, ABSENT, f"it cannot be imported: {one_line(error)}")
            except Exception as error:
                status = PeerStatus(name, NOT_SUPPORTED, one_line(error))
        everyone = [status] * dist.get_world_size()
        dist.all_gather_object(everyone, status)
        status = next((theirs for theirs in everyone if theirs.status != MEASURED), everyone[0])
        statuses.append(status)
        if status.status == MEASURED:
            made[name] = contenders
        else:
            for contender in contenders:
                contender.close()
    return made, statuses


def one_line(error: Exception) -> str:
    """The first line of an exception's text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
