"""``MoeAlltoAll`` with FlashInfer's constructor and methods, on putget's rounds.

Differences from FlashInfer's class:

- ``runtime_max_tokens_per_rank`` is each rank's own: it may differ between ranks, as long as no rank sends more.
- Zero tokens are allowed. A rank that is missing is an error after a deadline.
- What dispatch returns is indexed by source rank, and so is what combine takes. That costs a copy of the rows that
  arrive. Callers that only flatten the first two dimensions, as engines do, can do without (``by_source=False``): then
  row r of the flattened tensor came from rank r % ep_size.
- The first combine says which rows come back, and whether as FP8, unless ``hidden_size`` and
  ``use_low_precision_combine`` have said so: where it is not what the payloads stand for, it takes a round more.
- ``workspace`` and ``metainfo`` show this rank's tables; rows of other ranks are not behind them.
- ``active_rank_mask`` is agreed between the ranks that it names when it changes, which is collective among them. The
  first dispatch of rows of a kind needs all ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from putget import AllToAll, Communicator, Payload, Received
from putget.adapters import placement
from putget.adapters.engines import replace_name, require_supported
from putget.adapters.flashinfer import functions, layout
from putget.adapters.flashinfer.layout import moe_a2a_get_workspace_size_per_rank
from putget.adapters.flashinfer.rounds import RankRounds
from putget.adapters.rounds import Rounds, check_stats
from putget.adapters.shared import TIMEOUT_S, WARMUP_TIMEOUT_S, combine_dtype_of, communicator_of, shared_workspace

_NO_GROUP = object()


class MoeAlltoAll:
    """Dispatch and combine with FlashInfer's arguments. Construction is collective over the group.

    Objects of equal workspace size and capacity share one workspace and are used one after the other.

    Args:
        mapping: Any object with ``moe_ep_size`` and ``moe_ep_rank``.
        max_num_tokens: Most tokens that one rank sends in one round.
        top_k: Experts of a token, 1 to 32.
        num_experts: Experts of all ranks together. As in FlashInfer the first ``num_experts % ep_size`` ranks have one
            more than the others.
        workspace_size_per_rank: Bytes; see ``moe_a2a_get_workspace_size_per_rank``. None: by hidden_size.
        hidden_size: Length of the row that experts return (bfloat16). None: what the payloads' rows stand for, and
            after the first combine its row.
        mnnvl_config: Its ``comm_backend`` names the torch.distributed group; None: the world.
        eplb_stats_num_experts: How many numbers ``eplb_local_stats`` has; 0: there are none.
        enable_rank_mask: Whether dispatch and combine are given an active_rank_mask, always or never.
        backend: Must be "trtllm".
        comm: The group as a ``putget.Communicator``, instead of mnnvl_config.
        use_low_precision_combine: What ``use_low_precision`` of combine will be: rows come back as E4M3 with one
            float32 scale for 128 values, half of the bytes. None: the class attribute, which ``install`` sets.
        by_source: Whether rows are indexed by source rank, which costs a copy; False: they lie where they arrive, for
            callers that flatten the first two dimensions. None: the class attribute, which ``install`` sets.
        ids_are_routes: Whether the payload of ``expert_id_payload_index`` is always token_selected_experts itself, the
            same tensor on all ranks. Then ids do not travel twice, and slots without a token cost no kernel. None: the
            class attribute, which ``install`` sets.
        device: Where the rows live; by default the current CUDA device, or the CPU where there is none.
        timeout_s: Deadline of every wait, in seconds.
        warmup_timeout_s: Deadline of set-up and first rounds, in seconds.

    Raises:
        ValueError: An argument is wrong or not supported; the message names it.
        BackendUnavailable, PeerTimeout: As ``putget.Workspace``.
    """

    use_low_precision_combine: bool = False
    by_source: bool = True
    ids_are_routes: bool = False
    _METAINFO_INDEX = layout.METAINFO_INDEX

    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
        comm: Communicator | None = None,
        use_low_precision_combine: bool | None = None,
        by_source: bool | None = None,
        ids_are_routes: bool | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = TIMEOUT_S,
        warmup_timeout_s: float = WARMUP_TIMEOUT_S,
    ) -> None:
        require_supported(backend=(backend, "trtllm"))
        if use_low_precision_combine is not None:
            self.use_low_precision_combine = use_low_precision_combine
        if by_source is not None:
            self.by_source = by_source
        if ids_are_routes is not None:
            self.ids_are_routes = ids_are_routes
        if workspace_size_per_rank is None:
            if hidden_size is None:
                raise ValueError("workspace_size_per_rank and hidden_size are None, expected one of them")
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                mapping.moe_ep_size,
                top_k,
                max_num_tokens,
                hidden_size,
                eplb_stats_num_experts=eplb_stats_num_experts,
            )
        group = communicator_for(mapping, mnnvl_config) if comm is None else comm
        for name, given, found in (
            ("moe_ep_size", mapping.moe_ep_size, group.size),
            ("moe_ep_rank", mapping.moe_ep_rank, group.rank),
        ):
            if given != found:
                raise ValueError(f"mapping.{name} is {given}, the group has {found}")
        self.workspace_size_per_rank = workspace_size_per_rank
        self.max_num_tokens = max_num_tokens
        self.top_k = top_k
        self.num_experts = num_experts
        self.enable_rank_mask = enable_rank_mask
        self.ep_size = group.size
        self.ep_rank = group.rank
        self.metainfo = torch.tensor(
            layout.table_offsets(group.size, max_num_tokens, eplb_stats_num_experts),
            dtype=torch.int64,
            device="cpu",
        )
        self._hidden_size = hidden_size
        self._shared = shared_workspace(
            group,
            layout.symmetric_bytes(workspace_size_per_rank, group.size, max_num_tokens, eplb_stats_num_experts),
            device,
            share_by=max_num_tokens,
            timeout_s=timeout_s,
            warmup_timeout_s=warmup_timeout_s,
            arguments={
                "max_num_tokens": max_num_tokens,
                "eplb_stats_num_experts": eplb_stats_num_experts,
                "workspace_size_per_rank (where it is None, by hidden_size and top_k)": workspace_size_per_rank,
            },
        )
        self._rounds = Rounds(
            self._shared,
            num_experts=num_experts,
            top_k=top_k,
            max_tokens_per_rank=max_num_tokens,
            output=None if hidden_size is None else Payload((hidden_size,), torch.bfloat16),
            expert_to_rank=placement.linear(num_experts, group.size),
            combine_dtype=combine_dtype_of(self.use_low_precision_combine),
            num_stats=eplb_stats_num_experts,
        )
        self._part = self._shared.local_rows(workspace_size_per_rank) if self.by_source else None
        self._asked: object = None  # for which combine payload in the part
        self._place = torch.empty(0)  # that one
        self._rank = RankRounds(self._rounds, self._part, workspace_size_per_rank, ids_are_routes=self.ids_are_routes)

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
        use_low_precision_combine: bool | None = None,
    ) -> int:
        """Bytes of a rank's part for 16-bit rows and what is smaller.

        Raises:
            ValueError: An argument is not allowed.
        """
        return moe_a2a_get_workspace_size_per_rank(
            ep_size,
            max_num_tokens,
            2 * hidden_size + 8 * top_k + extra_payload_bytes_per_token,
            2 * hidden_size,
            eplb_stats_num_experts,
            backend=backend,
            use_low_precision_combine=use_low_precision_combine,
        )

    @property
    def eplb_gathered_stats(self) -> torch.Tensor | None:
        """[ep_size, eplb_stats_num_experts] int32: what each rank gave the last dispatch as ``eplb_local_stats``.

        A view into the workspace, valid until combine. None if this rank gave none.
        """
        return self._rank.stats

    @property
    def received(self) -> Received | None:
        """The rows of the last dispatch by source rank, until combine."""
        return self._rank.received

    @property
    def all_to_all(self) -> AllToAll:
        """The ``putget.AllToAll`` of the last dispatch."""
        return self._rounds.all_to_all

    @property
    def workspace(self) -> torch.Tensor:
        """[ep_size, bytes] uint8, every row this rank's part: the tables of the last dispatch, at ``metainfo``.

        They are written when this is asked for. ``MoeAlltoAll._METAINFO_INDEX`` says which offset is which:
        SEND_COUNTERS and RECV_COUNTERS [ep_size] int32, TOPK_TARGET_RANKS and TOPK_SEND_INDICES [num_tokens, top_k]
        int32, -1 for a second expert on the same rank.
        """
        part = self._rank.tables()
        return part.expand(self.ep_size, part.numel())

    def checkpoint_prepare(self) -> None:
        """Gives up the symmetric memory of all ranks, for a checkpoint of the processes. Collective; repeated, nothing.

        Every layer that shares the memory is without it from then on. Graphs that were captured are not valid any more.

        Raises:
            ProtocolMisuse: A dispatch has not been combined.
            PeerTimeout: A rank did not come.
        """
        self._shared.suspend()

    def checkpoint_restore(self, comm_backend: Any = None) -> None:
        """Makes the memory again, after ``checkpoint_prepare``. Collective; repeated, nothing.

        Args:
            comm_backend: Over a torch.distributed group of the same ranks, or a ``putget.Communicator``; None: the
                connections have outlived the checkpoint.

        Raises:
            ValueError: It is of another rank or size.
            PeerTimeout: A rank did not come.
        """
        if self._shared.is_suspended:
            config = SimpleNamespace(comm_backend=comm_backend)
            given = isinstance(comm_backend, Communicator) or comm_backend is None
            mapping = SimpleNamespace(moe_ep_size=self.ep_size)
            self._shared.resume(comm_backend if given else communicator_for(mapping, config))
        else:
            self._shared.renew()

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Puts each token's rows into the ranks of its experts, once per (token, rank).

        Args:
            token_selected_experts: [num_tokens, top_k] int32; -1 is "no expert".
            input_payloads: Contiguous tensors [num_tokens, *], 1 to 8, of any dtype and length.
            runtime_max_tokens_per_rank: Slots of each source that this rank looks at, 1 to max_num_tokens.
            invalid_token_expert_id: What slots without a token get as expert ids; None is -1.
            expert_id_payload_index: Which payload holds the expert ids.
            eplb_local_stats: [eplb_stats_num_experts] int32 that every rank gets (``eplb_gathered_stats``), or None.
            active_rank_mask: Of ``moe_a2a_active_rank_mask``, where enable_rank_mask is True. Tokens of experts on
                other ranks go nowhere. The first dispatch of rows of a kind needs all ranks.

        Returns:
            One contiguous tensor [ep_size, runtime_max_tokens_per_rank, *] for each payload, valid until the next
            dispatch; see ``by_source`` for the first dimension. Slots without a token are zeros, but for expert ids.
            Without ``by_source``, views into the workspace, valid until combine, whose empty slots are undefined.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: The last dispatch has not been combined.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        check_stats(eplb_local_stats, self._rounds.num_stats, "eplb_stats_num_experts")
        rows_each = self._check_runtime_max(runtime_max_tokens_per_rank)
        payloads = list(input_payloads)
        ids_index = expert_id_payload_index
        if ids_index is None and invalid_token_expert_id is not None:
            raise ValueError("invalid_token_expert_id is given, expert_id_payload_index is None: expected an index")
        if ids_index is not None and not 0 <= ids_index < len(payloads):
            raise ValueError(f"expert_id_payload_index is {ids_index}, there are {len(payloads)} input_payloads")
        if active_rank_mask is not None or self.enable_rank_mask:
            active = self._active(active_rank_mask)
            self._rounds.require_closed()
            if not self._shared.goes_on_with(active):
                self._rank.require_made(token_selected_experts, payloads, active, ids_index=ids_index)
            self._shared.set_active_ranks(active)
        invalid = -1 if invalid_token_expert_id is None else invalid_token_expert_id
        return self._rank.dispatch(
            token_selected_experts, payloads, rows_each, invalid=invalid, ids_index=ids_index, stats=eplb_local_stats
        )

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[ep_size, runtime_max_tokens_per_rank, hidden_size] for what experts return; without ``by_source``, no copy.

        Raises:
            ValueError: The sizes are not those of the last dispatch, or the rows do not fit.
            ProtocolMisuse: No dispatch came before.
        """
        if self._part is None:
            rows = self._rounds.combine_input(runtime_max_tokens_per_rank, Payload((hidden_size,), dtype))
            return rows.view(self.ep_size, runtime_max_tokens_per_rank, hidden_size)
        self._rounds.require_open("the combine input")
        begin = self._rank.combine_offset
        asked = (runtime_max_tokens_per_rank, hidden_size, dtype, begin)
        if asked == self._asked:
            return self._place
        self._check_runtime_max(runtime_max_tokens_per_rank)
        end = begin + self.ep_size * runtime_max_tokens_per_rank * hidden_size * dtype.itemsize
        shape = [self.ep_size, runtime_max_tokens_per_rank]
        place = layout.moe_a2a_wrap_payload_tensor_in_workspace(self._part, shape, begin, end, dtype)
        self._asked, self._place = asked, place
        return place

    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: torch.Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: Any = None,
        output: torch.Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gets each token's rows back and sums them.

        Args:
            payload: [ep_size, runtime_max_tokens_per_rank, hidden_size], in the order of what dispatch returned: the
                weighted sum over this rank's experts. bfloat16, float16 or float32.
            runtime_max_tokens_per_rank: That of the dispatch.
            payload_in_workspace: Whether payload is the tensor of ``get_combine_payload_tensor_in_workspace``.
            output_dtype: None or the dtype of payload.
            output_scales: Must be None.
            output_scalar_scale: Must be 1.0.
            sf_layout: Means nothing without output_scales.
            output: Where to write, contiguous [num_tokens, hidden_size].
            use_low_precision: Whether rows travel as FP8, the same on all ranks.
            active_rank_mask: That of the dispatch.

        Returns:
            [num_tokens, hidden_size].

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: No dispatch came before.
            PeerTimeout: As ``AllToAll.combine``.
        """
        require_supported(output_scales=(output_scales, None), output_scalar_scale=(output_scalar_scale, 1.0))
        self._rounds.require_open("combine")
        rows_each = self._check_runtime_max(runtime_max_tokens_per_rank)
        is_masked = active_rank_mask is not None or self.enable_rank_mask
        if is_masked and self._active(active_rank_mask) != self._shared.active_ranks:
            raise ValueError("active_rank_mask is another one than that of the dispatch")
        if isinstance(payload, torch.Tensor):
            self._check_kind(payload, output_dtype)
            if payload_in_workspace and payload.data_ptr() != self._place_of_payload():
                raise ValueError(
                    "payload_in_workspace is True, payload is not the tensor of get_combine_payload_tensor_in_workspace"
                )
        return self._rank.combine(payload, rows_each, low_precision=use_low_precision, out=output)

    def release(self) -> None:
        """Gives up a round that was dispatched and will not be combined, on all ranks alike."""
        self._rounds.release()

    def _check_kind(self, payload: torch.Tensor, output_dtype: torch.dtype | None) -> None:
        if output_dtype not in (None, payload.dtype):
            raise ValueError(f"output_dtype is {output_dtype}, supported is {payload.dtype}")
        if self._hidden_size not in (None, payload.shape[-1]):
            raise ValueError(f"payload has rows of {payload.shape[-1]}, hidden_size is {self._hidden_size}")

    def _place_of_payload(self) -> int:
        if self._part is None:
            return self._rounds.combine_input().data_ptr()
        return self._part.data_ptr() + self._rank.combine_offset

    def _active(self, mask: Any) -> tuple[bool, ...]:
        before = self._shared.active_ranks
        return layout.active_ranks_of(mask, self.enable_rank_mask, self.ep_rank, self.ep_size, before)

    def _check_runtime_max(self, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= self.max_num_tokens:
            raise ValueError(
                f"runtime_max_tokens_per_rank is {value!r}, allowed are ints from 1 to {self.max_num_tokens}"
            )
        return value


def with_invalid_id(topk_ids: torch.Tensor, invalid: int | None) -> torch.Tensor:
    """The received ids with another id for "no expert" than -1: a new tensor, as putget needs its own."""
    return topk_ids if invalid in (None, -1) else torch.where(topk_ids < 0, invalid, topk_ids)


def communicator_for(mapping: Any, mnnvl_config: Any) -> Communicator:
    """The communicator of the group that FlashInfer would exchange its handles over.

    Raises:
        ValueError: It is no torch.distributed group.
    """
    backend = getattr(mnnvl_config, "comm_backend", None)
    group = None if backend is None else getattr(backend, "_group", _NO_GROUP)
    if group is _NO_GROUP:
        raise ValueError(
            f"mnnvl_config.comm_backend is a {type(backend).__name__}, supported are backends over a torch.distributed "
            "group (TorchDistBackend); or pass comm"
        )
    in_world = dist.is_available() and dist.is_initialized()
    if group is None and not in_world and mapping.moe_ep_size == 1:
        return _alone()
    if group is None and in_world:
        world = dist.get_world_size()
        if world != mapping.moe_ep_size:
            raise ValueError(
                f"mapping.moe_ep_size is {mapping.moe_ep_size}, the world has {world} ranks: name the group of the "
                "expert-parallel ranks with mnnvl_config or comm"
            )
    return communicator_of(group)


@functools.cache
def _alone() -> Communicator:
    """A group of one rank, for processes without torch.distributed."""
    return Communicator.local(1)[0]


os.register_at_fork(after_in_child=_alone.cache_clear)


def install(*, use_low_precision_combine: bool = False, by_source: bool = True, ids_are_routes: bool = False) -> None:
    """Puts putget's ``MoeAlltoAll``, its sizing function and the functions ``moe_a2a_*`` where FlashInfer's are.

    It may be called before or after the engine's modules are imported: names that were imported are replaced too.

    Args:
        use_low_precision_combine: For engines that combine with ``use_low_precision``.
        by_source: False: for engines that only flatten what dispatch returns; it saves a copy (``MoeAlltoAll``).
        ids_are_routes: For engines whose payload of expert ids is token_selected_experts itself (``MoeAlltoAll``).

    Raises:
        BackendUnavailable: This FlashInfer has no such names, or arguments that putget does not know.
    """
    MoeAlltoAll.use_low_precision_combine = use_low_precision_combine
    MoeAlltoAll.by_source = by_source
    MoeAlltoAll.ids_are_routes = ids_are_routes
    replacements: Sequence[tuple[str, Any]] = (
        ("MoeAlltoAll", MoeAlltoAll),
        ("moe_a2a_get_workspace_size_per_rank", moe_a2a_get_workspace_size_per_rank),
        ("moe_a2a_initialize", functions.moe_a2a_initialize),
        ("moe_a2a_dispatch", functions.moe_a2a_dispatch),
        ("moe_a2a_combine", functions.moe_a2a_combine),
        ("moe_a2a_sanitize_expert_ids", functions.moe_a2a_sanitize_expert_ids),
        ("moe_a2a_wrap_payload_tensor_in_workspace", functions.moe_a2a_wrap_payload_tensor_in_workspace),
    )
    for name, replacement in replacements:
        make = functools.partial(_instead, replacement)
        replace_name("flashinfer.comm.trtllm_moe_alltoall", name, make, engine="FlashInfer")


def _instead(replacement: Any, _original: Any) -> Any:
    return replacement
