"""Plain bytes between all ranks at once: the ceiling beside which rounds are reported."""

from __future__ import annotations

import ctypes

from putget import Communicator, Workspace
from putget_bench import probe_library

KINDS = ("write", "read", "copy")
_ACCESS_BYTES = 16
_LEAST_BYTES = 1 << 20  # of a rank's share of a workspace: more than a workspace has for itself


class CopyProbe:
    """Moves bytes to or from every peer, in a workspace of its own. Collective to make.

    Args:
        communicator: Of the ranks.
        bytes_per_peer: The most that is moved to or from each peer.
        device: Where the memory is.

    Raises:
        ValueError: bytes_per_peer is not allowed, or the ranks do not share memory.
    """

    def __init__(self, communicator: Communicator, bytes_per_peer: int, device: object) -> None:
        if not 0 <= bytes_per_peer < 1 << 40:
            raise ValueError(f"bytes_per_peer is {bytes_per_peer}, allowed are 0 to {(1 << 40) - 1}")
        if communicator.network is not None:
            raise ValueError(f"communicator has {len(communicator.domains)} domains, which do not share memory")
        share = max(-(-bytes_per_peer // _ACCESS_BYTES) * _ACCESS_BYTES, _LEAST_BYTES)
        self.workspace = Workspace(communicator, communicator.size * share, device)  # type: ignore[arg-type]
        self._memory = probe_library.memory_of(self.workspace)

    def move(self, kind: str, num_bytes: int, num_sms: int | None = None) -> None:
        """Enqueues it on the current stream, or does it at once on the CPU. It orders nothing: the ranks meet between.

        Args:
            kind: "write" or "read" by a kernel's plain accesses; "copy", which writes, by the copy engine, one copy
                after the other.
            num_bytes: Bytes to or from each peer, a multiple of 16.
            num_sms: Most SMs to use, None: all; on the CPU threads, None: one. A copy uses none.

        Raises:
            ValueError: An argument is not allowed.
        """
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}, expected one of {KINDS}")
        if num_sms is not None and num_sms < 1:
            raise ValueError(f"num_sms is {num_sms}, expected at least 1")
        args = probe_library.CopyArgs(
            kind=probe_library.READ if kind == "read" else probe_library.WRITE,
            num_sms=num_sms or 0,
            bytes_per_peer=0 if kind == "copy" else num_bytes,
            stream=probe_library.current_stream(self.workspace.device),
        )
        if kind == "copy":
            self._copy(num_bytes)
        else:
            probe_library.call("putget_probe_copy", ctypes.byref(self._memory), ctypes.byref(args))

    def _copy(self, num_bytes: int) -> None:
        size, rank = self.workspace.comm.size, self.workspace.comm.rank
        room = self.workspace.num_bytes // size
        if num_bytes % _ACCESS_BYTES or not 0 <= num_bytes <= room:
            raise ValueError(f"bytes_per_peer is {num_bytes}, allowed are multiples of 16 up to {room}")
        split = slice(rank * num_bytes, (rank + 1) * num_bytes)
        parts = [self.workspace.memory.peer_tensor(peer)[split] for peer in range(size)]
        for step in range(1, size):
            parts[(rank + step) % size].copy_(parts[rank])

    def close(self) -> None:
        """Gives the memory back."""
        self.workspace.close()
