"""An object's part in rounds across domains: its network memory, and how the ranks' proxies find each other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from putget import _abi
from putget._agreement import CONNECTING, RUNNING, Attempt
from putget._memory import Memory, close_share, decode_share, encode_share
from putget.communicator import Communicator
from putget.errors import PutgetError
from putget.options import Wire
from putget.workspace import Workspace, stage_of

_NUMBERS = 64  # of workspaces in a generation, and of generations
_CARD_BYTES = 1024


def check_across(comm: Communicator, workspace: Workspace | None) -> None:
    """Refuses what objects over several domains do not have in this version.

    Raises:
        ValueError: The communicator has several domains, and a workspace is given.
    """
    if comm.network is not None and workspace is not None:
        raise ValueError(
            f"workspace is given, but the communicator has {len(comm.domains)} domains: across domains this version "
            "has a workspace for each object"
        )


class Nodes:
    """Joins a native object with other domains. Collective over the group.

    Args:
        workspace: Of the object.
        handle: The native object.
        config: What it was made from.
        home: How the sums that domains send each other travel.
        routes: [max_tokens_per_rank, top_k] int32 twice: where dispatch leaves ranks and slots of all domains.

    Attributes:
        num_bytes: Memory of this rank for it, beside the workspace.

    Raises:
        ValueError: Rows do not fit into the network's writes.
        PeerTimeout: A rank did not come in time.
        PutgetError: The memory could not be had.
    """

    def __init__(
        self,
        workspace: Workspace,
        handle: ctypes.c_void_p,
        config: _abi.Config,
        home: Wire,
        routes: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        comm = workspace.comm
        assert comm.network is not None
        self._comm, self._handle, self._config, self._home, self._routes = comm, handle, config, home, routes
        self._network = comm.network  # outlives the object
        self.join(workspace, range(comm.size), None)

    def leave(self) -> None:
        """Ends this rank's part: its regions are gone, and what others still send finds none.

        Raises:
            PutgetError: The network refused.
        """
        _abi.call("putget_nodes_leave", self._handle)

    def join(self, workspace: Workspace, members: Sequence[int], attempt: Attempt | None) -> None:
        """Begins, or goes on with these ranks, in fresh memory and under a number that no write of before has.

        Raises:
            ValueError, PeerTimeout, PutgetError: As the constructor raises them.
        """
        try:
            card = self._create(members)
            share = self._memory.export()
        except (ValueError, PutgetError) as error:
            self._comm.refuse(str(error))
            raise
        try:
            self._connect(workspace, members, attempt, card, share)
        finally:
            close_share(share)

    def _create(self, members: Sequence[int]) -> bytes:
        """Makes the memory and the object's part; returns the card for the other domains."""
        comm, handle = self._comm, self._handle
        generation, number = divmod(comm.next_number(), _NUMBERS)
        domain_of = (ctypes.c_uint8 * comm.size)(*comm.domain_of)
        active = (ctypes.c_uint32 * _abi.RANK_WORDS)()
        for rank in members:
            active[rank // 32] |= 1 << (rank % 32)
        nodes = _abi.NodesConfig(
            workspace=number,
            generation=generation % _NUMBERS,
            domain_of=ctypes.addressof(domain_of),
            target_ranks=self._routes[0].data_ptr(),
            target_slots=self._routes[1].data_ptr(),
            active=ctypes.addressof(active),
            wire_type=self._home.type,
        )
        shared, own = ctypes.c_uint64(), ctypes.c_uint64()
        sizes = (ctypes.byref(self._config), ctypes.byref(nodes), ctypes.byref(shared), ctypes.byref(own))
        _abi.call("putget_nodes_bytes", *sizes)
        self.num_bytes = shared.value + own.value
        self._memory = Memory(torch.device("cpu"), comm.size, comm.rank, shared.value, fabric=False)
        _abi.call("putget_nodes_create", ctypes.byref(nodes), handle, self._memory.handle, self._network.handle)
        card = (ctypes.c_uint8 * _CARD_BYTES)()
        card_bytes = ctypes.c_uint64(_CARD_BYTES)
        _abi.call("putget_nodes_card", handle, card, ctypes.byref(card_bytes))
        return bytes(card[: card_bytes.value])

    def _connect(
        self, workspace: Workspace, members: Sequence[int], attempt: Attempt | None, card: bytes, share: _abi.Share
    ) -> None:
        """Maps the own domain's memory, connects with the others, and begins when all members have."""
        comm = self._comm
        near = [rank for rank in comm.near_ranks if rank in members]
        timeout_s = workspace.warmup_timeout_s if attempt is None else workspace.timeout_s
        phase = "setup" if attempt is None else "set_active_ranks"
        messages = comm._mesh.exchange(
            "network memory",
            {"share": encode_share(share), "card": card.hex()},
            members=members,
            timeout_s=timeout_s,
            phase=phase,
            descriptors={rank: [share.descriptor] for rank in near},
            **stage_of(attempt, CONNECTING),
        )
        try:
            for rank, message in messages.items():
                if rank in near:
                    self._memory.import_share(rank, decode_share(message.fields["share"], message.descriptors))
                else:
                    theirs = bytes.fromhex(message.fields["card"])
                    place = (ctypes.c_uint8 * len(theirs)).from_buffer_copy(theirs)
                    _abi.call("putget_nodes_connect", self._handle, rank, place, len(theirs))
            _abi.call("putget_nodes_start", self._handle)
        except (ValueError, PutgetError) as error:
            comm.refuse(str(error))
            raise
        finally:
            for message in messages.values():
                message.close()
        comm._mesh.exchange(
            "proxies", {}, members=members, timeout_s=timeout_s, phase=phase, **stage_of(attempt, RUNNING)
        )
        _abi.call("putget_nodes_run", self._handle)
