"""The expert-parallel group: who takes part, and how they meet for set-up."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from putget import _abi, hardware
from putget._arguments import check_seconds, shown
from putget._log import logger
from putget.errors import PutgetError
from putget.group.agreement import Agreement
from putget.group.domains import Network, check_group, check_local, join_local
from putget.group.files import require_descriptors
from putget.group.meeting import meet
from putget.group.mesh import Deadline, Disagreement, Mesh
from putget.group.networks import NativeNetwork
from putget.group.numbers import Numbers
from putget.group.peers import MAX_MESSAGE_BYTES, Message

MOST_VALUE_BYTES = MAX_MESSAGE_BYTES - (1 << 16)  # the rest of a message says where its rank is

_Result = TypeVar("_Result")
_Init = TypeVar("_Init", bound=Callable[..., None])


class _LocalGroup:
    """State that the emulated ranks of one process share: which CUDA stream belongs to which rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rank_of_stream: dict[tuple[int, int], int] = {}

    def claim_stream(self, device_index: int, stream: int, rank: int) -> int:
        """The rank that this stream belongs to: the one that used it first."""
        with self._lock:
            return self._rank_of_stream.setdefault((device_index, stream), rank)


class Closes(Protocol):
    """An object that a communicator keeps, and closes."""

    def close(self) -> None:
        """Frees it. Needs no peer."""


class Communicator:
    """The ranks of one expert-parallel group.

    Collective over the group. torch.distributed is used here and never again: afterwards ranks talk over putget's own
    sockets (set-up, ``set_active_ranks``) and over symmetric memory (rounds).

    Args:
        group: Any torch.distributed group (gloo or nccl), the world or a subgroup; None is the world.
        network: What joins ranks that do not map each other's memory, the same on all ranks. None: ranks of one host,
            or of hosts in one NVLink cluster, map each other's memory. Other hosts are a domain each then, joined as
            ``putget.Network()`` says.

    Attributes:
        rank: This rank within the group (ep_rank).
        size: Ranks in the group (ep_size), at most 128.
        domain_of: The domain of each rank: 0 everywhere, if all ranks map each other's memory.
        network: What joins the domains; None where there is one.
        numbers: Tells its objects over several domains apart.
        kept: What is made once for this communicator and used by several layers, by key. ``close`` closes it.
        workspaces: How many were made on it; the same on all ranks once one of their constructors has met.

    Raises:
        ValueError: torch.distributed is not initialised, this process is not in the group, or the group is too large;
            networks differ between ranks, or a domain's ranks are on several hosts.
        BackendUnavailable: The network needs a transfer engine, provider or NIC that is not there.
        PeerTimeout: A rank did not connect in time: one deadline of 60 s holds for all connections.
        PutgetError: A rank cannot be reached, or may not open enough descriptors.
    """

    rank: int
    size: int
    domain_of: tuple[int, ...]
    network: NativeNetwork | None
    numbers: Numbers
    kept: dict[Hashable, Closes]
    workspaces: int

    def __init__(self, group: Any = None, *, network: Network | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: torch.distributed is not initialised; for one process use Communicator.local(n)")
        rank = dist.get_rank(group)
        size = dist.get_world_size(group) if rank >= 0 else 0
        if rank < 0:
            raise ValueError("group: this process is not a member of it")
        if size > _abi.MAX_RANKS:
            raise ValueError(f"group has {size} ranks, allowed are up to {_abi.MAX_RANKS}")
        check_group(network)
        joined = meet(group, rank, size, network)
        try:
            self._set(rank, size, joined.mesh, None)
            self.domain_of, self.network = joined.domain_of, joined.network
        except BaseException:
            joined.mesh.close()  # the others see that this rank has no communicator
            raise
        joins = "none" if joined.network is None else network or Network()
        logger.info("rank %d of %d is connected; domains %s, network %s", rank, size, self.domains, joins)

    @classmethod
    def local(cls, n: int, *, network: Network | None = None) -> tuple[Communicator, ...]:
        """n ranks in this process: threads on CPU, or emulated ranks on one GPU.

        Each communicator is for one thread. On CUDA each thread needs a ``torch.cuda.Stream`` of its own, because a
        rank's kernels wait for the other ranks' kernels, and memory should be allocated before they are launched: an
        allocation may wait for them. All ranks' kernels must fit on the GPU together, which the default of ``num_sms``
        sees to. The environment should say ``CUDA_DEVICE_MAX_CONNECTIONS=32`` and ``CUDA_MODULE_LOADING=EAGER``.

        Args:
            n: Number of ranks, 1 to 128.
            network: Divides the ranks into virtual domains. Rows between domains then travel as between hosts: by
                messages, proxies and a network.

        Returns:
            The communicators of ranks 0 to n - 1.

        Raises:
            ValueError: n is out of range, or network is none between ranks of a process.
            BackendUnavailable: The network needs the transfer engine, which is not there.
        """
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= _abi.MAX_RANKS:
            raise ValueError(f"n is {n!r}, allowed are ints from 1 to {_abi.MAX_RANKS}")
        network = check_local(network)
        domain_of = network.domain_of(n)
        joined = join_local(network, n) if max(domain_of) > 0 else [None] * n
        require_descriptors(n * (n + 1))
        connections: list[dict[int, socket.socket]] = [{} for _ in range(n)]
        for rank in range(n):
            for peer in range(rank):
                connections[rank][peer], connections[peer][rank] = socket.socketpair()
        group = _LocalGroup()
        communicators = tuple(cls.__new__(cls) for _ in range(n))
        for rank, communicator in enumerate(communicators):
            communicator._set(rank, n, Mesh(rank, connections[rank], one_host=True), group)
            communicator.domain_of, communicator.network = domain_of, joined[rank]
        return communicators

    def _set(self, rank: int, size: int, mesh: Mesh, local_group: _LocalGroup | None) -> None:
        self.rank = rank
        self.size = size
        self._mesh = mesh
        self._agreement = Agreement(mesh)
        self._local_group = local_group
        self.domain_of = (0,) * size
        self.network = None
        self.numbers = Numbers()
        self.kept = {}
        self.workspaces = 0

    @property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each domain."""
        return tuple(
            tuple(rank for rank in range(self.size) if self.domain_of[rank] == domain)
            for domain in range(max(self.domain_of) + 1)
        )

    @property
    def near_ranks(self) -> tuple[int, ...]:
        """The ranks of the own domain."""
        return self.domains[self.domain_of[self.rank]]

    @property
    def block(self) -> tuple[int, int]:
        """The own domain's first rank, and the size of the largest domain; (0, size) where one is no block of ranks."""
        domains = self.domains
        if any(ranks[-1] - ranks[0] >= len(ranks) for ranks in domains):
            return 0, self.size
        return self.near_ranks[0], max(len(ranks) for ranks in domains)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._mesh.closed

    def close(self) -> None:
        """Closes this rank's sockets, and the memory that adapters share between layers of this communicator.

        Objects that the caller has made from it go on working, except for ``set_active_ranks`` and a layer's
        ``set_placement``. Needs no peer. Idempotent.

        Raises:
            PeerTimeout, CapacityExceeded, ProtocolMisuse: A fault in that memory that no call has raised yet; all is
                closed the same.
        """
        self._close(raise_unseen=True)

    def _close(self, raise_unseen: bool) -> None:
        self._mesh.close()
        failures: list[Exception] = []
        while self.kept:
            _, found = self.kept.popitem()
            try:
                found.close()
            except Exception as error:
                failures.append(error)
        if failures and raise_unseen:
            raise failures[0]

    def __del__(self) -> None:
        mesh = getattr(self, "_mesh", None)
        if mesh is not None and not mesh.closed and mesh.process.is_here:
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=1, source=self)
            mesh.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        self._close(raise_unseen=exception_type is None)

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
        """Waits for this rank's work: the device, or the current stream where other ranks share the GPU.

        A forked child has no work there.
        """
        if device.type != "cuda" or not self.is_own:
            return
        if self._local_group is None:
            torch.cuda.synchronize(device)
        else:
            torch.cuda.current_stream(device).synchronize()

    def exchange(self, name: str, value: Any, deadline: float) -> dict[int, Any]:
        """Collective: every rank says a value, and hears the values of all.

        Values travel over the ranks' sockets, as the set-up of objects does. It is a step of the constructor that is
        under way on this rank, or stands alone.

        Args:
            name: What the ranks are at; the same on all.
            value: None, bools, numbers, strings, lists of them and dicts with strings as keys: JSON, of up to 983040
                bytes.
            deadline: Seconds.

        Returns:
            The values by rank, in the order of ranks, as JSON has them: tuples are lists. This rank's is among them.

        Raises:
            ValueError: An argument is wrong, here or on another rank; or another rank is at another name, which the
                message gives; or the communicator is closed.
            PeerTimeout: A rank did not come in time, or its connection is gone: ``missing`` names it.
            PeerLeft: A rank has left by an error of its own.
            ForkedChild: This process is a fork of the rank.
        """
        return self.exchange_among(name, value, deadline)

    def exchange_among(
        self,
        name: str,
        value: Any,
        deadline: float,
        *,
        members: Sequence[int] | None = None,
        phase: str = "setup",
    ) -> dict[int, Any]:
        """``exchange`` among the ranks that go on, for putget's own objects.

        Attempts are numbered alike on all ranks. So ranks that are left out meet the members again by an agreement
        alone (``set_active_ranks``), unless the exchange is a step of a larger attempt.

        Args:
            name: As that of ``exchange``.
            value: As that of ``exchange``.
            deadline: Seconds.
            members: The ranks that take part, the same on all of them, with this one. None: all.
            phase: What a PeerTimeout calls the wait.
        """
        self.require_open()
        everyone = self._check_members(members)
        try:
            check_seconds("deadline", deadline)
            own = _as_json(name, value)
        except ValueError as error:
            self.refuse(str(error))
            raise
        messages = self._mesh.exchange(name, {"value": own}, members=everyone, timeout_s=deadline, phase=phase)
        return {rank: own if rank == self.rank else messages[rank].fields["value"] for rank in everyone}

    def _check_members(self, members: Sequence[int] | None) -> list[int]:
        if members is None:
            return list(range(self.size))
        everyone = sorted(set(members))
        if self.rank not in everyone or not 0 <= everyone[0] <= everyone[-1] < self.size:
            raise ValueError(f"members is {list(members)}, expected ranks below {self.size} with rank {self.rank}")
        return everyone

    def exchange_descriptors(
        self,
        name: str,
        value: dict[str, Any],
        timeout_s: float,
        descriptors: dict[int, list[int]],
        *,
        members: Iterable[int],
        phase: str = "setup",
        deadline: Deadline | None = None,
        heed: Callable[[], None] = lambda: None,
    ) -> dict[int, Message]:
        """``exchange`` for putget's own objects: descriptors travel too, and the step may have a deadline that moves.

        Args:
            name: As that of ``exchange``.
            value: A JSON object.
            timeout_s: Deadline in seconds.
            descriptors: By receiver.
            members: As those of ``exchange_among``.
            phase: As that of ``exchange_among``.
            deadline: Stands in for ``timeout_s``.
            heed: Called when something may have arrived; it may raise.

        Returns:
            The messages of the other members. The caller takes their descriptors and closes them.

        Raises:
            PutgetError: This process has no room for the descriptors that came; otherwise as ``exchange``.
        """
        return self._mesh.exchange(
            name,
            value,
            members=members,
            timeout_s=timeout_s,
            phase=phase,
            descriptors=descriptors,
            deadline=deadline,
            heed=heed,
        )

    @property
    def one_host(self) -> bool:
        """Whether all ranks share this host, so that descriptors can travel."""
        return self._mesh.one_host

    def compare(
        self,
        what: str,
        fields: dict[str, Any],
        timeout_s: float,
        *,
        members: Sequence[int] | None = None,
        phase: str = "setup",
    ) -> None:
        """Collective over the members, by default all ranks: each must hold the same fields.

        Raises:
            ValueError: They differ; the message names the first field and both values. Every rank raises.
            PeerTimeout: A rank did not come in time.
            PeerLeft: A rank has left the attempt.
        """
        own = {name: str(value) for name, value in fields.items()}
        said = self.exchange_among(what, own, timeout_s, members=members, phase=phase)
        first = min(said)
        for rank, theirs in said.items():
            reference = said[first]
            for name in dict.fromkeys([*reference, *theirs]):
                if reference.get(name) != theirs.get(name):
                    raise Disagreement(
                        f"{name} differs between ranks: rank {first} has {reference.get(name)}, "
                        f"rank {rank} has {theirs.get(name)}"
                    )

    def attempt(
        self,
        what: str,
        body: Callable[[], _Result],
        *,
        members: Sequence[int] | None = None,
        phase: str = "setup",
    ) -> _Result:
        """Collective: runs a body that all ranks come through or none, in steps that are collective too.

        Attempt n of this rank meets attempt n of the others. A rank that leaves it, by an error or Ctrl-C, ends it at
        once on all: those that come later, too. So all ranks may try again. Attempts within the body are parts of it.

        Args:
            what: Its name, for errors.
            body: What to do. All ranks leave it when the last of them has come to its end.
            members: As those of ``exchange_among``; the body's steps have the same.
            phase: Named where a rank does not come to the end.

        Returns:
            What the body returns.

        Raises:
            PeerLeft: Another rank has left it by an error of its own.
            PeerTimeout: A rank did not come in time, here or where another rank waited.
            ValueError, BackendUnavailable, MemoryError: Another rank has raised it; or as the body raises them.
        """
        self.require_open()
        return self._mesh.within(what, body, members=self._check_members(members), ends_together=True, phase=phase)

    @property
    def attempts(self) -> int:
        """The number of the attempt under way, or of the last one."""
        return self._mesh.number

    def is_void(self, attempt: int) -> bool:
        """Whether a rank lacks what an attempt has made, as far as this rank has heard: it failed here, or there.

        A rank may leave behind its last words, so that others have made something that it has not. All ranks make that
        again. Waits for nothing.
        """
        return attempt > 0 and self._mesh.is_void(attempt)

    def left_late(self, attempt: int) -> Exception | None:
        """The error of a rank that has left an attempt which has succeeded here: what this rank raises once."""
        return self._mesh.left_late(attempt)

    @property
    def is_abandoned(self) -> bool:
        """Whether a rank is gone although nothing was made on this communicator: it left the constructor, or died."""
        return self._mesh.is_abandoned()

    def refuse(self, reason: str) -> None:
        """Tells the others that this rank leaves the attempt: its own arguments are wrong, or the error it handles."""
        error = sys.exc_info()[1]
        self._mesh.refuse(error if error is not None and str(error) == reason else reason)

    @property
    def is_own(self) -> bool:
        """Whether this process is the rank; a forked child is not."""
        return self._mesh.process.is_here

    def require_own(self, what: str = "Communicator") -> None:
        """Raises ForkedChild in a forked child, for an object of this communicator."""
        self._mesh.process.require_here(self.rank, what)

    def require_open(self) -> None:
        """Raises ValueError after ``close()``, and ForkedChild in a forked child, which has no sockets of its own."""
        self.require_own()
        if self._mesh.closed:
            raise ValueError("comm is closed")


def _as_json(name: str, value: Any) -> Any:
    """The part of a value that other ranks hear.

    Raises:
        ValueError: The name is empty or no string; the value is no JSON, or too long.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {name!r}, expected a string that is not empty")
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"value of {name!r} is {shown(value)}, expected JSON: {error}") from error
    if len(text) > MOST_VALUE_BYTES:
        raise ValueError(f"value of {name!r} has {len(text)} bytes as JSON, allowed are {MOST_VALUE_BYTES}")
    return json.loads(text)


def collective(init: _Init) -> _Init:
    """Decorates the constructor of a class whose first argument is ``comm``: see ``Communicator.attempt``.

    An object that this rank has made, and another has not, is closed.
    """
    what = init.__qualname__.split(".")[0]

    @functools.wraps(init)
    def whole(self: Any, *args: Any, **options: Any) -> None:
        comm = args[0] if args else options.get("comm")
        if not isinstance(comm, Communicator):
            init(self, *args, **options)  # which says so
            return
        is_made = False

        def make() -> None:
            nonlocal is_made
            init(self, *args, **options)
            is_made = True

        try:
            comm.attempt(what, make)
        except BaseException:
            if is_made:
                with contextlib.suppress(PutgetError):
                    self.close()
            raise

    return whole  # type: ignore[return-value]
