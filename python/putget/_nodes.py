"""Objects' parts in rounds across domains: their network memory, and how the ranks' proxies find each other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from putget import _abi
from putget._agreement import CONNECTING, RUNNING, Attempt
from putget._memory import Memory, close_share, decode_share, encode_share
from putget._peers import Message
from putget.errors import PutgetError
from putget.options import Wire
from putget.workspace import Workspace, stage_of

_NUMBERS = 64  # of workspaces in a generation, and of generations
_CARD_BYTES = 1024


class Nodes:
    """Joins a native object with other domains. Collective over the group.

    Args:
        workspace: Of the object.
        handle: The native object.
        config: What it was made from.
        home: How the sums that domains send each other travel.
        routes: [max_tokens_per_rank, top_k] int32 twice: where dispatch leaves ranks and slots of all domains.

    Attributes:
        name: Tells it from others of the communicator; the same on all ranks.
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
        self.name = comm.numbers  # of the object; the same on all ranks
        workspace.memory.epoch()  # waits for the device: rounds are counted from there on, on all ranks alike
        self.join(workspace, [self], range(comm.size), None)

    def leave(self) -> None:
        """Ends this rank's part: its regions are gone, and what others still send finds none.

        Raises:
            PutgetError: The network refused.
        """
        _abi.call("putget_nodes_leave", self._handle)

    def create(self, members: Sequence[int]) -> tuple[str, _abi.Share]:
        """Makes the memory and the object's part, under a number that no write of before has.

        Returns:
            The card for the other domains, and the memory's share for the own one.

        Raises:
            ValueError, PutgetError: As the constructor raises them.
        """
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
        return bytes(card[: card_bytes.value]).hex(), self._memory.export()

    def meet(self, rank: int, card: str, share: _abi.Share | None) -> None:
        """Maps the memory of a rank of the own domain, or connects with one of another.

        Raises:
            ValueError, PeerTimeout, PutgetError: As the constructor raises them.
        """
        if share is not None:
            self._memory.import_share(rank, share)
            return
        theirs = bytes.fromhex(card)
        place = (ctypes.c_uint8 * len(theirs)).from_buffer_copy(theirs)
        _abi.call("putget_nodes_connect", self._handle, rank, place, len(theirs))

    def start(self) -> None:
        """When it has met all others: makes the proxy."""
        _abi.call("putget_nodes_start", self._handle)

    def run(self) -> None:
        """When all others have started."""
        _abi.call("putget_nodes_run", self._handle)

    @staticmethod
    def join(workspace: Workspace, parts: Sequence[Nodes], members: Sequence[int], attempt: Attempt | None) -> None:
        """Begins rounds of a workspace's objects with these ranks, or goes on with them. Collective among the members.

        Raises:
            ValueError: The members have different objects on the workspace; or as the constructor raises it.
            PeerTimeout, PutgetError: As the constructor raises them.
        """
        mesh = workspace.comm._mesh
        timeout_s = workspace.warmup_timeout_s if attempt is None else workspace.timeout_s
        phase = "setup" if attempt is None else "set_active_ranks"
        messages = _exchange_memory(workspace, parts, members, timeout_s, phase, attempt)
        try:
            for rank, message in messages.items():
                _meet(workspace, parts, rank, message, phase)
            for part in parts:
                part.start()
        except (ValueError, PutgetError) as error:
            mesh.refuse(str(error))
            raise
        finally:
            for message in messages.values():
                message.close()
        stage = stage_of(attempt, RUNNING)
        mesh.exchange("proxies", {}, members=members, timeout_s=timeout_s, phase=phase, **stage)
        for part in parts:
            part.run()


def _exchange_memory(
    workspace: Workspace,
    parts: Sequence[Nodes],
    members: Sequence[int],
    timeout_s: float,
    phase: str,
    attempt: Attempt | None,
) -> dict[int, Message]:
    """Makes the parts' memory; every member gets the cards of all parts, and those of the own domain the shares."""
    comm = workspace.comm
    made: list[tuple[str, _abi.Share]] = []
    try:
        try:
            for part in parts:
                made.append(part.create(members))
        except (ValueError, PutgetError) as error:
            comm.refuse(str(error))
            raise
        fields = {
            "objects": [part.name for part in parts],
            "cards": [card for card, _ in made],
            "shares": [encode_share(share) for _, share in made],
        }
        passed = [share.descriptor for _, share in made]
        return comm._mesh.exchange(
            "network memory",
            fields,
            members=members,
            timeout_s=timeout_s,
            phase=phase,
            descriptors={rank: passed for rank in comm.near_ranks if rank in members},
            **stage_of(attempt, CONNECTING),
        )
    finally:
        for _, share in made:
            close_share(share)


def _meet(workspace: Workspace, parts: Sequence[Nodes], rank: int, message: Message, phase: str) -> None:
    comm, fields = workspace.comm, message.fields
    if fields["objects"] != [part.name for part in parts]:
        raise ValueError(
            f"{phase}: the workspace has {len(parts)} objects on rank {comm.rank}, and others, "
            f"{len(fields['objects'])}, on rank {rank}: close the same ones on all ranks"
        )
    for index, part in enumerate(parts):
        share = None
        if rank in comm.near_ranks:
            share = decode_share(fields["shares"][index], message.descriptors[index : index + 1])
        part.meet(rank, fields["cards"][index], share)
