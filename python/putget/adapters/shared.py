"""Objects that the layers of an engine share: communicators, workspaces, and the all-to-alls made on them.

An engine builds one communication object a layer and expects them to use the same memory, one after the other. So the
adapters keep one communicator per process group, and with each communicator one workspace per size.
``Communicator.close`` gives back what is kept with it, ``close_shared`` everything.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from putget import (
    AllToAll,
    Communicator,
    Payload,
    PeerLeft,
    PeerTimeout,
    ProtocolMisuse,
    PutgetError,
    Workspace,
    workspace_bytes,
)

# An engine compiles and tunes kernels during its first steps, and one rank can take much longer over it than another.
TIMEOUT_S = 120.0
WARMUP_TIMEOUT_S = 900.0

_MAX_PAYLOADS = 8
_MAX_TOP_K = 32


@dataclass(frozen=True)
class Recipe:
    """The shape of one all-to-all: what must be equal on all ranks. Field names are those of ``putget.AllToAll``."""

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    payloads: tuple[Payload, ...]
    output: Payload
    expert_to_rank: tuple[int, ...]
    combine_dtype: torch.dtype | None = None
    num_stats: int = 0


def combine_dtype_of(low_precision: bool) -> torch.dtype | None:
    """``combine_dtype`` for what engines call a low-precision combine: E4M3 with one float32 scale for 128 values."""
    return torch.float8_e4m3fn if low_precision else None


def engine_workspace_bytes(
    *,
    ep_size: int,
    max_tokens_per_rank: int,
    dispatch_bytes: int,
    output: Payload,
    combine_dtype: torch.dtype | None = None,
    num_stats: int = 0,
) -> int:
    """Symmetric bytes of each rank for every recipe of a size: any top_k, any split into payloads.

    Args:
        ep_size: Ranks of the expert-parallel group.
        max_tokens_per_rank: Most tokens that one rank sends in one round.
        dispatch_bytes: Most bytes of one token's payloads together; ids and weights need not be counted.
        output: The row that experts write and combine reduces.
        combine_dtype: As given to ``putget.AllToAll``.
        num_stats: Likewise.

    Raises:
        ValueError: A size is not allowed, or the row cannot travel as combine_dtype.
    """
    if not isinstance(dispatch_bytes, int) or isinstance(dispatch_bytes, bool) or dispatch_bytes < 1:
        raise ValueError(f"dispatch_bytes is {dispatch_bytes!r}, expected a positive number of bytes")
    # One byte for each further payload stands for the alignment of its region.
    payloads = [Payload((dispatch_bytes,), torch.uint8)] + [Payload((1,), torch.uint8)] * (_MAX_PAYLOADS - 1)
    return workspace_bytes(
        ep_size=ep_size,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=_MAX_TOP_K,
        payloads=payloads,
        output=output,
        combine_dtype=combine_dtype,
        num_stats=num_stats,
    )


def default_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def place_of(device: torch.device | str | None) -> torch.device:
    """The device that an engine names: "cuda" is the current one, as tensors say it; None is ``default_device``."""
    place = default_device() if device is None else torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place


class SharedWorkspace:
    """Symmetric memory that layers use one after the other, and the all-to-alls that were made on it.

    Construction is collective over the group.

    Args:
        comm: The expert-parallel group.
        num_bytes: Symmetric bytes of each rank.
        device: Where the rows live.
        timeout_s: Deadline of every wait, in seconds.
        warmup_timeout_s: Deadline of set-up and of each all-to-all's first round, in seconds.
        arguments: What num_bytes follows from, by the caller's names: where ranks differ, these say so.
        key: Under which its communicator keeps it; None where the caller does.

    Raises:
        ValueError, BackendUnavailable, PeerTimeout: As ``putget.Workspace``.
    """

    def __init__(
        self,
        comm: Communicator,
        num_bytes: int,
        device: torch.device,
        *,
        timeout_s: float = TIMEOUT_S,
        warmup_timeout_s: float = WARMUP_TIMEOUT_S,
        arguments: Mapping[str, Any] | None = None,
        key: Hashable = None,
    ) -> None:
        self.comm = comm
        self.device = device
        self.num_bytes = num_bytes
        self._timeout_s = timeout_s
        self._warmup_timeout_s = warmup_timeout_s
        self._arguments = dict(arguments or {})
        self._objects: dict[Recipe, AllToAll] = {}
        self.closings = 0  # how often what was made on it has been freed
        self._made_in: dict[Recipe | None, int] = {}  # the attempt that made an object; None: the workspace
        self.unproven: set[Recipe] = set()  # objects that another rank may lack: the next ``all_to_all`` finds out
        self._suspended = self._is_closed = False
        self._is_told = False  # that a rank has left the making of the memory late
        self._workspace: Workspace | None = None
        self._local: torch.Tensor | None = None
        self._open_round: weakref.ref[Any] | None = None
        self._opened_in = 0  # how often ranks had agreed on who takes part
        self.key = key
        try:
            self._make_memory()
        except BaseException:
            if self._workspace is None and comm.kept.get(key) is self:
                del comm.kept[key]
            raise

    def _make_memory(self) -> None:
        """Makes the workspace, in one attempt.

        What is kept is kept before the attempt ends: a rank that is interrupted behind it has what the others have.
        """

        def make() -> None:
            self._made_in[None] = self.comm.attempts
            if self.key is not None:
                _keep(self, self.key)
            if self._arguments:
                self.comm.compare("layer's memory", self._arguments, self._warmup_timeout_s)
            self._workspace = Workspace(
                self.comm,
                self.num_bytes,
                self.device,
                timeout_s=self._timeout_s,
                warmup_timeout_s=self._warmup_timeout_s,
            )
            self._made_in[None] = self.comm.attempts  # its first step may have left numbers out

        try:
            self.comm.attempt("layer's memory", make)
            self._is_told = False
        except BaseException:
            if self._is_void(None):
                self._drop_memory()
            raise

    def _is_void(self, recipe: Recipe | None) -> bool:
        """Whether a rank lacks what has been made here for a recipe; None: the workspace."""
        return self.comm.is_void(self._made_in.get(recipe, 0))

    def renew(self) -> None:
        """Makes the memory again if a rank lacks it, which is collective then: that rank makes it, too.

        A rank that leaves a constructor behind its last words lacks what the others have made.

        Raises:
            ValueError, BackendUnavailable, PeerTimeout: As ``putget.Workspace``. The next call tries again.
        """
        if self._is_closed or self._suspended:
            return
        if self._workspace is None or self._is_void(None):
            self._drop_memory()
            self._make_memory()
        self._prove(self._objects)

    def _prove(self, recipes: Iterable[Recipe] | None = None) -> None:
        """Gives up objects that a rank lacks.

        Behind a round of all ranks each has its own, or has said that it left.
        """
        for recipe in list(self.unproven if recipes is None else recipes):
            self.unproven.discard(recipe)
            if recipe in self._objects and self._is_void(recipe):
                self._drop_object(recipe)

    def _raise_untold(self) -> None:
        """Ends the call where the memory is void and its caller does not know: no other rank is about to make it again.

        Raises:
            PeerLeft: Once. The next call makes the memory again.
        """
        if self._workspace is None or self._is_told or not self._is_void(None):
            return
        error = self.comm.left_late(self._made_in[None])
        if error is not None:
            self._is_told = True
            raise error

    def _drop_memory(self) -> None:
        """Closes what has been made; its faults do not matter any more."""
        for recipe in list(self._objects):
            self._drop_object(recipe)
        self.closings += 1
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()
        self.open_round = None

    def _drop_object(self, recipe: Recipe) -> None:
        self.closings += 1
        self.unproven.discard(recipe)
        with contextlib.suppress(PutgetError):
            self._objects.pop(recipe).close()

    @property
    def open_round(self) -> Any:
        """The object between its dispatch and its combine.

        None where it is gone, as the next dispatch ends its round; or where ranks have agreed since, which ends it.
        """
        if self._open_round is None or self._opened_in != self._agreements:
            return None
        return self._open_round()

    @open_round.setter
    def open_round(self, layer: Any) -> None:
        self._open_round = None if layer is None else weakref.ref(layer)
        self._opened_in = self._agreements

    @property
    def _agreements(self) -> int:
        return 0 if self._workspace is None else self._workspace.agreements

    def require_open(self) -> None:
        """Does nothing where there is memory for a round.

        Raises:
            ValueError: It is closed.
            ForkedChild: This process is a fork of the rank.
            ProtocolMisuse: It has been given up by ``suspend``.
        """
        self.comm.require_own("layer's memory")
        if self._suspended:
            raise ProtocolMisuse("the symmetric memory is given up for a checkpoint: restore it before the round")
        if self._is_closed:
            raise ValueError("the workspace is closed")

    @property
    def active_ranks(self) -> tuple[bool, ...]:
        """One bool for each rank of the group; raises as `require_open` does."""
        self.require_open()
        if self._workspace is None:
            raise PutgetError("the symmetric memory could not be made again: call the layer's constructor on all ranks")
        return self._workspace.active_ranks

    @property
    def has_fault(self) -> bool:
        """Whether a fault of a round stands."""
        return self._workspace is not None and self._workspace.fault() is not None

    def local_rows(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 beside the symmetric memory, zeros at first: layers use it one after the other, too."""
        if self._local is None or self._local.numel() < num_bytes:
            self._local = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return self._local[:num_bytes]

    @property
    def is_suspended(self) -> bool:
        """Whether ``suspend`` came last, and not ``resume``."""
        return self._suspended

    def suspend(self) -> None:
        """Gives up the symmetric memory of every rank, with all that was made on it. Collective; repeated, nothing.

        When it returns, every rank has given up its own.

        Raises:
            ProtocolMisuse: A round is open.
            PeerTimeout: A rank did not come.
        """
        if self.is_suspended:
            return
        if self.open_round is not None:
            raise ProtocolMisuse("checkpoint: a dispatch has not been combined yet")
        self.comm.synchronize(self.device)
        self.comm.compare("checkpoint", {"step": "rounds have ended"}, self._warmup_timeout_s)
        self.close()
        self._suspended = True
        self.comm.compare("checkpoint", {"step": "memory is given up"}, self._warmup_timeout_s)

    def resume(self, comm: Communicator | None = None) -> None:
        """Makes the memory again. Collective; repeated, nothing.

        Args:
            comm: Of the same ranks, where the former one's connections did not outlive the checkpoint.

        Raises:
            ValueError: It is of another rank or size.
            PeerTimeout: A rank did not come.
        """
        if not self.is_suspended:
            self.renew()
            return
        if comm is not None and comm is not self.comm:
            if (comm.rank, comm.size) != (self.comm.rank, self.comm.size):
                raise ValueError(
                    f"comm is rank {comm.rank} of {comm.size}, the memory was that of rank {self.comm.rank} of "
                    f"{self.comm.size}"
                )
            self._move(comm)
        self._make_memory()
        self._suspended = self._is_closed = False

    def _move(self, comm: Communicator) -> None:
        """From now on this communicator closes it, if the former one would have."""
        before, self.comm = self.comm, comm
        if self.key is not None:
            before.kept.pop(self.key, None)  # gone where it was closed meanwhile
            _keep(self, self.key if self.key not in comm.kept else (self.key, id(self)))

    def goes_on_with(self, mask: tuple[bool, ...]) -> bool:
        """Whether the ranks have agreed on this mask; raises as `require_open` does."""
        return mask == self.active_ranks and self._workspace is not None and self._workspace.is_consistent

    def set_active_ranks(self, mask: tuple[bool, ...]) -> None:
        """Goes on with these ranks; collective among them where they are others than before (``Workspace``)."""
        if not self.goes_on_with(mask):
            self.agree(mask)

    def agree(self, mask: tuple[bool, ...]) -> None:
        """Likewise, also where this rank has had the mask all along: others have left it out meanwhile."""
        assert self._workspace is not None
        self._workspace.set_active_ranks(mask)
        self.open_round = None

    def recover(self) -> tuple[int, ...]:
        """Goes on with the ranks that answer, of those that are active now. Collective among these.

        Returns:
            The ranks that go on. A rank that was left out before stays out.

        Raises:
            PeerTimeout: A rank has left the call by an error of its own: call it again.
        """
        wanted = {rank for rank, is_active in enumerate(self.active_ranks) if is_active}
        assert self._workspace is not None
        self.open_round = None
        while True:
            try:
                self._workspace.set_active_ranks([rank in wanted for rank in range(self.comm.size)])
                return tuple(sorted(wanted))
            except PeerLeft:
                raise
            except PeerTimeout as error:
                wanted -= set(error.missing)

    def all_to_all(self, recipe: Recipe) -> AllToAll:
        """The all-to-all for this recipe; making it, at the first call, is collective.

        Raises:
            ValueError: The recipe is not allowed, differs between ranks or needs more bytes than there are; or it is
                new while a CUDA graph is being captured, or while ranks are left out.
            PeerTimeout: A rank did not come: it may have another recipe.
        """
        self.require_open()
        if self.unproven:
            self._prove()
        found = self._objects.get(recipe)
        if found is None:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                rows = ", ".join(str(payload) for payload in recipe.payloads)
                raise ValueError(
                    f"the first dispatch of rows {rows} happens while a CUDA graph is captured: run one round of these "
                    "rows before, which sets it up"
                )
            self._raise_untold()
            if self._workspace is None or self._is_told:
                self.renew()
            self.require_made(recipe, self.active_ranks)
            found = self._make_all_to_all(recipe)
        return found

    def require_made(self, recipe: Recipe, active: tuple[bool, ...]) -> None:
        """Refuses a round of some ranks alone where all ranks would have to make its all-to-all first.

        Raises:
            ValueError: Ranks are left out, and there is no all-to-all for the recipe; nothing has happened.
        """
        if not all(active) and recipe not in self._objects:
            rows = ", ".join(str(payload) for payload in recipe.payloads)
            left_out = ", ".join(str(rank) for rank, is_active in enumerate(active) if not is_active)
            raise ValueError(
                f"the first dispatch of rows {rows} leaves out rank(s) {left_out}, and all ranks make what it needs: "
                "run one round of these rows with all ranks before"
            )

    def _make_all_to_all(self, recipe: Recipe) -> AllToAll:
        def make() -> AllToAll:
            self._raise_untold()  # heard since the call began
            self._made_in[recipe] = self.comm.attempts
            self.unproven.add(recipe)
            self._objects[recipe] = AllToAll(
                self.comm,
                num_experts=recipe.num_experts,
                top_k=recipe.top_k,
                max_tokens_per_rank=recipe.max_tokens_per_rank,
                payloads=recipe.payloads,
                output=recipe.output,
                expert_to_rank=recipe.expert_to_rank,
                combine_dtype=recipe.combine_dtype,
                num_stats=recipe.num_stats,
                device=self.device,
                workspace=self._workspace,
                timeout_s=self._timeout_s,
                warmup_timeout_s=self._warmup_timeout_s,
            )
            self._made_in[recipe] = self.comm.attempts
            return self._objects[recipe]

        try:
            return self.comm.attempt("AllToAll", make)
        except BaseException:
            self._is_told = True
            if recipe in self._objects and self._is_void(recipe):
                self._drop_object(recipe)
            raise

    def close(self) -> None:
        """Frees everything. Needs no peer. Idempotent.

        Raises:
            PeerTimeout, CapacityExceeded, ProtocolMisuse: A fault that no call has raised yet.
        """
        objects, self._objects = list(self._objects.values()), {}
        failures: list[Exception] = []
        for a2a in objects:
            try:
                a2a.close()
            except PutgetError as error:
                failures.append(error)
        self.closings += 1
        self._is_closed = True
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()
        self.open_round = None
        if failures:
            raise failures[0]


def _begin_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


_lock = threading.Lock()
os.register_at_fork(after_in_child=_begin_child)
_communicators: dict[Any, Communicator] = {}
_with_workspaces: weakref.WeakSet[Communicator] = weakref.WeakSet()  # their ``kept`` has some


def _keep(workspace: SharedWorkspace, key: Hashable) -> None:
    workspace.key = key
    workspace.comm.kept[key] = workspace
    with _lock:
        _with_workspaces.add(workspace.comm)


def communicator_of(group: Any = None) -> Communicator:
    """The communicator of a torch.distributed group, made at the first call (collective) and kept.

    Args:
        group: A process group, or None for the world; or a ``putget.Communicator``, which is returned as it is.

    Raises:
        ValueError: torch.distributed is not initialised, or this process is not in the group.
        ForkedChild: This process is a fork of the rank, which the group belongs to.
        PeerTimeout: A rank did not connect in time.
    """
    if isinstance(group, Communicator):
        return group
    key = dist.group.WORLD if group is None else group
    with _lock:
        found = _communicators.get(key)
    if found is not None:
        found.require_own()
        if not found.is_closed and found.is_abandoned:
            found.close()
    if found is None or found.is_closed:
        found = Communicator(group)
        with _lock:
            for ended in [other for other, comm in _communicators.items() if comm.is_closed and comm.is_own]:
                del _communicators[ended]
            _communicators[key] = found
    return found


def shared_workspace(
    comm: Communicator,
    num_bytes: int,
    device: torch.device | str | None = None,
    *,
    share_by: Hashable = None,
    timeout_s: float = TIMEOUT_S,
    warmup_timeout_s: float = WARMUP_TIMEOUT_S,
    arguments: Mapping[str, Any] | None = None,
) -> SharedWorkspace:
    """The workspace of this size for this group, made at the first call (collective) and kept for the next layer.

    ``comm.close`` frees it.

    Args:
        comm: The expert-parallel group.
        num_bytes: Symmetric bytes of each rank.
        device: Where the rows live; by default the current CUDA device, or the CPU where there is none.
        share_by: Only callers with an equal value share. Layers whose rounds may overlap, on two streams or nested,
            need different ones.
        timeout_s: Deadline of every wait, in seconds; the first caller's counts.
        warmup_timeout_s: Deadline of set-up and first rounds, in seconds; the first caller's counts.
        arguments: As for ``SharedWorkspace``.

    Raises:
        ValueError, BackendUnavailable, PeerTimeout: As ``putget.Workspace``.
    """
    place = place_of(device)
    key = ("shared_workspace", place, num_bytes, share_by)
    found = comm.kept.get(key)
    if found is None:
        deadlines = {"timeout_s": timeout_s, "warmup_timeout_s": warmup_timeout_s}
        return SharedWorkspace(comm, num_bytes, place, **deadlines, arguments=arguments, key=key)
    assert isinstance(found, SharedWorkspace)
    found.renew()
    return found


def close_shared(comm: Communicator | None = None) -> None:
    """Frees the workspaces that adapters keep, of one communicator or of all; of all, the communicators too.

    What still uses them raises ``ValueError`` afterwards.

    Raises:
        PeerTimeout, CapacityExceeded, ProtocolMisuse: A fault that no call has raised yet; all is freed the same.
    """
    with _lock:
        holders = list(_with_workspaces) if comm is None else [comm]
        communicators = list(_communicators.values()) if comm is None else []
        if comm is None:
            _communicators.clear()
    failures: list[Exception] = []
    for holder in holders:
        for key in [key for key, kept in holder.kept.items() if isinstance(kept, SharedWorkspace)]:
            try:
                holder.kept.pop(key).close()
            except Exception as error:
                failures.append(error)
    for communicator in communicators:
        communicator.close()
    if failures:
        raise failures[0]
