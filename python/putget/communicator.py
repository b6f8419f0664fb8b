"""The expert-parallel group: who takes part, and how they meet for set-up."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from putget import _abi, hardware
from putget._mesh import Listener, Mesh, require_descriptors

_CONNECT_TIMEOUT_S = 60.0


class _LocalGroup:
    """What the emulated ranks of one process share: which CUDA stream belongs to which rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rank_of_stream: dict[tuple[int, int], int] = {}

    def claim_stream(self, device_index: int, stream: int, rank: int) -> int:
        """The rank that this stream belongs to: the one that used it first."""
        with self._lock:
            return self._rank_of_stream.setdefault((device_index, stream), rank)


class Communicator:
    """The ranks of one expert-parallel group.

    Collective over the group. torch.distributed is used here and never again: afterwards ranks talk over putget's own
    sockets (set-up, ``set_active_ranks``) and over symmetric memory (rounds).

    Args:
        group: Any torch.distributed group (gloo or nccl), the world or a subgroup; None is the world.

    Attributes:
        rank: This rank within the group (ep_rank).
        size: Ranks in the group (ep_size), at most 128.

    Raises:
        ValueError: torch.distributed is not initialised, this process is not in the group, or the group is too large.
        PeerTimeout: A rank did not connect in time.
    """

    rank: int
    size: int

    def __init__(self, group: Any = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: torch.distributed is not initialised; for one process use Communicator.local(n)")
        rank = dist.get_rank(group)
        size = dist.get_world_size(group) if rank >= 0 else 0
        if rank < 0:
            raise ValueError("group: this process is not a member of it")
        if size > _abi.MAX_RANKS:
            raise ValueError(f"group has {size} ranks, allowed are up to {_abi.MAX_RANKS}")
        require_descriptors(size + 1)
        listener = Listener()
        try:
            cards: list[Any] = [None] * size
            dist.all_gather_object(cards, listener.card(), group=group)
            mesh = Mesh(rank, cards)
            mesh.connect(_CONNECT_TIMEOUT_S)
            mesh.accept(listener, _CONNECT_TIMEOUT_S)
        finally:
            listener.close()
        self._set(rank, size, mesh, None)

    @classmethod
    def local(cls, n: int) -> tuple[Communicator, ...]:
        """n ranks in this process: threads on CPU, or emulated ranks on one GPU.

        Each communicator is for one thread. On CUDA each thread needs a ``torch.cuda.Stream`` of its own, because a
        rank's kernels wait for the other ranks' kernels, and memory should be allocated before they are launched: an
        allocation may wait for them. All ranks' kernels must fit on the GPU together, which the default of ``num_sms``
        sees to. The environment should say ``CUDA_DEVICE_MAX_CONNECTIONS=32`` and ``CUDA_MODULE_LOADING=EAGER``.

        Args:
            n: Number of ranks, 1 to 128.

        Returns:
            The communicators of ranks 0 to n - 1.

        Raises:
            ValueError: n is out of range.
        """
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= _abi.MAX_RANKS:
            raise ValueError(f"n is {n!r}, allowed are ints from 1 to {_abi.MAX_RANKS}")
        require_descriptors(n * (n + 1))
        listeners = [Listener() for _ in range(n)]
        try:
            cards = [listener.card() for listener in listeners]
            meshes = [Mesh(rank, cards) for rank in range(n)]
            for mesh in meshes:
                mesh.connect(_CONNECT_TIMEOUT_S)
            for mesh, listener in zip(meshes, listeners, strict=True):
                mesh.accept(listener, _CONNECT_TIMEOUT_S)
        finally:
            for listener in listeners:
                listener.close()
        group = _LocalGroup()
        communicators = tuple(cls.__new__(cls) for _ in range(n))
        for rank, communicator in enumerate(communicators):
            communicator._set(rank, n, meshes[rank], group)
        return communicators

    def _set(self, rank: int, size: int, mesh: Mesh, local_group: _LocalGroup | None) -> None:
        self.rank = rank
        self.size = size
        self._mesh = mesh
        self._local_group = local_group
        self._closed = False

    def close(self) -> None:
        """Closes this rank's sockets. Objects made from it go on working, except for ``set_active_ranks``."""
        self._closed = True
        self._mesh.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, {'local' if self._local_group else 'distributed'})"

    def default_sms(self, device: torch.device) -> int:
        """Most SMs of one call where the caller sets no bound; 0 leaves it to the call's size.

        Emulated ranks share one GPU, and their kernels wait for each other: all must fit on it together.
        """
        if self._local_group is None or device.type != "cuda" or self.size == 1:
            return 0
        return max(1, hardware.gpus()[device.index].num_sms // (2 * self.size))

    def synchronize(self, device: torch.device) -> None:
        """Waits for this rank's work: the device, or the current stream where other ranks share the GPU."""
        if device.type != "cuda":
            return
        if self._local_group is None:
            torch.cuda.synchronize(device)
        else:
            torch.cuda.current_stream(device).synchronize()

    def compare(self, what: str, fields: dict[str, Any], timeout_s: float) -> None:
        """Collective: every rank must hold the same fields.

        Raises:
            ValueError: They differ; the message names the first field and both values. Every rank raises.
            PeerTimeout: A rank did not come in time.
        """
        own = {name: str(value) for name, value in fields.items()}
        everyone = range(self.size)
        messages = self._mesh.exchange(what, {"fields": own}, members=everyone, timeout_s=timeout_s)
        for rank in everyone:
            theirs = own if rank == self.rank else messages[rank].fields["fields"]
            reference = own if self.rank == 0 else messages[0].fields["fields"]
            for name in sorted(reference.keys() | theirs.keys()):
                if reference.get(name) != theirs.get(name):
                    raise ValueError(
                        f"{name} differs between ranks: rank 0 has {reference.get(name)}, "
                        f"rank {rank} has {theirs.get(name)}"
                    )

    def refuse(self, reason: str) -> None:
        """Tells the others, who wait in ``compare``, that this rank's own arguments are wrong."""
        self._mesh.refuse(reason)

    def require_open(self) -> None:
        """Raises ValueError after ``close()``."""
        if self._closed:
            raise ValueError("comm is closed")
