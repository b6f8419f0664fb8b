"""FlashInfer's functions ``moe_a2a_*``: the same rounds as ``MoeAlltoAll``, on a workspace that the caller has made.

    from putget.adapters.flashinfer.functions import moe_a2a_initialize, moe_a2a_dispatch, moe_a2a_combine

The workspace keeps FlashInfer's layout, rows by source rank. Only the own rank's part of it is used. Rows travel
through symmetric memory of putget's own, which is made at the first dispatch: between the ranks of a group, or, where
the ranks are all of this process (several on one GPU, as tests have them), for all of them at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from putget import AllToAll, Communicator, ForkedChild
from putget.adapters import placement
from putget.adapters.engines import require_supported
from putget.adapters.flashinfer.layout import (
    METAINFO_INDEX,
    active_ranks_of,
    moe_a2a_active_rank_mask,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_wrap_payload_tensor_in_workspace,
    symmetric_bytes,
    table_offsets,
)
from putget.adapters.flashinfer.rounds import RankRounds, check_output
from putget.adapters.rounds import Rounds, check_stats
from putget.adapters.shared import TIMEOUT_S, WARMUP_TIMEOUT_S, Recipe, SharedWorkspace, communicator_of

__all__ = [
    "moe_a2a_active_rank_mask",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
]


class _OneProcess:
    """Ranks of this process: what is collective is done for all of them at once, by whichever comes first."""

    def __init__(self, ep_size: int, num_bytes: int, device: torch.device) -> None:
        self._lock = threading.RLock()
        self._active = list(range(ep_size))
        self._comms = Communicator.local(ep_size)
        self.members: list[SharedWorkspace] = self._each(
            range(ep_size),
            lambda rank: _Member(
                self, self._comms[rank], num_bytes, device, timeout_s=TIMEOUT_S, warmup_timeout_s=WARMUP_TIMEOUT_S
            ),
        )

    def all_to_all(self, recipe: Recipe) -> None:
        """Makes the all-to-alls of a recipe."""
        with self._lock:
            self._each(self._active, lambda rank: SharedWorkspace.all_to_all(self.members[rank], recipe))

    def set_active_ranks(self, mask: tuple[bool, ...]) -> None:
        """Leaves ranks out, or takes them in again."""
        with self._lock:
            active = [rank for rank, is_active in enumerate(mask) if is_active]
            if all(self.members[rank].goes_on_with(mask) for rank in active):
                return  # another rank's thread has come first
            # A rank that was left out has the mask from before that, and would not come by itself.
            self._each(active, lambda rank: SharedWorkspace.agree(self.members[rank], mask))
            self._active = active

    def close(self) -> None:
        """Frees all of it."""
        for member in self.members:
            member.close()
        for comm in self._comms:
            comm.close()

    @staticmethod
    def _each(ranks: Any, call: Callable[[int], Any]) -> list[Any]:
        """The result of a collective call, by rank."""
        found: dict[int, Any] = {}

        def run(rank: int) -> None:
            try:
                found[rank] = call(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [error for error in found.values() if isinstance(error, Exception)]
        if failed:
            raise failed[0]
        return [found[rank] for rank in sorted(found)]


class _Member(SharedWorkspace):
    """The memory of one rank of several in this process."""

    def __init__(self, ranks: _OneProcess, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks = ranks

    def all_to_all(self, recipe: Recipe) -> AllToAll:
        if recipe not in self._objects:
            self._ranks.all_to_all(recipe)
        self.unproven.clear()  # all ranks are here: another one's thread may be using this one's sockets
        return super().all_to_all(recipe)

    def require_made(self, recipe: Recipe, active: tuple[bool, ...]) -> None:
        # Those that are left out from now on are here still, and make it with the others.
        super().require_made(recipe, self.active_ranks)

    def set_active_ranks(self, mask: tuple[bool, ...]) -> None:
        self._ranks.set_active_ranks(mask)


class _Part:
    """One rank's part of a workspace, from ``moe_a2a_initialize`` on."""

    def __init__(
        self, workspace: torch.Tensor, ep_rank: int, max_num_tokens: int, num_stats: int, comm: Communicator | None
    ) -> None:
        self.bytes = workspace[ep_rank]
        self.whole = workspace.data_ptr()
        self.ep_size = workspace.shape[0]
        self.num_stats = num_stats
        self.num_bytes = symmetric_bytes(workspace.shape[1], self.ep_size, max_num_tokens, num_stats)
        self.pid = os.getpid()
        self.is_inherited = False  # by a forked child, whose ranks have nothing in common with those of its parent
        self.key = (self.whole, self.ep_size, self.num_bytes, self.pid)
        self.ep_rank = ep_rank
        self.max_num_tokens = max_num_tokens
        self.comm = comm
        self.shared: SharedWorkspace | None = None
        self.rounds: dict[tuple[int, int], RankRounds] = {}
        self.last: RankRounds | None = None

    def require_shared(self) -> SharedWorkspace:
        """The symmetric memory, made at the first call: collective where the ranks are of a group."""
        if self.shared is None:
            if self.comm is not None:
                self.shared = SharedWorkspace(
                    self.comm,
                    self.num_bytes,
                    self.bytes.device,
                    timeout_s=TIMEOUT_S,
                    warmup_timeout_s=WARMUP_TIMEOUT_S,
                    arguments={
                        "max_num_tokens": self.max_num_tokens,
                        "eplb_stats_num_experts": self.num_stats,
                        "size_per_rank of workspace": self.bytes.numel(),
                    },
                )
            else:
                self.shared = _one_process(self).members[self.ep_rank]
        return self.shared

    def of(self, num_experts: int, top_k: int) -> RankRounds:
        """The rounds for so many experts. Ranks of one process get theirs at once, before any waits for another."""
        if (num_experts, top_k) not in self.rounds:
            with _locked():
                alike = [self] if self.comm is not None else [part for part in _parts.values() if part.key == self.key]
            for part in alike:
                part._make(num_experts, top_k)
            if self.bytes.is_cuda:
                torch.cuda.current_stream(self.bytes.device).synchronize()
        return self.rounds[num_experts, top_k]

    def _make(self, num_experts: int, top_k: int) -> None:
        rounds = Rounds(
            self.require_shared(),
            num_experts=num_experts,
            top_k=top_k,
            max_tokens_per_rank=self.max_num_tokens,
            output=None,
            expert_to_rank=placement.linear(num_experts, self.ep_size),
            num_stats=self.num_stats,
        )
        self.rounds.setdefault((num_experts, top_k), RankRounds(rounds, self.bytes, self.bytes.numel()))


_lock = threading.Lock()
_numbers = itertools.count(1)
_parts: dict[int, _Part] = {}  # by the number that metainfo has
_together: dict[tuple[int, int, int, int], _OneProcess] = {}  # by the key of their parts
_given_up: deque[int] = deque()  # numbers of parts that nobody needs any more


def _begin_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    for part in list(_parts.values()):
        part.is_inherited = True


os.register_at_fork(after_in_child=_begin_child)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Holds the lock; afterwards frees what was given up meanwhile."""
    try:
        with _lock:
            yield
    finally:
        _free_given_up()


def _one_process(part: _Part) -> _OneProcess:
    with _locked():
        if part.key not in _together:
            _together[part.key] = _OneProcess(part.ep_size, part.num_bytes, part.bytes.device)
        return _together[part.key]


def _forget(number: int) -> None:
    """The caller has given up what ``moe_a2a_initialize`` returned: frees what belongs to it.

    The garbage collector calls it anywhere, also in a thread that holds the lock or that the lock's holder waits for.
    So it never waits for the lock: where another call holds it, that call frees what belongs to the number.
    """
    _given_up.append(number)
    _free_given_up()


def _free_given_up() -> None:
    while _given_up and _lock.acquire(blocking=False):
        try:
            close = _take(_given_up.popleft()) if _given_up else None
        finally:
            _lock.release()
        if close is not None:
            close()


def _take(number: int) -> Callable[[], None] | None:
    """Takes a part out of the tables, under the lock; what frees it, or None."""
    part = _parts.pop(number)
    if part.comm is not None:
        return None if part.shared is None else part.shared.close
    is_last = all(other.key != part.key for other in _parts.values())
    together = _together.pop(part.key, None) if is_last else None
    return None if together is None else together.close


def moe_a2a_initialize(
    workspace: torch.Tensor,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
    comm: Any = None,
) -> torch.Tensor:
    """Prepares a rank's part of a workspace: zeros.

    Args:
        workspace: [ep_size, size_per_rank] uint8, rows contiguous; see ``moe_a2a_get_workspace_size_per_rank``.
        ep_rank: This rank.
        ep_size: Ranks of the expert-parallel group.
        max_num_tokens: Most tokens that one rank sends in one round.
        eplb_stats_num_experts: How many numbers ``eplb_local_stats`` has; 0: there are none.
        backend: Must be "trtllm".
        comm: The group, as a process group or a ``putget.Communicator``; None: the world of torch.distributed where
            it has ep_size ranks, otherwise the ranks are those of this process.

    Returns:
        metainfo: int64 on the CPU, offsets of FlashInfer's tables. Keep it as long as the workspace is in use: with it
        putget's memory is given up.

    Raises:
        ValueError: An argument is wrong or not supported.
    """
    require_supported(backend=(backend, "trtllm"))
    shape = list(workspace.shape)
    if workspace.dtype != torch.uint8 or len(shape) != 2 or shape[0] != ep_size or workspace.stride(1) != 1:
        raise ValueError(f"workspace is {shape} {workspace.dtype}, expected [{ep_size}, size_per_rank] torch.uint8")
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank is {ep_rank}, allowed are 0 to {ep_size - 1}")
    in_world = dist.is_available() and dist.is_initialized() and dist.get_world_size() == ep_size > 1
    group = communicator_of(comm) if comm is not None or in_world else None
    if group is not None and (group.rank, group.size) != (ep_rank, ep_size):
        raise ValueError(f"ep_rank is {ep_rank} of {ep_size}, the group has rank {group.rank} of {group.size}")
    part = _Part(workspace, ep_rank, max_num_tokens, eplb_stats_num_experts, group)
    part.bytes.zero_()
    number = next(_numbers)
    metainfo = torch.tensor(
        [*table_offsets(ep_size, max_num_tokens, eplb_stats_num_experts), number], dtype=torch.int64, device="cpu"
    )
    with _locked():
        _parts[number] = part
    weakref.finalize(metainfo, _forget, number)
    return metainfo


def _part_of(workspace: torch.Tensor, metainfo: torch.Tensor, ep_rank: int) -> _Part:
    """The all-to-all that ``moe_a2a_initialize`` has made.

    Raises:
        ValueError: Both do not belong together.
        ForkedChild: A parent of this process has made it.
    """
    fields = METAINFO_INDEX["NUM_METAINFO_FIELDS"] + 1
    known = isinstance(metainfo, torch.Tensor) and metainfo.dtype == torch.int64 and metainfo.numel() == fields
    part = _parts.get(int(metainfo[-1])) if known else None
    if part is None or part.whole != workspace.data_ptr() or part.ep_rank != ep_rank:
        raise ValueError(
            f"metainfo is not what moe_a2a_initialize returned for rank {ep_rank} of this workspace, or it was given up"
        )
    if part.is_inherited:
        raise ForkedChild(ep_rank, "memory of this metainfo", part.pid, os.getpid())
    return part


def moe_a2a_dispatch(
    token_selected_experts: torch.Tensor,
    input_payloads: list[torch.Tensor],
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    eplb_local_stats: torch.Tensor | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    *,
    backend: str = "trtllm",
    recv_view_cache: dict[Any, Any] | None = None,
) -> tuple[list[torch.Tensor], int, torch.Tensor | None]:
    """Puts each token's rows into the ranks of its experts, once per (token, rank).

    Args:
        token_selected_experts: [num_tokens, top_k] int32; -1 is "no expert".
        input_payloads: Contiguous tensors [num_tokens, *], 1 to 8, of any dtype and length.
        workspace: [ep_size, size_per_rank] uint8.
        metainfo: Of ``moe_a2a_initialize``, for this rank.
        runtime_max_tokens_per_rank: Slots of each source that this rank looks at, 1 to max_num_tokens.
        ep_rank: This rank.
        ep_size: Ranks of the group.
        top_k: Experts of a token.
        num_experts: Experts of all ranks together; the first ``num_experts % ep_size`` ranks have one more.
        enable_pdl: Not used.
        eplb_local_stats: [eplb_stats_num_experts] int32 that every rank gets, or None.
        enable_rank_mask: Whether an active_rank_mask is given.
        active_rank_mask: Of ``moe_a2a_active_rank_mask``; where it changes, the ranks that it names agree on it. The
            first dispatch of rows of a kind needs all ranks of a group.
        backend: Must be "trtllm".
        recv_view_cache: Not used: it stays as it is.

    Returns:
        One tensor [ep_size, runtime_max_tokens_per_rank, *] for each payload in the workspace, by source rank, zeros
        where there is no token, valid until the next dispatch; where rows of combine begin in the rank's part, in
        bytes; [ep_size, eplb_stats_num_experts] int32, what each rank has told, valid until combine, or None without
        eplb_local_stats.

    Raises:
        ValueError: An argument is wrong; nothing has happened on any rank.
        ProtocolMisuse: The last dispatch has not been combined.
        PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
    """
    require_supported(backend=(backend, "trtllm"))
    part = _part_of(workspace, metainfo, ep_rank)
    check_stats(eplb_local_stats, part.num_stats, "eplb_stats_num_experts")
    if ep_size != part.ep_size or not 1 <= runtime_max_tokens_per_rank <= part.max_num_tokens:
        raise ValueError(
            f"ep_size is {ep_size} and runtime_max_tokens_per_rank {runtime_max_tokens_per_rank}, expected "
            f"{part.ep_size} and 1 to {part.max_num_tokens}"
        )
    # A mask that is wrong is said before memory is made, which other ranks would have to come to.
    active = active_ranks_of(active_rank_mask, enable_rank_mask, ep_rank, ep_size, (True,) * ep_size)
    if part.comm is not None and part.shared is None and not all(active):
        raise ValueError("active_rank_mask leaves out ranks of the first dispatch, whose memory all ranks make")
    rank = part.of(num_experts, top_k)
    rank.rounds.require_closed()
    rank.require_made(token_selected_experts, input_payloads, active)
    if enable_rank_mask and all(active) and part.shared is not None:
        part.shared.set_active_ranks(active)  # first: all ranks make what rows of a new kind need
    rank.prepare(token_selected_experts, input_payloads)
    if enable_rank_mask:
        part.require_shared().set_active_ranks(active)
    found = rank.dispatch(token_selected_experts, input_payloads, runtime_max_tokens_per_rank, stats=eplb_local_stats)
    part.last = rank
    return found, rank.combine_offset, rank.stats


def moe_a2a_combine(
    payload: torch.Tensor,
    local_num_tokens: int,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: torch.dtype | None = None,
    output_scales: torch.Tensor | None = None,
    output_scalar_scale: float = 1.0,
    sf_layout: Any = None,
    output: torch.Tensor | None = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    backend: str = "trtllm",
) -> torch.Tensor:
    """Gets each token's rows back and sums them.

    Args:
        payload: [ep_size, runtime_max_tokens_per_rank, *] by source rank: the weighted sum over this rank's experts.
            bfloat16, float16 or float32.
        local_num_tokens: Tokens of the dispatch.
        workspace: [ep_size, size_per_rank] uint8.
        metainfo: Of ``moe_a2a_initialize``, for this rank.
        runtime_max_tokens_per_rank: That of the dispatch.
        ep_rank: This rank.
        ep_size: Ranks of the group.
        top_k: Experts of a token.
        combine_payload_offset: Of the dispatch.
        payload_in_workspace: Whether payload lies there in the rank's part.
        output_dtype: None or the dtype of payload.
        output_scales: Must be None.
        output_scalar_scale: Not used without output_scales.
        sf_layout: Not used without output_scales.
        output: Where to write, contiguous [local_num_tokens, *].
        use_low_precision: Whether rows travel as FP8, the same on all ranks.
        enable_pdl: Not used.
        enable_rank_mask: As for the dispatch.
        active_rank_mask: That of the dispatch.
        backend: Must be "trtllm".

    Returns:
        [local_num_tokens, *].

    Raises:
        ValueError: An argument is wrong; nothing has happened on any rank.
        ProtocolMisuse: No dispatch came before.
        PeerTimeout: As ``AllToAll.combine``.
    """
    if output is not None:
        place = workspace.device if workspace.numel() else torch.device("cuda")
        check_output(output, tuple(output.shape), output.dtype, place)
    require_supported(
        output_scales=(output_scales, None), output_dtype=(output_dtype, None), backend=(backend, "trtllm")
    )
    part = _part_of(workspace, metainfo, ep_rank)
    rank = part.last
    if rank is None or rank.rounds.top_k != top_k or ep_size != part.ep_size:
        raise ValueError(f"ep_size is {ep_size} and top_k {top_k}: no dispatch of these came before")
    rank.rounds.require_open("combine")
    num_tokens = rank.rounds.all_to_all.target_ranks.shape[0]
    if (local_num_tokens, combine_payload_offset) != (num_tokens, rank.combine_offset):
        raise ValueError(
            f"local_num_tokens is {local_num_tokens} and combine_payload_offset {combine_payload_offset}, the dispatch "
            f"had {num_tokens} tokens and gave {rank.combine_offset}"
        )
    if payload_in_workspace and payload.data_ptr() != part.bytes.data_ptr() + combine_payload_offset:
        raise ValueError("payload_in_workspace is True, payload does not begin at combine_payload_offset of this rank")
    before = part.require_shared().active_ranks
    if active_ranks_of(active_rank_mask, enable_rank_mask, ep_rank, ep_size, before) != before:
        raise ValueError("active_rank_mask is another one than that of the dispatch")
    return rank.combine(payload, runtime_max_tokens_per_rank, low_precision=use_low_precision, out=output)


def moe_a2a_sanitize_expert_ids(
    expert_ids: torch.Tensor,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Writes an id into every slot without a token of the last dispatch, in place.

    Args:
        expert_ids: [ep_size, runtime_max_tokens_per_rank, *] int32, as dispatch returned it.
        workspace: [ep_size, size_per_rank] uint8.
        metainfo: Of ``moe_a2a_initialize``, for this rank.
        ep_rank: This rank.
        invalid_expert_id: What to write.
        enable_pdl: Not used.
        backend: Must be "trtllm".

    Raises:
        ValueError: An argument is wrong, or no dispatch came before.
    """
    require_supported(backend=(backend, "trtllm"))
    part = _part_of(workspace, metainfo, ep_rank)
    if part.last is None:
        raise ValueError("no dispatch came before: there are no received expert_ids")
    part.last.sanitize(expert_ids, invalid_expert_id)
