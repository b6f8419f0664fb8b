"""Symmetric memory that the caller owns: one part per rank, every part mapped by every rank."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypedDict

import torch

from putget import _abi, hardware
from putget._arguments import check_int, check_seconds
from putget.errors import BackendUnavailable, PeerLeft, PeerTimeout, ProtocolMisuse, PutgetError, QuorumLost
from putget.group import files
from putget.group.agreement import SHARING, STARTING, Attempt
from putget.group.communicator import Communicator, collective
from putget.group.mesh import Deadline, Disagreement, logger
from putget.memory import host_memory
from putget.memory.native_memory import Memory, close_share, decode_share, encode_share
from putget.memory.turns import Turns


def resolve_device(device: str | torch.device) -> torch.device:
    """The device with its index.

    Raises:
        ValueError: It is neither CPU nor CUDA.
        BackendUnavailable: CUDA is asked for and not there.
    """
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f'device is {device!r}, expected "cuda", "cuda:N" or "cpu"') from error
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ValueError(f'device is {device!r}, expected "cuda", "cuda:N" or "cpu"')
    reason = hardware.why_no_cuda()
    if reason is not None:
        raise BackendUnavailable(f'device {device}: {reason}; device="cpu" runs the same rounds without a GPU')
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}, there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


_RECOVERY_STAGES = 4  # of the deadline of ``recover``: two for ranks to come, the rest for those that did
_MIXED_APART = "a second layout came to some ranks only"


class Across(Protocol):
    """An object's part in rounds across domains."""

    def leave(self) -> None:
        """Ends it, for other active ranks."""

    @property
    def num_shares(self) -> int:
        """Shares that each rank sends its domain."""

    @staticmethod
    def join(workspace: Workspace, parts: Sequence[Any], members: Sequence[int], attempt: Attempt | None) -> None:
        """Begins all parts again, collectively among the members."""


class Workspace:
    """Symmetric memory of one expert-parallel group, with its epochs. Collective.

    Objects that share a workspace share memory and rounds: they are for use one after the other (layers of a model).
    Objects with workspaces of their own are independent.

    Args:
        comm: The group.
        num_bytes: Symmetric bytes of each rank, the same on every rank; see ``workspace_bytes``.
        device: "cuda", "cuda:N" or "cpu".
        timeout_s: Deadline of set-up and of each stage of ``set_active_ranks``, in seconds; members have twice as long
            to come.
        warmup_timeout_s: Deadline of the first meeting, in seconds.

    Raises:
        ValueError: An argument is wrong, here or on another rank, or differs between ranks.
        BackendUnavailable: This machine or build cannot do it.
        PeerTimeout: A rank did not come in time.
        PutgetError: The memory could not be had. On CPU that is asked before: of the host, and of the limits of this
            process's cgroups, for all ranks that share them.

    Attributes:
        number: Tells the workspaces of one communicator apart; the same on all ranks.
        inactive_since: For each rank that is not active, when the group went on without it, in seconds of
            ``time.time()``.
    """

    @collective
    def __init__(
        self,
        comm: Communicator,
        num_bytes: int,
        device: str | torch.device = "cuda",
        *,
        timeout_s: float = 30.0,
        warmup_timeout_s: float = 120.0,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise ValueError(f"comm is {comm!r}, expected a putget.Communicator")
        self._comm = comm
        self._check(num_bytes, timeout_s, warmup_timeout_s)
        self.device = resolve_device(device)
        files.require_left(comm.rank, files.needed_for_shares(len(comm.near_ranks)))
        self.num_bytes = num_bytes
        self.timeout_s = float(timeout_s)
        self.warmup_timeout_s = float(warmup_timeout_s)
        self._active = (True,) * comm.size
        self.agreements = 0  # how often ranks have agreed on who takes part, after the first time
        self.inactive_since: dict[int, float] = {}
        self._seen_fault = False
        self.num_faults: Counter[str] = Counter()
        self.num_missing = [0] * comm.size
        self._apart: str | None = "the first meeting failed"
        self.turns = Turns(self.device)
        self._layout: Hashable | None = None
        self._mixed = False
        self.across: list[Across] = []  # of each object on it, where there are several domains

        fabric = self._agree_on_sharing()
        self._memory: Memory | None = Memory(self.device, comm.size, comm.rank, num_bytes, fabric, comm.block[1])
        try:
            self._tables_apart = torch.zeros(2, comm.size, dtype=torch.int64, device=self.device)
            comm.synchronize(self.device)  # kernels may count from any stream
            self._memory.count_tables_apart(self._tables_apart)
            self._meet(0, warmup_timeout_s, "setup")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _check(num_bytes: int, timeout_s: float, warmup_timeout_s: float) -> None:
        check_int("num_bytes", num_bytes, 1, _abi.MAX_MEMORY_BYTES - 1)
        check_seconds("timeout_s", timeout_s)
        check_seconds("warmup_timeout_s", warmup_timeout_s)

    def _agree_on_sharing(self) -> bool:
        """Compares what must be equal; True where memory is shared by fabric handles (hosts of one NVLink cluster)."""
        cluster = ""
        if self.device.type == "cuda":
            gpu = hardware.gpus()[self.device.index]
            cluster = f"{gpu.cluster_uuid}/{gpu.clique}" if gpu.fabric and gpu.cluster_uuid else ""
        comm = self._comm
        room = host_memory.limits() if self.device.type == "cpu" else []  # before any rank takes its part
        bounds = [limit.identity for limit in room]
        said = comm.exchange(
            "workspace",
            {
                "num_bytes": self.num_bytes,
                "device": self.device.type,
                "cluster": cluster,
                "bounds": bounds,
                "workspaces": comm.workspaces,
            },
            self.warmup_timeout_s,
        )
        self.number = comm.workspaces = max(theirs["workspaces"] for theirs in said.values()) + 1
        for rank, theirs in said.items():
            for name, own in (("num_bytes", self.num_bytes), ("device", self.device.type)):
                if theirs[name] != own:
                    raise Disagreement(
                        f"{name} differs between ranks: rank {comm.rank} has {own}, rank {rank} has {theirs[name]}"
                    )
        one_cluster = cluster != "" and all(theirs["cluster"] == cluster for theirs in said.values())
        if comm.network is None and not comm.one_host and not one_cluster:
            raise BackendUnavailable("the ranks are on several hosts that are not in one NVLink cluster")
        sharing = Counter(bound for theirs in said.values() for bound in theirs["bounds"])
        host_memory.require_room(self.num_bytes, room, sharing)
        return one_cluster and not comm.one_host

    def _meet(self, epoch: int, timeout_s: float, phase: str, attempt: Attempt | None = None) -> None:
        """Exchanges shares among the active ranks, maps them, starts the epoch.

        Whether layouts are mixed is agreed, too: where a step of ``adopt`` failed, only some ranks have mixed them.

        On return every active rank has started.
        """
        memory = self.memory
        active = [rank for rank, is_active in enumerate(self._active) if is_active]
        numbers = self._comm.numbers.said()
        share = memory.export()
        try:
            passed = [share.descriptor] if share.kind == _abi.SHARE_DESCRIPTOR else []
            messages = self._comm.exchange_descriptors(
                "shares",
                {"share": encode_share(share), "mixed": self._mixed, "numbers": numbers},
                timeout_s,
                {rank: passed for rank in active if rank in self._comm.near_ranks},
                members=active,
                phase=phase,
                **stage_of(attempt, SHARING),
            )
        finally:
            close_share(share)
        try:
            self._comm.numbers.agree([numbers, *(message.fields["numbers"] for message in messages.values())])
            if any(message.fields["mixed"] for message in messages.values()):
                self._mix()
            for peer, message in messages.items():
                if peer not in self._comm.near_ranks:
                    continue
                memory.import_share(peer, decode_share(message.fields["share"], message.descriptors))
        finally:
            for message in messages.values():
                message.close()
        # Experts of other domains count as none in what the own domain exchanges.
        near = self._comm.near_ranks
        memory.start(epoch, [is_active and rank in near for rank, is_active in enumerate(self._active)])
        self.turns.end()
        stage = stage_of(attempt, STARTING)
        self._comm.exchange_descriptors("started", {}, timeout_s, {}, members=active, phase=phase, **stage)
        self._apart = None
        self._seen_fault = False
        since, now = self.inactive_since, time.time()
        inactive = (rank for rank, is_active in enumerate(self._active) if not is_active)
        self.inactive_since = {rank: since.get(rank, now) for rank in inactive}

    @property
    def memory(self) -> Memory:
        """The native memory of this rank.

        Raises:
            ValueError: The workspace is closed.
            ForkedChild: This process is a fork of the rank.
        """
        self._comm.require_own("Workspace")
        if self._memory is None:
            raise ValueError("the workspace is closed")
        return self._memory

    @property
    def comm(self) -> Communicator:
        """The group it was made for."""
        return self._comm

    @property
    def active_ranks(self) -> tuple[bool, ...]:
        """Which ranks take part in rounds."""
        return self._active

    def set_active_ranks(self, mask: Sequence[bool], *, quorum: int | None = None) -> None:
        """See ``AllToAll.set_active_ranks``."""
        self._set_active_ranks(self._check_mask(mask, quorum), self.timeout_s)

    def recover(self, deadline: float | None = None, *, quorum: int | None = None) -> tuple[int, ...]:
        """See ``AllToAll.recover``."""
        if deadline is not None:
            check_seconds("deadline", deadline)
        timeout_s = self.timeout_s if deadline is None else min(self.timeout_s, deadline / _RECOVERY_STAGES)
        ends_at = math.inf if deadline is None else time.monotonic() + deadline
        wanted = set(range(self._comm.size))
        while True:
            mask = self._check_mask([rank in wanted for rank in range(self._comm.size)], quorum)
            try:
                self._set_active_ranks(mask, timeout_s)
                return tuple(sorted(wanted))
            except PeerLeft:
                raise
            except PeerTimeout as error:
                wanted -= set(error.missing)
                if time.monotonic() >= ends_at:
                    raise
                logger.warning("putget: recover: rank(s) %s do not answer rank %d", error.missing, self._comm.rank)

    def _set_active_ranks(self, wanted: tuple[bool, ...], timeout_s: float) -> None:
        memory = self.memory
        comm = self._comm
        comm.require_open()
        members = [rank for rank, is_active in enumerate(wanted) if is_active]
        near = len(set(members).intersection(comm.near_ranks))
        shares = max(1, sum(part.num_shares for part in self.across))  # of the workspace, then of all parts at once
        needed = files.needed_for_shares(near, shares)
        with comm._agreement.attempt(self.number, members, memory.epoch(), timeout_s, needed) as attempt:
            self._apart = "set_active_ranks failed"
            self._active = wanted
            for part in self.across:
                part.leave()
            memory.renew()
            self._meet((attempt.epoch + 1) % (1 << 32), timeout_s, "set_active_ranks", attempt)
            if self.across:
                self._apart = "set_active_ranks failed"
                self.across[0].join(self, self.across, members, attempt)
                self._apart = None
        self.agreements += 1
        logger.info("rank %d goes on with ranks %s", comm.rank, members)

    def checked_mask(self, mask: Sequence[bool]) -> tuple[bool, ...]:
        """The mask as ``set_active_ranks`` takes it.

        Raises:
            ValueError: It is of another form, or leaves out the own rank.
        """
        return self._check_mask(mask, None)

    def _check_mask(self, mask: Sequence[bool], quorum: int | None) -> tuple[bool, ...]:
        values: list[Any]
        size = self._comm.size
        try:
            values = mask.tolist() if isinstance(mask, torch.Tensor) else list(mask)
        except TypeError:
            raise ValueError(f"mask is {mask!r}, expected one bool for each of {size} ranks") from None
        if len(values) != size or any(value not in (0, 1) for value in values):
            raise ValueError(f"mask is {values!r}, expected one bool for each of {size} ranks")
        wanted = tuple(bool(value) for value in values)
        if not wanted[self._comm.rank]:
            raise ValueError(f"mask leaves out the own rank {self._comm.rank}")
        if quorum is not None:
            if not isinstance(quorum, int) or isinstance(quorum, bool) or not 1 <= quorum <= size:
                raise ValueError(f"quorum is {quorum!r}, expected a number of ranks from 1 to {size}")
            if sum(wanted) < quorum:
                raise QuorumLost(sum(wanted), quorum)
        return wanted

    def adopt(self, layout: Hashable, *, is_new: bool) -> None:
        """Collective: an object of this layout is about to use the memory.

        From the second layout on, rounds exchange one flag more (docs/protocol.md, D0), because one object's receive
        regions may lie over another's combine_input.

        Args:
            layout: Sizes that fix the memory map.
            is_new: Whether the workspace was made for this object, in the same attempt.
        """
        if not is_new:
            self._mix_if_needed(layout)
        self._layout = layout

    def _mix_if_needed(self, layout: Hashable) -> None:
        """An attempt that failed may have mixed layouts on some ranks: so all do what one of them needs."""
        active = [rank for rank, is_active in enumerate(self._active) if is_active]
        comm, timeout_s = self._comm, self.warmup_timeout_s
        is_apart = self._apart == _MIXED_APART
        needed = is_apart or (self._layout is not None and layout != self._layout and not self._mixed)
        if not any(comm.exchange_among("layout", needed, timeout_s, members=active).values()):
            return
        self.memory.epoch()  # waits for the device
        before, self._apart = None if is_apart else self._apart, self._apart or _MIXED_APART
        comm.exchange_among("mix", None, timeout_s, members=active)
        self._mix()
        comm.exchange_among("mixed", None, timeout_s, members=active)
        self._apart = before

    def _mix(self) -> None:
        self._mixed = True
        self.memory.mix()

    def fault(self) -> PutgetError | None:
        """The fault that stands, or None; does not wait for kernels."""
        return self.memory.fault(self.timeout_s)

    def raise_fault(self, only_unseen: bool = False) -> None:
        """Raises the fault that stands.

        Args:
            only_unseen: Raise only what has not been raised before.

        Raises:
            PeerTimeout: Ranks did not answer in time.
            CapacityExceeded: A source sent more rows than this rank allowed.
            ProtocolMisuse: Calls did not make a round.
        """
        fault = self.fault()
        if fault is not None and not self._seen_fault:
            logger.warning("%s", fault)
            self.num_faults[type(fault).__name__] += 1
            for rank in fault.missing if isinstance(fault, PeerTimeout) else ():
                self.num_missing[rank] += 1
        if fault is not None and not (only_unseen and self._seen_fault):
            self._seen_fault = True
            raise fault

    def raise_tables_apart(self) -> None:
        """For ``check``, when the device has been waited for; the count starts again.

        Raises:
            ProtocolMisuse: A source had another ``expert_to_rank`` than this rank.
        """
        rounds, rows = self._tables_apart.tolist()
        if any(rounds):
            self._tables_apart.zero_()
            sources = ", ".join(
                f"rank {rank} in {count} rounds, in which {rows[rank]} rows came from it"
                for rank, count in enumerate(rounds)
                if count
            )
            raise ProtocolMisuse(
                f"expert_to_rank was another one than on rank {self._comm.rank} on {sources}; rows whose expert is "
                "not here by this rank's table were lost: make the tables equal (check(expert_to_rank=True) compares)"
            )

    @property
    def is_consistent(self) -> bool:
        """False while a failed ``set_active_ranks`` or ``adopt`` has left the ranks apart."""
        return self._apart is None

    def require_consistent(self) -> None:
        """Raises PutgetError while a failed ``set_active_ranks`` or ``adopt`` has left the ranks apart."""
        if self._apart is not None:
            raise PutgetError(f"{self._apart}: call recover or set_active_ranks on all ranks before the next round")

    def regions_end(self) -> int:
        """Bytes before the sentinel rows, whatever objects are on it."""
        comm = self._comm
        return int(_abi.library().putget_sentinel_begin(comm.size, comm.block[1], self.num_bytes))

    def _reset(self, epoch: int) -> None:
        """Collective: starts again at this epoch. For tests of the wrap."""
        active = [rank for rank, is_active in enumerate(self._active) if is_active]
        self._comm.exchange_among("reset", epoch, self.timeout_s, members=active)
        self.memory.start(epoch, self._active)
        self.turns.end()
        self._comm.exchange_among("started", None, self.timeout_s, members=active)

    def close(self) -> None:
        """Gives the memory up; it is freed with the last tensor over it. Needs no peer. Idempotent."""
        self._memory = None

    def __del__(self) -> None:
        if getattr(self, "_memory", None) is not None and self._comm.is_own:
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=1, source=self)
            self.close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._memory is None else f"{self.num_bytes} bytes a rank on {self.device}"
        return f"Workspace({state}, rank {self._comm.rank} of {self._comm.size})"


class Stage(TypedDict, total=False):
    """Arguments of ``Mesh.exchange`` for a step that members of an attempt take."""

    deadline: Deadline
    heed: Callable[[], None]


def stage_of(attempt: Attempt | None, stage: int) -> Stage:
    """The arguments for this stage; none where there is no attempt."""
    if attempt is None:
        return {}
    attempt.begin(stage)
    return {"deadline": attempt.deadline, "heed": attempt.heed}


def check_workspace(workspace: Workspace, comm: Communicator, device: torch.device, needed: int) -> None:
    """Whether an object that needs so many bytes can be made on a workspace now.

    Raises:
        ValueError: It is none, closed, another communicator's, elsewhere or too small.
        ProtocolMisuse: A start half waits for its finish: whatever both halves go by may not change between them.
    """
    if not isinstance(workspace, Workspace):
        raise ValueError(f"workspace is {workspace!r}, expected a putget.Workspace")
    if workspace.comm is not comm:
        raise ValueError("workspace belongs to another communicator")
    if workspace.device != device:
        raise ValueError(f"workspace is on {workspace.device}, device is {device}")
    if workspace.num_bytes < needed:
        raise ValueError(f"workspace has {workspace.num_bytes} bytes, needed are {needed}")
    workspace.memory  # noqa: B018  (raises where it is closed)
    refused = workspace.turns.refuse_unfinished("AllToAll")
    if refused is not None:
        raise ProtocolMisuse(refused)


def current_stream(device: torch.device) -> int:
    """The cudaStream_t that torch uses now on this device; 0 on CPU."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0
