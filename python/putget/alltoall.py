"""Dispatch and combine over symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from putget import _abi
from putget._arguments import (
    check_expert_to_rank,
    check_int,
    check_rows,
    check_seconds,
    check_tensor,
    describe_table,
)
from putget._log import logger
from putget.core import metrics
from putget.core.expert_major import ExpertMajor, ExpertMajorMemory
from putget.core.geometry import Beside, Geometry, default_expert_to_rank
from putget.core.native_object import NativeObject
from putget.core.overlap import check_no_grad
from putget.core.received import Received
from putget.core.rounds import Rounds
from putget.core.wire import check_tuning
from putget.errors import InvalidExpertIds, PeerTimeout
from putget.group.communicator import Communicator, collective
from putget.looks import looks_of, strided_looks_of
from putget.memory.workspace import Workspace, check_workspace, resolve_device
from putget.payload import Payload
from putget.tuning import ChosenLaunch, Tuning


class AllToAll:
    """One-sided dispatch and combine of a mixture-of-experts layer. Construction is collective over the group.

    The method is the token-major, one-sided exchange that NVIDIA published for TensorRT-LLM's wide expert parallelism;
    slots are prefix counts here instead of atomic counters. docs/protocol.md describes every access to another rank's
    memory.

    Args:
        comm: The expert-parallel group.
        num_experts: Physical expert slots of all ranks together.
        top_k: Experts of a token, 1 to 32.
        max_tokens_per_rank: Most tokens that one rank sends in one round.
        payloads: 1 to 8 kinds of rows that dispatch moves, as opaque bytes.
        output: The row that experts write and combine reduces: bfloat16, float16 or float32.
        device: "cuda", "cuda:N" or "cpu".
        timeout_s: Deadline of every wait, in seconds.
        warmup_timeout_s: Deadline of set-up and of the first round, until it has ended on every rank, in seconds.
        expert_to_rank: int32 [num_experts] on the device (kept, not copied), or on the CPU or a list (copied to the
            device), the same on every rank; by default contiguous blocks of ceil(num_experts / ep_size) experts a rank.
        workspace: Memory and rounds shared with other objects, used one after the other; by default memory of its own.
        num_sms: Most SMs that one call uses; None: chosen by size.
        num_threads: On CPU, most threads that run a call, the calling one included: a small batch wakes fewer.
        combine_dtype: torch.float8_e4m3fn: rows travel in half of the bytes, as E4M3 with one float32 scale for each
            128 elements, and are summed in float32. With several domains it is the sums that they send each other that
            travel so, rounded to the output's dtype before; inside a domain rows stay as experts write them. None: as
            experts write them; then a rank whose batch is larger than the workspace has room for gets its rows where
            experts wrote them (``putget.tuning.Launch.sentinel_rows``).
        tuning: A ``putget.tuning.Tuning``, for measurements; see ``launches``.
        num_stats: Numbers that each rank tells all ranks in each dispatch; 0: no statistics, and no bytes for them.

    Raises:
        ValueError: An argument is wrong, here or on another rank, or differs between ranks; the message names it.
        BackendUnavailable: This machine or build lacks something.
        PeerTimeout: A rank did not come in time, here or where another rank waited.
        PeerLeft: Another rank has left the constructor by an error of its own. Call it again on all ranks.
        ProtocolMisuse: A start half on the workspace waits for its finish.
    """

    @collective
    def __init__(
        self,
        comm: Communicator,
        *,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        payloads: Sequence[Payload],
        output: Payload,
        device: str | torch.device = "cuda",
        timeout_s: float = 30.0,
        warmup_timeout_s: float = 120.0,
        expert_to_rank: torch.Tensor | Sequence[int] | None = None,
        workspace: Workspace | None = None,
        num_sms: int | None = None,
        num_threads: int = 1,
        combine_dtype: torch.dtype | None = None,
        tuning: Tuning | None = None,
        num_stats: int = 0,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise ValueError(f"comm is {comm!r}, expected a putget.Communicator")
        self._comm = comm
        geometry = Geometry.checked(
            comm.size,
            num_experts,
            top_k,
            max_tokens_per_rank,
            payloads,
            output,
            combine_dtype,
            num_stats,
            across=comm.network is not None,
            domain_ranks=comm.block[1],
        )
        tuning = check_tuning(tuning, geometry.wire)
        check_seconds("timeout_s", timeout_s)
        check_seconds("warmup_timeout_s", warmup_timeout_s)
        self._device = resolve_device(device)
        most = self._most_at_once(num_sms, num_threads)
        table = (
            default_expert_to_rank(num_experts, comm.size, self._device)
            if expert_to_rank is None
            else check_expert_to_rank(expert_to_rank, num_experts, comm.size, self._device)
        )
        layout = geometry.layout()
        if workspace is not None:
            check_workspace(workspace, comm, self._device, int(layout.total_bytes))
        self._geometry = geometry
        comm.compare(
            "AllToAll",
            {
                "num_experts": num_experts,
                "top_k": top_k,
                "max_tokens_per_rank": max_tokens_per_rank,
                "payloads": [str(payload) for payload in geometry.payloads],
                "output": geometry.output,
                "combine": str(geometry.combine_wire),
                "num_stats": num_stats,
                "device": self._device.type,
                "workspace": "own" if workspace is None else f"number {workspace.number} of this communicator",
                "expert_to_rank": describe_table(table),
            },
            float(warmup_timeout_s),
        )
        self._owns_workspace = workspace is None
        self._workspace = workspace or Workspace(
            comm,
            int(layout.total_bytes),
            self._device,
            timeout_s=timeout_s,
            warmup_timeout_s=warmup_timeout_s,
        )
        shape = geometry.max_tokens_per_rank, geometry.top_k, geometry.payloads
        sizes = (*shape, geometry.output, geometry.wire, num_stats)
        config = geometry.config(comm.rank, most, tuning, float(timeout_s), float(warmup_timeout_s), comm.block[0])
        try:
            self._workspace.adopt(sizes, is_new=self._owns_workspace)
            native = NativeObject(self._workspace, geometry, table, config)
        except BaseException:
            if self._owns_workspace:
                self._workspace.close()
            raise
        self._native = native
        self._rounds = Rounds(self._workspace, geometry, native)
        self._dispatched: object = None  # the form of the last dispatch that passed its checks
        self._taken: object = None  # likewise the rows that combine took
        self._strides = (0, 0)  # of those
        logger.info("%r: %d bytes of workspace, %d for other domains", self, layout.total_bytes, native.network_bytes)

    def _most_at_once(self, num_sms: int | None, num_threads: int) -> int:
        """SMs, or threads on CPU, that a call may use; 0: chosen by size."""
        check_int("num_threads", num_threads, 1, _abi.MAX_PARTS)
        if num_sms is not None:
            check_int("num_sms", num_sms, 1, _abi.MAX_SMS)
        if self._device.type == "cpu":
            return num_threads
        if num_threads != 1:
            raise ValueError(f'num_threads is {num_threads}, which device="cpu" alone has; a GPU has num_sms')
        return self._comm.default_sms(self._device) if num_sms is None else num_sms

    # --- rounds -------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *payloads: torch.Tensor,
        max_rows: int | None = None,
        num_valid_tokens: torch.Tensor | None = None,
        expert_load: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        busiest_tokens: int | None = None,
    ) -> Received:
        """Puts each token's rows into the ranks that own its experts, once per (token, rank), and waits for every rank.

        On CUDA it enqueues one kernel on the current stream: no host synchronisation; it can be captured in a graph. If
        the last round is still open, it is released first. No argument may lie in the workspace, because peers write
        there while the arguments are read.

        Args:
            topk_ids: [num_tokens, top_k] int32 or int64 expert ids; -1 is "no expert". num_tokens may be 0 and may
                differ between ranks.
            topk_weights: [num_tokens, top_k] float32.
            *payloads: One contiguous tensor [num_tokens, *shape] for each payload of the constructor.
            max_rows: Slots of each source that this rank will look at, at most max_tokens_per_rank (the default).
            num_valid_tokens: One int32 on the device: tokens from there on have no expert.
            expert_load: [num_experts] int32 on the device, to which this rank's choices are added, also where a CUDA
                graph replays the call. A choice counts if a row goes to its expert: not -1, not of padding, not on a
                rank that is not active. A call that ends in a fault may have counted some.
            stats: [num_stats] int32 on the device: every rank has them as ``received.stats`` after its own dispatch of
                this round, rows or not. None: zeros. Ranks may differ.
            busiest_tokens: Most tokens that any rank has in this round, where the caller knows: a rank with few sends
                the others' rows with as many CTAs as these need. It changes the speed alone, so ranks may differ. By
                default max_rows where that is given, else this rank's own; one without tokens is ready for all.

        Returns:
            Views of what arrived, valid until the round ends.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            PeerTimeout: A rank is missing. On CUDA the call after the one that waited raises it.
            BaseException: On CPU whatever the handler of a signal raises, KeyboardInterrupt for one, ends the wait. As
                after a time-out, calls are refused until ``set_active_ranks``.
            CapacityExceeded: A source sent more than max_rows rows; likewise.
            ProtocolMisuse: A peer ended the last round by combine and this rank without, or the other way round;
                likewise.
        """
        beside = Beside(num_valid_tokens, expert_load, stats)
        self._dispatch(_abi.BOTH, topk_ids, topk_weights, payloads, (max_rows, busiest_tokens), beside)
        return self._rounds.received()

    def dispatch_start(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *payloads: torch.Tensor,
        max_rows: int | None = None,
        num_valid_tokens: torch.Tensor | None = None,
        expert_load: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        busiest_tokens: int | None = None,
    ) -> None:
        """The first half of ``dispatch``: puts the rows and tells the peers so, and waits for nobody's rows.

        No kernel stays behind: rows travel while other work runs. It may be on another stream than its finish, which
        then waits for it by an event. The tensors must not change before ``dispatch_finish`` has run. Arguments and
        errors: see ``dispatch``.
        """
        beside = Beside(num_valid_tokens, expert_load, stats)
        self._dispatch(_abi.START, topk_ids, topk_weights, payloads, (max_rows, busiest_tokens), beside)
        self._rounds.start("dispatch_start")

    def dispatch_finish(self) -> Received:
        """The second half of ``dispatch``: waits until every rank's rows are here.

        Returns:
            Views of what arrived, valid until the round ends.

        Raises:
            ProtocolMisuse: No ``dispatch_start`` came before it.
            PeerTimeout, CapacityExceeded: As ``dispatch`` raises them.
        """
        self._native.require_open()
        self._rounds.require_started("dispatch_finish")
        self._native.finish_dispatch()
        return self._rounds.received()

    def _dispatch(
        self,
        half: int,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        payloads: tuple[torch.Tensor, ...],
        sizes: tuple[int | None, int | None],
        beside: Beside,
    ) -> None:
        native = self._native
        native.require_open()
        self._rounds.require_finished("dispatch" if half == _abi.BOTH else "dispatch_start")
        tensors = (topk_ids, topk_weights, *payloads)
        given = [tensor for tensor in beside if tensor is not None]
        looks = looks_of((*tensors, *given) if given else tensors)
        call = (looks, sizes, [tensor is None for tensor in beside] if given else None)
        if looks is None or call != self._dispatched:
            self._dispatched = None
            num_tokens = self._geometry.check_dispatch(topk_ids, topk_weights, payloads, beside, self._device)
            max_rows, busiest = sizes
            rows = most = self._geometry.max_tokens_per_rank
            if max_rows is not None:
                rows = check_int("max_rows", max_rows, 1, most)
            if busiest is None:
                busiest = 0 if max_rows is None else rows
            check_int("busiest_tokens", busiest, 0, most)
            wide = topk_ids.dtype == torch.int64
            native.describe_dispatch(num_tokens, rows, ids_are_64bit=wide, busiest_tokens=busiest)
            self._dispatched = call
        native.dispatch(half, tensors, beside if given else None)

    def combine(
        self,
        x: torch.Tensor | None = None,
        *,
        layout: ExpertMajor | None = None,
        out: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gets the rows that this rank's tokens have on every rank, and sums them in a fixed order in float32.

        On CUDA it enqueues one kernel on the current stream; with a layout, one before it where rows do not travel as
        sentinel rows in bfloat16, or out overlaps x.

        Args:
            x: Rows from outside the workspace: [ep_size, max_rows, *shape] with any strides of the first two
                dimensions, or flat [max_rows * ep_size, *shape]. None: the experts wrote ``combine_input``. In the
                workspace x may be ``combine_input`` itself, or a payload that was received, if the experts worked in
                place; in another order neither.
            layout: Of this round, from ``received.expert_major()``. Then x is [capacity, *shape] in that layout, and
                the weighted sum of each received row's local experts, in float32 with k ascending, is what travels.
                The weights are the router's, as they arrived: change neither the layout's nor the received ones.
            out: Where to write, contiguous [num_tokens, *shape], outside the workspace and apart from x unless x comes
                with a layout; by default a new tensor.
            addend: [num_tokens, *shape], added last in float32 (a shared expert's output). It lies outside the
                workspace, and is out itself or apart from it.

        Returns:
            [num_tokens, *shape] in the output dtype; zeros (or the addend) for tokens without an expert. A NaN is
            0x7fff in 16 bits; its bits are not specified in float32.

        Raises:
            ValueError: An argument is wrong, or x or out requires grad; nothing has happened on any rank.
            PeerTimeout: A rank is missing. On CUDA the call after the one that waited raises it.
            ProtocolMisuse: No dispatch came before; or a peer released this round. With sentinel rows
                (``launches(num_tokens)[1].sentinel_rows``) this rank waits for those alone whose rows it sums: of
                the others the next dispatch says so, as it does of a missing rank.
        """
        self._native.require_open()
        self._rounds.require_finished("combine")
        self._rounds.require_open("combine")
        self._check_rows(x, layout)
        sums = layout is not None and self._take_expert_major(x, layout, out)
        result = self._take_out(out, addend)
        if not sums:
            self._finalize(x, layout)
        self._native.combine(_abi.BOTH)
        self._rounds.end()
        return result

    def combine_start(self, x: torch.Tensor | None = None, *, layout: ExpertMajor | None = None) -> None:
        """The first half of ``combine``: sends rows, or tells the peers that they are there.

        In one domain it waits for nobody. With several domains it may wait until the ranks of its own one call it.
        No kernel stays behind. ``x`` has been read when the call's work is done, and may be written over on the same
        stream. ``combine_input`` must not change before the round has ended on every rank, that is, before the next
        dispatch. Arguments and errors: see ``combine``.
        """
        self._native.require_open()
        self._rounds.require_finished("combine_start")
        self._rounds.require_open("combine_start")
        self._check_rows(x, layout)
        self._finalize(x, layout)
        self._native.combine(_abi.START)
        self._rounds.start("combine_start")

    def combine_finish(self, *, out: torch.Tensor | None = None, addend: torch.Tensor | None = None) -> torch.Tensor:
        """The second half of ``combine``: waits for every rank, and sums the rows of this rank's tokens.

        Arguments, result and errors: see ``combine``.

        Raises:
            ProtocolMisuse: No ``combine_start`` came before it.
        """
        self._native.require_open()
        self._rounds.require_started("combine_finish")
        result = self._take_out(out, addend)
        self._native.combine(_abi.FINISH)
        self._rounds.end()
        return result

    def _check_rows(self, x: torch.Tensor | None, layout: ExpertMajor | None) -> None:
        strides = (0, 0)
        if layout is not None:
            self._rounds.grouper.check_rows(x, self._rounds.grouper.check_layout(layout), "x")
        if x is not None:
            if layout is None:
                strides = self._strides_of(x)
            check_no_grad("x", x)
        # Rows of a layout are read before combine begins.
        self._native.take_rows(x if layout is None else None, strides)

    def _strides_of(self, x: torch.Tensor) -> tuple[int, int]:
        """In bytes, (slot, source); raises ValueError where combine cannot take these rows."""
        rows = self._native.max_rows
        looks = strided_looks_of(x)
        if looks is None or (looks, rows) != self._taken:
            self._taken = None
            self._strides = check_rows(x, self.ep_size, rows, self._geometry.output, self._device)
            self._taken = (looks, rows)
        return self._strides

    def _finalize(self, x: torch.Tensor | None, layout: ExpertMajor | None) -> None:
        if x is not None and layout is not None:
            self._rounds.grouper.finalize(x, layout)

    def _take_expert_major(self, x: torch.Tensor | None, layout: ExpertMajor, out: torch.Tensor | None) -> bool:
        """Whether combine itself sums what experts made of each row. Else it is summed before it."""
        native = self._native
        if x is None or not native.sums_experts() or not native.span.may_read_late(x, out):
            return False
        native.take_expert_major(x, layout.positions, layout.weights)
        return True

    def _take_out(self, out: torch.Tensor | None, addend: torch.Tensor | None) -> torch.Tensor:
        output = self._geometry.output
        shape = (self._native.num_tokens, *output.shape)
        self._check_result(shape, out, addend)
        result = torch.empty(shape, dtype=output.dtype, device=self._device) if out is None else out
        self._native.take_out(result, addend)
        return result

    def _check_result(self, shape: tuple[int, ...], out: torch.Tensor | None, addend: torch.Tensor | None) -> None:
        dtypes = (self._geometry.output.dtype,)
        if addend is not None:
            check_tensor("addend", addend, shape, dtypes, self._device)
        if out is not None:
            check_tensor("out", out, shape, dtypes, self._device)
            check_no_grad("out", out)

    def release(self) -> None:
        """Ends a round without combine: the received rows are no longer read here.

        Does nothing where no round is open. On CUDA it enqueues one small kernel on the current stream.

        Raises:
            PeerTimeout: A fault stands.
        """
        self._native.require_open()
        self._rounds.require_finished("release")
        self._native.release()
        self._rounds.end()

    # --- about it -----------------------------------------------------------------------------------------------------

    @property
    def ep_rank(self) -> int:
        """This rank."""
        return self._comm.rank

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank in the last dispatch."""
        return self._native.num_tokens

    @property
    def num_stats(self) -> int:
        """Numbers that each rank tells all ranks in each dispatch."""
        return self._geometry.num_stats

    # --- what a round has ---------------------------------------------------------------------------------------------

    @property
    def combine_input(self) -> torch.Tensor:
        """[ep_size, max_rows, *shape] in the workspace: experts write row (src, slot) here.

        max_rows is the last dispatch's. Writable from the end of dispatch to the start of combine. Its attribute
        ``flat`` is the same memory as contiguous [max_rows * ep_size, *shape].
        """
        return self._rounds.combine_input()

    @property
    def target_ranks(self) -> torch.Tensor:
        """[num_tokens, top_k] int32 of the last dispatch: the rank of the expert that owns the slot; -1 elsewhere."""
        return self._native.target_ranks[: self._native.num_tokens]

    @property
    def target_slots(self) -> torch.Tensor:
        """[num_tokens, top_k] int32 of the last dispatch: the slot on that rank; -1 elsewhere."""
        return self._native.target_slots[: self._native.num_tokens]

    @property
    def expert_to_rank(self) -> torch.Tensor:
        """[num_experts] int32 on the device, read at every dispatch; change it in place, or assign to copy into it."""
        return self._native.expert_to_rank

    @expert_to_rank.setter
    def expert_to_rank(self, value: torch.Tensor | Sequence[int]) -> None:
        table = check_expert_to_rank(value, self._geometry.num_experts, self.ep_size, self._device)
        self._native.expert_to_rank.copy_(table)

    @property
    def ep_size(self) -> int:
        """Ranks of the expert-parallel group."""
        return self._geometry.ep_size

    def expert_major_memory(
        self, alignment: int = 1, max_rows: int | None = None, *, copy_rows: bool = True
    ) -> ExpertMajorMemory:
        """Memory for ``received.expert_major(alignment, memory=...)``, zeroed; it waits for the current stream.

        Args:
            alignment: Groups begin at multiples of this many rows, 1 to 4096.
            max_rows: As for dispatch; by default max_tokens_per_rank.
            copy_rows: As for ``expert_major``: False leaves no room for payloads.

        Raises:
            ValueError: One of them is out of range.
        """
        rows = self._geometry.max_tokens_per_rank if max_rows is None else max_rows
        return ExpertMajorMemory(self._rounds.grouper.sizes(alignment, rows, copy_rows))

    def require_ready(self) -> None:
        """Raises what a dispatch refuses before it looks at its arguments: for callers that replay graphs of rounds.

        Raises:
            ValueError: The object is closed.
            ProtocolMisuse: A start half waits for its finish.
            PeerTimeout, CapacityExceeded: A fault stands, or ranks have not agreed since one.
        """
        self._native.require_open()
        self._rounds.require_finished("dispatch")
        self._workspace.require_consistent()
        self._workspace.raise_fault()

    def check_out(self, num_tokens: int, out: torch.Tensor | None, addend: torch.Tensor | None) -> None:
        """Raises ValueError unless ``combine`` takes these after a dispatch of so many tokens."""
        self._check_result((num_tokens, *self._geometry.output.shape), out, addend)
        if out is not None:
            self._native.span.result(out, addend, (0, 0))
        elif addend is not None:
            self._native.span.addresses(("addend",), (addend,))

    def check_expert_major_memory(self, memory: ExpertMajorMemory | None) -> ExpertMajorMemory:
        """The memory that ``received.expert_major(memory=)`` uses with its other defaults: by default the object's own.

        Raises:
            ValueError: It does not fit.
            ProtocolMisuse: The object has none of its own yet, and a CUDA graph is being captured.
        """
        return self._rounds.grouper.memory_for(1, self._geometry.max_tokens_per_rank, memory)

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """The rows that dispatch moves."""
        return self._geometry.payloads

    @property
    def output(self) -> Payload:
        """The rows that experts write and combine sums."""
        return self._geometry.output

    @property
    def num_local_experts(self) -> int:
        """Groups of an expert-major layout: experts that this rank had at construction."""
        return self._rounds.grouper.num_local_experts

    def launches(self, num_tokens: int) -> tuple[ChosenLaunch, ChosenLaunch]:
        """How dispatch and combine are launched with this many tokens; on CPU ``blocks`` are threads.

        The rule goes by the number of tokens, the sizes of rows and the SMs allowed: by ``num_sms``, and by the green
        context of the current stream or by MPS. A combine that sums experts itself (``layout``) has more senders.
        """
        check_int("num_tokens", num_tokens, 0, self._geometry.max_tokens_per_rank)
        dispatch, combine = self._native.launches(num_tokens)
        return replace(ChosenLaunch.of(dispatch), sentinel_rows=None), ChosenLaunch.of(combine)

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of one row of combine as it travels, between domains where there are several; its scales count."""
        return self._geometry.combine_row_bytes

    @property
    def workspace(self) -> Workspace:
        """The symmetric memory."""
        return self._workspace

    # --- faults and the end -------------------------------------------------------------------------------------------

    @property
    def active_ranks(self) -> tuple[bool, ...]:
        """Which ranks take part in rounds."""
        return self._workspace.active_ranks

    def set_active_ranks(self, mask: Sequence[bool], *, quorum: int | None = None) -> None:
        """Goes on without some ranks (or with them again): collective among the ranks that the mask names.

        After a time-out call ``recover``, which asks all ranks: ``PeerTimeout.missing`` of a round is no mask.

        The survivors agree on mask and epoch over putget's sockets and move to new physical memory at the same
        addresses: captured graphs stay valid, and a stopped rank that wakes up can write only where nobody reads.
        Faults are cleared.
        Experts of excluded ranks count as "no expert" until ``expert_to_rank`` says otherwise. While ranks are
        excluded, rounds go on but nothing new can be constructed on this communicator.

        A PeerTimeout names the members that do not answer. Ranks that drop them from their masks and call again end as
        one group if each comes within twice ``timeout_s``. Ranks that do not hear each other do not know of each other:
        two halves that agree at once both go on. With a ``quorum`` of more than half the ranks, one at most does.

        Args:
            mask: One bool for each rank of the group.
            quorum: The fewest ranks to go on with; None: any number. Give the same on all ranks.

        Raises:
            ValueError: The mask leaves out the own rank, another member wants another mask, or quorum is out of range;
                or ranks of several domains have different objects on the workspace.
            QuorumLost: The mask names fewer ranks than quorum; nothing has happened on any rank.
            PeerTimeout: A member does not answer; rounds stay refused until a call succeeds.
        """
        self._native.require_open()
        self._workspace.set_active_ranks(mask, quorum=quorum)

    def recover(self, deadline: float | None = None, *, quorum: int | None = None) -> tuple[int, ...]:
        """Goes on after a time-out: asks all ranks, leaves out those that do not answer, and takes back those that do.

        Collective: every rank that lives calls it, also one that no ``missing`` names, and one that is left out now.
        It is ``set_active_ranks`` of all ranks, then without those that did not answer, until those that do agree.

        Args:
            deadline: Seconds in which the ranks agree, the same on all ranks. None: ranks have twice ``timeout_s`` to
                come, as for ``set_active_ranks``, and every further rank that falls silent costs as much at most.
            quorum: The fewest ranks to go on with; None: any number. With more than half of the ranks, two groups that
                do not hear each other never both go on. Give the same on all ranks.

        Returns:
            The ranks that go on, with this one. Any other rank has not answered.

        Raises:
            ValueError: deadline or quorum is out of range, or ranks have different objects on the workspace.
            QuorumLost: Fewer ranks than quorum answer.
            PeerTimeout: The deadline has passed.
            PeerLeft: A rank has left the call by an error of its own. Call it again.
        """
        self._native.require_open()
        return self._workspace.recover(deadline, quorum=quorum)

    def check(self, *, expert_to_rank: bool = False) -> None:
        """Waits for the device (emulated ranks: the current stream) and raises what has happened since the last check.

        Args:
            expert_to_rank: Also compares that table between the active ranks. The call is then collective: all of them
                make it, with none of their own rounds between the change of the table and the call. A rank whose
                peers do not make it raises PeerTimeout after ``timeout_s``.

        Raises:
            ValueError: ``expert_to_rank`` differs between ranks, on all of them; or it holds no rank of the group.
            PeerTimeout, CapacityExceeded, ProtocolMisuse: The fault that stands.
            InvalidExpertIds: ids outside [-1, num_experts) were dispatched; the count starts again from 0.
            ProtocolMisuse: Also where ``expert_to_rank`` gives this rank more experts than ``num_local_experts``, or
                where a source went by another table than this rank: rows may have been lost. ``expert_major`` counts
                the rows that have no expert here, by source. Dispatch looks at the round before it, of any object on
                the workspace, and at the first 1024 experts.
        """
        self._native.require_open()
        self._comm.synchronize(self._device)
        if expert_to_rank:
            self._compare_tables()  # before what this rank alone may raise: its peers wait for it
        self._workspace.raise_fault()
        count = int(self._native.invalid_ids.item())
        if count:
            self._native.invalid_ids.zero_()
            raise InvalidExpertIds(count, self._geometry.num_experts)
        self._rounds.grouper.raise_lost()
        self._workspace.raise_tables_apart()

    def _compare_tables(self) -> None:
        table = self._native.expert_to_rank
        active = [rank for rank, is_active in enumerate(self._workspace.active_ranks) if is_active]
        words = {"expert_to_rank": describe_table(table)}
        self._comm.compare("expert_to_rank", words, self._workspace.timeout_s, members=active, phase="check")
        check_expert_to_rank(table, self._geometry.num_experts, self.ep_size, self._device)

    def metrics_text(self) -> str:
        """Metrics of the object in Prometheus' text format 0.0.4: rounds, rows, bytes, time-outs.

        Nothing is counted in rounds but what they need themselves, so rows and bytes are those of the last round. Waits
        for the device: call it between rounds, and not while a CUDA graph is captured.
        """
        self._native.require_open()
        return metrics.text(self._workspace, self._geometry, self._native)

    def close(self) -> None:
        """Frees the object, and its workspace unless that is shared. Needs no peer. Idempotent.

        Raises:
            PeerTimeout, CapacityExceeded, ProtocolMisuse: A fault that no call has raised yet; the object is closed all
                the same. PeerTimeout also where no fault stands and the network has not delivered to a rank of another
                domain within ``timeout_s``; memory that it may still touch is kept, at least until then.
        """
        self._close(raise_unseen=True)

    def _close(self, raise_unseen: bool) -> None:
        if not self._native.is_open:
            return
        late: PeerTimeout | None = None
        try:
            self._comm.synchronize(self._device)
            if raise_unseen and self._comm.is_own and self._workspace._memory is not None:
                self._workspace.raise_fault(only_unseen=True)
        finally:
            try:
                late = self._native.destroy()
            finally:
                self._rounds.forget()
                if self._owns_workspace:
                    self._workspace.close()
        if raise_unseen and late is not None:
            raise late

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        self._close(raise_unseen=exception_type is None)

    def __repr__(self) -> str:
        geometry = self._geometry
        state = "" if self._native.is_open else ", closed"
        return (
            f"AllToAll(rank {self.ep_rank} of {self.ep_size} on {self._device}, {geometry.num_experts} experts, "
            f"top_k {geometry.top_k}, {geometry.max_tokens_per_rank} tokens per rank{state})"
        )

    def __str__(self) -> str:
        geometry = self._geometry
        kind = "own" if self._owns_workspace else f"shared, {self._workspace.num_bytes} bytes"
        across = f"\n{self._native.network_bytes:>14} bytes for other domains" if self._native.network_bytes else ""
        return (
            f"AllToAll: rank {self.ep_rank} of {self.ep_size} on {self._device}, {geometry.num_experts} experts, "
            f"top_k {geometry.top_k}, {geometry.max_tokens_per_rank} tokens a rank\n"
            f"{geometry.memory_map()}\n"
            f"{geometry.layout().total_bytes:>14} bytes a rank in all ({kind} workspace){across}"
        )
