"""``MoeAlltoAll`` with FlashInfer's constructor and methods, on putget's rounds.

Either import it instead of FlashInfer's,

    from putget.adapters.flashinfer import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank

or call ``install()`` once, which puts putget's in the place of FlashInfer's. FlashInfer itself need not be installed
for the former. ``putget.adapters.flashinfer_moe_ep`` registers putget with ``flashinfer.moe_ep``.

What differs from FlashInfer's class:

- ``runtime_max_tokens_per_rank`` is each rank's own: it may differ between ranks, as long as no rank sends more.
- Zero tokens are allowed. A rank that is missing is an error after a deadline.
- The first two dimensions of what ``dispatch`` returns are for flattening: row r of the flattened tensor came from rank
  r % ep_size. ``received`` has the rows by source rank. ``combine`` takes the same order.
- Where ``expert_id_payload_index`` is given, that payload is what tokens are routed by, and it returns with
  ``invalid_token_expert_id`` (-1 by default) in every slot without a token.
- A combine with ``use_low_precision`` is chosen when the object is made, because what travels back has its place in the
  workspace: ``use_low_precision_combine``, of the constructor, of the sizing functions and of ``install``.
- Statistics of the load balancer and rank masks do not come with it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from putget import AllToAll, Communicator, Payload, Received
from putget.adapters import placement
from putget.adapters.engines import replace_name, require_supported
from putget.adapters.rounds import Rounds
from putget.adapters.shared import (
    TIMEOUT_S,
    WARMUP_TIMEOUT_S,
    combine_dtype_of,
    communicator_of,
    engine_workspace_bytes,
    shared_workspace,
)

_NO_GROUP = object()


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
    use_low_precision_combine: bool | None = None,
) -> int:
    """Symmetric bytes of each rank.

    Args:
        ep_size: Ranks of the expert-parallel group.
        max_num_tokens: Most tokens that one rank sends in one round.
        total_dispatch_payload_size_per_token: Bytes of one token's payloads.
        combine_payload_size_per_token: Bytes of one row that comes back.
        eplb_stats_num_experts: Must be 0.
        backend: Must be "trtllm".
        use_low_precision_combine: As for ``MoeAlltoAll``.

    Raises:
        ValueError: An argument is not allowed.
    """
    require_supported(eplb_stats_num_experts=(eplb_stats_num_experts, 0), backend=(backend, "trtllm"))
    if combine_payload_size_per_token < 2 or combine_payload_size_per_token % 2:
        raise ValueError(
            f"combine_payload_size_per_token is {combine_payload_size_per_token}, expected the bytes of 16-bit values"
        )
    return engine_workspace_bytes(
        ep_size=ep_size,
        max_tokens_per_rank=max_num_tokens,
        dispatch_bytes=total_dispatch_payload_size_per_token,
        output=Payload((combine_payload_size_per_token // 2,), torch.bfloat16),
        combine_dtype=combine_dtype_of(MoeAlltoAll.low_precision(use_low_precision_combine)),
    )


class MoeAlltoAll:
    """Dispatch and combine with FlashInfer's arguments. Construction is collective over the group.

    Objects of equal workspace size and capacity share one workspace and are used one after the other.

    Args:
        mapping: Any object with ``moe_ep_size`` and ``moe_ep_rank``.
        max_num_tokens: Most tokens that one rank sends in one round.
        top_k: Experts of a token, 1 to 32.
        num_experts: Experts of all ranks together. As in FlashInfer the first ``num_experts % ep_size`` ranks have one
            more than the others.
        workspace_size_per_rank: Symmetric bytes; see ``moe_a2a_get_workspace_size_per_rank``. None: by hidden_size.
        hidden_size: Length of the row that experts return (bfloat16). None: what the first payload's rows stand for.
        mnnvl_config: Its ``comm_backend`` names the torch.distributed group; None: the world.
        eplb_stats_num_experts: Must be 0.
        enable_rank_mask: Must be False; ``all_to_all.set_active_ranks`` goes on without a rank.
        backend: Must be "trtllm".
        comm: The group as a ``putget.Communicator``, instead of mnnvl_config.
        use_low_precision_combine: Rows come back as E4M3 with one float32 scale for 128 values, half of the bytes; then
            every combine has ``use_low_precision``. None: the class attribute, which ``install`` sets.
        device: Where the rows live; by default the current CUDA device, or the CPU where there is none.
        timeout_s: Deadline of every wait, in seconds.
        warmup_timeout_s: Deadline of set-up and first rounds, in seconds.

    Raises:
        ValueError: An argument is wrong or not supported; the message names it.
        BackendUnavailable, PeerTimeout: As ``putget.Workspace``.
    """

    use_low_precision_combine: bool = False

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
        device: torch.device | str | None = None,
        timeout_s: float = TIMEOUT_S,
        warmup_timeout_s: float = WARMUP_TIMEOUT_S,
    ) -> None:
        require_supported(
            eplb_stats_num_experts=(eplb_stats_num_experts, 0),
            enable_rank_mask=(enable_rank_mask, False),
            backend=(backend, "trtllm"),
        )
        self.use_low_precision_combine = self.low_precision(use_low_precision_combine)
        if workspace_size_per_rank is None:
            if hidden_size is None:
                raise ValueError("workspace_size_per_rank and hidden_size are None, expected one of them")
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                mapping.moe_ep_size,
                top_k,
                max_num_tokens,
                hidden_size,
                use_low_precision_combine=self.use_low_precision_combine,
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
        self.ep_size = group.size
        self.ep_rank = group.rank
        self._received: Received | None = None
        self._rounds = Rounds(
            shared_workspace(
                group,
                workspace_size_per_rank,
                None if device is None else torch.device(device),
                share_by=max_num_tokens,
                timeout_s=timeout_s,
                warmup_timeout_s=warmup_timeout_s,
            ),
            num_experts=num_experts,
            top_k=top_k,
            max_tokens_per_rank=max_num_tokens,
            output=None if hidden_size is None else Payload((hidden_size,), torch.bfloat16),
            expert_to_rank=placement.linear(num_experts, group.size),
            combine_dtype=combine_dtype_of(self.use_low_precision_combine),
        )

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
        """Symmetric bytes of each rank for 16-bit rows and what is smaller.

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

    @classmethod
    def low_precision(cls, given: bool | None) -> bool:
        """An argument use_low_precision_combine, or what ``install`` was told."""
        return cls.use_low_precision_combine if given is None else given

    @property
    def eplb_gathered_stats(self) -> None:
        """None: no statistics travel with the rows."""

    @property
    def received(self) -> Received | None:
        """The rows of the last dispatch by source rank, until combine."""
        return self._received

    @property
    def all_to_all(self) -> AllToAll:
        """The ``putget.AllToAll`` of the last dispatch, e.g. for ``set_active_ranks``."""
        return self._rounds.all_to_all

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
            input_payloads: Contiguous tensors [num_tokens, *].
            runtime_max_tokens_per_rank: Slots of each source that this rank looks at, 1 to max_num_tokens.
            invalid_token_expert_id: What slots without a token get as expert ids; None is -1.
            expert_id_payload_index: Which payload holds the expert ids; it needs no bytes of its own.
            eplb_local_stats: Must be None.
            active_rank_mask: Must be None.

        Returns:
            One tensor [ep_size, runtime_max_tokens_per_rank, *] for each payload, contiguous, in the workspace; valid
            until combine. See the module's note on the first two dimensions.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: The last dispatch has not been combined.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        require_supported(eplb_local_stats=(eplb_local_stats, None), active_rank_mask=(active_rank_mask, None))
        rows_each = self._check_runtime_max(runtime_max_tokens_per_rank)
        payloads = list(input_payloads)
        ids_index = expert_id_payload_index
        if ids_index is None and invalid_token_expert_id is not None:
            raise ValueError("invalid_token_expert_id is given, expert_id_payload_index is None: expected an index")
        if ids_index is not None and not 0 <= ids_index < len(payloads):
            raise ValueError(f"expert_id_payload_index is {ids_index}, there are {len(payloads)} input_payloads")
        ids = token_selected_experts if ids_index is None else payloads[ids_index]
        for name, tensor in (("token_selected_experts", token_selected_experts), ("expert ids in input_payloads", ids)):
            self._check_ids(name, tensor)
        weights_index = next((i for i, rows in enumerate(payloads) if self._are_weights(rows)), None)
        carried = [i for i in range(len(payloads)) if i not in (ids_index, weights_index)]
        if not carried and weights_index is not None:
            carried, weights_index = [weights_index], None
        received = self._rounds.dispatch(
            ids,
            None if weights_index is None else payloads[weights_index],
            [payloads[i] for i in carried],
            names=[f"input_payloads[{i}]" for i in carried],
            max_rows=rows_each,
        )
        self._received = received
        flat = dict(zip(carried, received.flat.payloads, strict=True))
        if weights_index is not None:
            flat[weights_index] = received.flat.topk_weights
        if ids_index is not None:
            flat[ids_index] = with_invalid_id(received.flat.topk_ids, invalid_token_expert_id)
        return [flat[i].view(self.ep_size, rows_each, *flat[i].shape[1:]) for i in range(len(payloads))]

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[ep_size, runtime_max_tokens_per_rank, hidden_size] in the workspace: experts may write here, without a copy.

        Raises:
            ValueError: The sizes are not those of the last dispatch and of this object's rows.
            ProtocolMisuse: No dispatch came before.
        """
        rows = self._rounds.combine_input(runtime_max_tokens_per_rank, Payload((hidden_size,), dtype))
        return rows.view(self.ep_size, runtime_max_tokens_per_rank, hidden_size)

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
                weighted sum over this rank's experts.
            runtime_max_tokens_per_rank: That of the dispatch.
            payload_in_workspace: Whether payload is the tensor of ``get_combine_payload_tensor_in_workspace``.
            output_dtype: None or the dtype of payload.
            output_scales: Must be None.
            output_scalar_scale: Must be 1.0.
            sf_layout: Means nothing without output_scales.
            output: Where to write, contiguous [num_tokens, hidden_size].
            use_low_precision: Whether this object was made with use_low_precision_combine.
            active_rank_mask: Must be None.

        Returns:
            [num_tokens, hidden_size].

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: No dispatch came before.
            PeerTimeout: As ``AllToAll.combine``.
        """
        require_supported(
            output_scales=(output_scales, None),
            output_scalar_scale=(output_scalar_scale, 1.0),
            active_rank_mask=(active_rank_mask, None),
        )
        if use_low_precision != self.use_low_precision_combine:
            raise ValueError(
                f"use_low_precision is {use_low_precision}, this object was made with use_low_precision_combine="
                f"{self.use_low_precision_combine}: it is chosen in the constructor, or with install"
            )
        place = self._rounds.combine_input(self._check_runtime_max(runtime_max_tokens_per_rank))
        if output_dtype not in (None, place.dtype):
            raise ValueError(f"output_dtype is {output_dtype}, supported is {place.dtype}")
        if payload_in_workspace and isinstance(payload, torch.Tensor) and payload.data_ptr() != place.data_ptr():
            raise ValueError(
                "payload_in_workspace is True, payload is not the tensor of get_combine_payload_tensor_in_workspace"
            )
        combined = self._rounds.combine(payload, name="payload", out=output)
        self._received = None
        return combined

    def release(self) -> None:
        """Gives up a round that was dispatched and will not be combined, on all ranks alike."""
        self._rounds.release()

    def _check_runtime_max(self, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= self.max_num_tokens:
            raise ValueError(
                f"runtime_max_tokens_per_rank is {value!r}, allowed are ints from 1 to {self.max_num_tokens}"
            )
        return value

    def _check_ids(self, name: str, ids: Any) -> None:
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.int32:
            came = f"{list(ids.shape)} {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ValueError(f"{name}: {came} came, expected an int32 tensor [num_tokens, {self.top_k}]")

    def _are_weights(self, rows: Any) -> bool:
        """Whether these rows fit where router weights travel."""
        return isinstance(rows, torch.Tensor) and rows.dtype == torch.float32 and tuple(rows.shape[1:]) == (self.top_k,)


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
    if group is None and dist.is_available() and dist.is_initialized():
        world = dist.get_world_size()
        if world != mapping.moe_ep_size:
            raise ValueError(
                f"mapping.moe_ep_size is {mapping.moe_ep_size}, the world has {world} ranks: name the group of the "
                "expert-parallel ranks with mnnvl_config or comm"
            )
    return communicator_of(group)


def install(*, use_low_precision_combine: bool = False) -> None:
    """Puts putget's ``MoeAlltoAll`` and its sizing function where FlashInfer's are.

    It may be called before or after the engine's modules are imported: names that were imported are replaced too.

    Args:
        use_low_precision_combine: For engines that combine with ``use_low_precision``.

    Raises:
        BackendUnavailable: This FlashInfer has no such names, or arguments that putget does not know.
    """
    MoeAlltoAll.use_low_precision_combine = use_low_precision_combine
    replacements: Sequence[tuple[str, Any]] = (
        ("MoeAlltoAll", MoeAlltoAll),
        ("moe_a2a_get_workspace_size_per_rank", moe_a2a_get_workspace_size_per_rank),
    )
    for name, replacement in replacements:
        make = functools.partial(_instead, replacement)
        replace_name("flashinfer.comm.trtllm_moe_alltoall", name, make, engine="FlashInfer")


def _instead(replacement: Any, _original: Any) -> Any:
    return replacement
