"""Objects' parts in rounds across domains: their network memory, and how the ranks' proxies find each other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from putget import _abi
from putget.core.wire import Wire
from putget.errors import PutgetError
from putget.group import files
from putget.group.agreement import CONNECTING, RUNNING, Attempt
from putget.group.peers import MAX_DESCRIPTORS, Message
from putget.memory.native_memory import Memory, close_share, decode_share, encode_share
from putget.memory.workspace import Workspace, stage_of

_NUMBERS = 64  # of workspaces in a generation
_CARD_BYTES = 1024


class DomainRounds:
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
        ValueError: Rows do not fit into the network's writes, or the workspace has too many objects.
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
        self._device = workspace.memory.device
        self._number: int | None = None
        self._require_few(workspace)
        files.require_left(comm.rank, files.needed_for_shares(len(comm.near_ranks), self.num_shares))
        workspace.memory.epoch()  # waits for the device: rounds are counted from there on, on all ranks alike
        comm.numbers.agree(comm.exchange("numbers", comm.numbers.said(), workspace.warmup_timeout_s).values())
        self.name = comm.numbers.next  # of the object; the same on all ranks
        try:
            self.join(workspace, [self], range(comm.size), None)
        except BaseException:
            comm.numbers.retire(self._number)
            raise

    def _require_few(self, workspace: Workspace) -> None:
        """Raises ValueError where ``set_active_ranks`` could not share the memory of all objects at once."""
        shares = self.num_shares + sum(part.num_shares for part in workspace.across)
        if shares > MAX_DESCRIPTORS:
            raise ValueError(
                f"workspace: its {len(workspace.across) + 1} objects share {shares} memories with each rank of a "
                f"domain, allowed are {MAX_DESCRIPTORS}: give some of them another workspace"
            )

    def leave(self) -> None:
        """Ends this rank's part: its regions are gone, and what others still send finds none.

        Raises:
            PutgetError: The network refused.
        """
        _abi.call("putget_domains_leave", self._handle)

    def end_writes(self) -> tuple[int, ...]:
        """Ends this rank's part for good, and waits for the network up to the object's deadline.

        Returns:
            The ranks that writes from here to are not over.

        Raises:
            PutgetError: The network refused.
        """
        self._comm.numbers.retire(self._number)
        words = (ctypes.c_uint32 * _abi.RANK_WORDS)()
        status = _abi.library().putget_domains_end(self._handle, words)
        if status not in (_abi.OK, _abi.FAULT):
            _abi.raise_status(status)
        return tuple(rank for rank in range(self._comm.size) if words[rank // 32] >> (rank % 32) & 1)

    @property
    def num_shares(self) -> int:
        """Shares that each rank sends its domain."""
        return 2 if self._network.waits_on(self._device) else 1

    def create(self, members: Sequence[int]) -> tuple[str, list[_abi.Share]]:
        """Makes the memory and the object's part, under a number that no write of before has, nor another object.

        Returns:
            The card for the other domains, and the memories' shares for the own one.

        Raises:
            ValueError, PutgetError: As the constructor raises them.
        """
        comm, handle = self._comm, self._handle
        on_device = self._network.waits_on(self._device)
        taken = comm.numbers.take()
        generation, number = divmod(taken, _NUMBERS)
        domain_of = (ctypes.c_uint8 * comm.size)(*comm.domain_of)
        active = (ctypes.c_uint32 * _abi.RANK_WORDS)()
        for rank in members:
            active[rank // 32] |= 1 << (rank % 32)
        given = _abi.DomainsConfig(
            workspace=number,
            generation=generation,
            domain_of=ctypes.addressof(domain_of),
            target_ranks=self._routes[0].data_ptr(),
            target_slots=self._routes[1].data_ptr(),
            active=ctypes.addressof(active),
            wire_type=self._home.type,
            staging=_abi.STAGING_DEVICE if on_device else _abi.STAGING_HOST,
        )
        shared, inbox, own = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        sizes = (shared, inbox, own)
        _abi.call("putget_domains_bytes", ctypes.byref(self._config), ctypes.byref(given), *map(ctypes.byref, sizes))
        self.num_bytes = sum(size.value for size in sizes)
        self._memory = Memory(torch.device("cpu"), comm.size, comm.rank, shared.value, fabric=False)
        self._inbox = None
        if on_device:
            self._inbox = Memory(self._device, comm.size, comm.rank, inbox.value, fabric=False)
        staged = None if self._inbox is None else self._inbox.handle
        _abi.call(
            "putget_domains_create", ctypes.byref(given), handle, self._memory.handle, staged, self._network.handle
        )
        comm.numbers.hold(taken, self._number)
        self._number = taken
        card = (ctypes.c_uint8 * _CARD_BYTES)()
        card_bytes = ctypes.c_uint64(_CARD_BYTES)
        _abi.call("putget_domains_card", handle, card, ctypes.byref(card_bytes))
        shares: list[_abi.Share] = []
        try:
            shares += (memory.export() for memory in self._memories())
        except PutgetError:
            for share in shares:
                close_share(share)
            raise
        return bytes(card[: card_bytes.value]).hex(), shares

    def _memories(self) -> list[Memory]:
        """Those that the own domain maps."""
        return [self._memory] if self._inbox is None else [self._memory, self._inbox]

    def meet(self, rank: int, card: str, shares: Sequence[_abi.Share]) -> None:
        """Maps the memories of a rank of the own domain, or connects with one of another, which shows none.

        Raises:
            ValueError, PeerTimeout, PutgetError: As the constructor raises them.
        """
        if shares:
            for memory, share in zip(self._memories(), shares, strict=True):
                memory.import_share(rank, share)
            return
        theirs = bytes.fromhex(card)
        place = (ctypes.c_uint8 * len(theirs)).from_buffer_copy(theirs)
        _abi.call("putget_domains_connect", self._handle, rank, place, len(theirs))

    def start(self) -> None:
        """When it has met all others: makes the proxy."""
        _abi.call("putget_domains_start", self._handle)

    def run(self) -> None:
        """When all others have started."""
        _abi.call("putget_domains_run", self._handle)

    @staticmethod
    def join(
        workspace: Workspace, parts: Sequence[DomainRounds], members: Sequence[int], attempt: Attempt | None
    ) -> None:
        """Begins rounds of a workspace's objects with these ranks, or goes on with them. Collective among the members.

        Raises:
            ValueError: The members have different objects on the workspace; or as the constructor raises it.
            PeerTimeout, PutgetError: As the constructor raises them.
        """
        timeout_s = workspace.warmup_timeout_s if attempt is None else workspace.timeout_s
        phase = "setup" if attempt is None else "set_active_ranks"
        messages = _exchange_memory(workspace, parts, members, timeout_s, phase, attempt)
        try:
            for rank, message in messages.items():
                _meet(workspace, parts, rank, message, phase)
            for part in parts:
                part.start()
        finally:
            for message in messages.values():
                message.close()
        stage = stage_of(attempt, RUNNING)
        workspace.comm.exchange_descriptors("proxies", {}, timeout_s, {}, members=members, phase=phase, **stage)
        for part in parts:
            part.run()


def _exchange_memory(
    workspace: Workspace,
    parts: Sequence[DomainRounds],
    members: Sequence[int],
    timeout_s: float,
    phase: str,
    attempt: Attempt | None,
) -> dict[int, Message]:
    """Makes the parts' memory; every member gets the cards of all parts, and those of the own domain the shares."""
    comm = workspace.comm
    made: list[tuple[str, list[_abi.Share]]] = []
    try:
        for part in parts:
            made.append(part.create(members))
        fields = {
            "objects": [part.name for part in parts],
            "cards": [card for card, _ in made],
            "shares": [[encode_share(share) for share in shares] for _, shares in made],
        }
        passed = [share.descriptor for _, shares in made for share in shares]
        return comm.exchange_descriptors(
            "network memory",
            fields,
            timeout_s,
            {rank: passed for rank in comm.near_ranks if rank in members},
            members=members,
            phase=phase,
            **stage_of(attempt, CONNECTING),
        )
    finally:
        for _, shares in made:
            for share in shares:
                close_share(share)


def _meet(workspace: Workspace, parts: Sequence[DomainRounds], rank: int, message: Message, phase: str) -> None:
    comm, fields = workspace.comm, message.fields
    if fields["objects"] != [part.name for part in parts]:
        raise ValueError(
            f"{phase}: the workspace has {len(parts)} objects on rank {comm.rank}, and others, "
            f"{len(fields['objects'])}, on rank {rank}: close the same ones on all ranks"
        )
    descriptors = iter(message.descriptors)
    for index, part in enumerate(parts):
        shares: list[_abi.Share] = []
        if rank in comm.near_ranks:
            shares = [decode_share(share, [next(descriptors)]) for share in fields["shares"][index]]
        part.meet(rank, fields["cards"][index], shares)
