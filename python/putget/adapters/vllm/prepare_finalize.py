"""A modular prepare-and-finalize for vLLM's fused experts. ``putget.adapters.vllm`` gives it vLLM's base class."""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from putget import Payload, Received, config
from putget.adapters import placement
from putget.adapters.engines import announce, announce_launch, announce_overlap
from putget.adapters.proof import prove
from putget.adapters.rounds import Rounds
from putget.adapters.shared import combine_dtype_of, communicator_of, engine_workspace_bytes, shared_workspace

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_UBATCHING = "vllm.v1.worker.ubatching"

# Rows, scales, nothing about experts, ids, weights.
Prepared = tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor, torch.Tensor]


class _Quantised(enum.Enum):
    """Where rows are quantised."""

    NEVER = enum.auto()
    BEFORE = enum.auto()
    ON_ARRIVAL = enum.auto()


class PrepareFinalizeRounds:
    """vLLM's prepare (quantise, dispatch) and finalize (combine) on putget.

    - Activations are in the standard format: [ep_size * max_rows, hidden], with global expert ids and weights for each
      row; slots without a token have ids -1.
    - Rows are quantised by vLLM before dispatch in every recipe with scales for each token (NVFP4, MXFP8, block-scaled
      and per-token FP8 or int8). In other recipes, among them those with one scale for all tokens, they travel as they
      are and are quantised on the rank of their experts, as by vLLM on DeepEP. Experts may also want them as they are.
    - Experts that weight and reduce write into the workspace; for others their reduction runs before combine.
    - Every rank may have its own number of tokens, zero included.
    - With more than one batch (vLLM's dual-batch overlap) the halves are there too, and each batch has rounds and a
      workspace of its own; vLLM says in which one it is.

    Args:
        max_num_tokens: Most tokens that one rank sends in one forward.
        top_k: Experts of a token.
        num_experts: Physical experts of all ranks together.
        hidden_size: Length of a row.
        dispatch_format: Not needed: the kinds of rows are known at the first dispatch.
        extra_payload_bytes_per_token: Not needed.
        num_dispatchers: Ranks of the expert-parallel group.
        num_batches: Batches of a forward whose rounds overlap; 1: none do.
        dtype: The model's element type: that of the rows before quantisation, and of what experts write.
            None: as vLLM's configuration says.

    Raises:
        ValueError: An argument is wrong, here or on another rank.
        BackendUnavailable, PeerTimeout: As ``putget.Workspace``.
    """

    engine_module: ClassVar[Any] = None  # vLLM's modular_kernel
    low_precision_combine: ClassVar[bool] = False  # rows come back as E4M3 with one float32 scale for 128 values

    def __init__(
        self,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        hidden_size: int,
        dispatch_format: Any = None,
        extra_payload_bytes_per_token: int = 0,
        num_dispatchers: int = 1,
        num_batches: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = importlib.import_module("vllm.distributed").get_ep_group()
        comm = communicator_of(group.cpu_group)
        if num_dispatchers != comm.size:
            raise ValueError(f"num_dispatchers is {num_dispatchers}, the expert-parallel group has {comm.size} ranks")
        if dtype is None:
            dtype = importlib.import_module("vllm.config").get_current_vllm_config().model_config.dtype
        row = Payload((hidden_size,), dtype)
        combine_dtype = combine_dtype_of(self.low_precision_combine)
        num_bytes = engine_workspace_bytes(
            ep_size=comm.size,
            max_tokens_per_rank=max_num_tokens,
            dispatch_bytes=row.row_bytes,
            output=row,
            combine_dtype=combine_dtype,
        )
        self.max_num_tokens, self._dtype = max_num_tokens, row.dtype
        self._batches = [
            Rounds(
                shared_workspace(
                    comm,
                    num_bytes,
                    share_by=("vllm", batch),
                    timeout_s=config.engine_timeout_s(),
                    arguments={
                        "max_num_batched_tokens": max_num_tokens,
                        "hidden_size": hidden_size,
                        "dtype": row.dtype,
                    },
                ),
                num_experts=num_experts,
                top_k=top_k,
                max_tokens_per_rank=max_num_tokens,
                output=None,
                expert_to_rank=None,
                combine_dtype=combine_dtype,
            )
            for batch in range(num_batches)
        ]
        announce("vllm", comm, num_experts=num_experts, device=self._batches[0].shared.device)

    # --- what vLLM asks for -------------------------------------------------------------------------------------------

    @property
    def activation_format(self) -> Any:
        """The standard format: one row for each (token, rank)."""
        return self.engine_module.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """int32."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> None:
        """None: rows are not batched by expert."""

    def num_dispatchers(self) -> int:
        """Ranks of the expert-parallel group."""
        return self._batches[0].shared.comm.size

    def output_is_reduced(self) -> bool:
        """True: finalize gives the sum over all ranks."""
        return True

    def supports_async(self) -> bool:
        """Whether vLLM is to call the halves: where batches overlap. Elsewhere one kernel a call is faster."""
        return len(self._batches) > 1

    def allocate_fused_expert_output(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, weight_and_reduce_impl: Any
    ) -> torch.Tensor | None:
        """The workspace, where the experts give one weighted and reduced row for each row; None otherwise."""
        if not isinstance(weight_and_reduce_impl, self._reductions.TopKWeightAndReduceNoOP):
            return None
        rows = self._rounds.combine_input()
        return rows if tuple(rows.shape) == tuple(shape) and rows.dtype == dtype else None

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Prepared:
        """Quantises and puts each token's rows into the ranks of its experts.

        Args:
            a1: [num_tokens, hidden_size].
            topk_weights: [num_tokens, top_k] float32.
            topk_ids: [num_tokens, top_k] int32 or int64 global ids; -1 is "no expert".
            num_experts: As the constructor's.
            expert_map: vLLM's map of this rank's experts, read at the first call: it says who owns which. Ids stay
                global.
            apply_router_weight_on_input: Multiplies the rows before they are sent; for top_k 1.
            quant_config: vLLM's quantisation of the layer.
            defer_input_quant: Sends a1 as it is.

        Returns:
            Rows, their scales or None, None, global ids, weights: views into the workspace, valid until finalize.

        Raises:
            ValueError: An argument is wrong or not supported; nothing has happened on any rank.
            ProtocolMisuse: The last prepare has not been finalized.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        rounds = self._rounds
        arguments, quantised = self._to_send(
            rounds,
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        received = rounds.dispatch(**arguments)
        announce_launch("vllm", rounds.all_to_all, a1.shape[0])
        return _arrived(received, quantised, quant_config)

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], Prepared]]:
        """The half of ``prepare`` that puts and waits for nobody; arguments and errors as there.

        Returns:
            A hook that waits for the rows of all ranks, which any thread may call, and what gives the result of
            ``prepare`` after it.
        """
        rounds = self._rounds
        arguments, quantised = self._to_send(
            rounds,
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        rounds.dispatch_start(**arguments)
        announce_launch("vllm", rounds.all_to_all, a1.shape[0])
        announce_overlap("vllm")
        received: list[Received] = []
        hook = rounds.later(lambda: received.append(rounds.dispatch_finish()), keep=arguments)

        def receiver() -> Prepared:
            hook()
            return _arrived(received.pop(), quantised, quant_config)

        return hook, receiver

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Gets each token's rows back and sums them into output.

        Args:
            output: [num_tokens, hidden_size], written in place.
            fused_expert_output: What the experts gave for the rows of prepare: [rows, hidden_size], or
                [rows, top_k, hidden_size] where weight_and_reduce_impl has still to reduce it.
            topk_weights: The weights that prepare returned.
            topk_ids: The ids that prepare returned.
            apply_router_weight_on_input: As for prepare.
            weight_and_reduce_impl: vLLM's reduction.

        Raises:
            ValueError: Rows of another shape, dtype or layout; nothing has happened on any rank.
            ProtocolMisuse: No prepare came before.
            PeerTimeout: As ``AllToAll.combine``.
        """
        rows = self._reduced(
            fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )
        self._rounds.combine(rows, name="fused_expert_output", out=output)

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """The half of ``finalize`` that gives this rank's rows; arguments and errors as there.

        Returns:
            A hook that waits for the rows of all ranks and writes output, which any thread may call, and what ensures
            that it has been called.
        """
        rounds = self._rounds
        rows = self._reduced(
            fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )
        rounds.combine_start(rows, name="fused_expert_output")

        def finish() -> None:
            rounds.combine_finish(out=output)

        hook = rounds.later(finish, keep=(rows, output))
        return hook, hook

    # --- inside -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _reductions(self) -> Any:
        """vLLM's module of reductions, found once: asking the importer takes longer than a check."""
        return importlib.import_module(f"{_FUSED_MOE}.topk_weight_and_reduce")

    @functools.cached_property
    def _forward_context(self) -> Any:
        """vLLM's module of what a forward is told, likewise."""
        return importlib.import_module("vllm.forward_context")

    @property
    def _rounds(self) -> Rounds:
        """The rounds of the batch that vLLM is in."""
        if len(self._batches) == 1:
            return self._batches[0]
        batch: int = importlib.import_module(_UBATCHING).dbo_current_ubatch_id()
        if batch >= len(self._batches):
            raise ValueError(f"vLLM is in batch {batch} of a forward, this object is for {len(self._batches)}")
        return self._batches[batch]

    def _to_send(
        self,
        rounds: Rounds,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> tuple[dict[str, Any], _Quantised]:
        """The arguments of a dispatch, and where its rows are quantised."""
        if num_experts != self._batches[0].num_experts:
            raise ValueError(f"num_experts is {num_experts}, this object is for {self._batches[0].num_experts}")
        self._learn_placement(expert_map, a1.shape[1])
        rounds.require_closed()
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise ValueError(f"apply_router_weight_on_input with top_k {topk_ids.shape[1]}, supported is top_k 1")
            a1 = a1 * topk_weights.to(a1.dtype)
        quantised = _Quantised.NEVER
        if not defer_input_quant and quant_config.quant_dtype is not None:
            quantised = _Quantised.BEFORE if _has_scales_for_each_token(quant_config) else _Quantised.ON_ARRIVAL
        payloads, names = [a1.contiguous()], ["a1"]
        if quantised is _Quantised.BEFORE:
            payloads, names = self._quantised(a1, quant_config), ["a1", "the scales of a1"]
        arguments = {
            "topk_ids": topk_ids.contiguous(),
            "topk_weights": topk_weights.float().contiguous(),
            "payloads": payloads,
            "names": names,
            "max_rows": self._max_rows(a1.shape[0]),
        }
        return arguments, quantised

    def _reduced(
        self,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> torch.Tensor:
        """One row for each row of prepare."""
        self._rounds.require_open("finalize")
        kinds = self._reductions
        if isinstance(weight_and_reduce_impl, kinds.TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = kinds.TopKWeightAndReduceContiguous()
        rows: torch.Tensor = weight_and_reduce_impl.apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        return rows

    def _learn_placement(self, expert_map: torch.Tensor | None, hidden_size: int) -> None:
        """Which rank owns which expert, from the first expert map that comes; reading it waits for the device."""
        first = self._batches[0]
        if first.expert_to_rank is not None:
            return
        comm = first.shared.comm
        if expert_map is None and comm.size > 1:
            raise ValueError(
                f"expert_map is None with {comm.size} expert-parallel ranks: which rank owns which expert is not known"
            )
        if expert_map is not None and tuple(expert_map.shape) != (first.num_experts,):
            raise ValueError(f"expert_map has shape {list(expert_map.shape)}, expected {[first.num_experts]}")
        table = (
            placement.linear(first.num_experts, 1)
            if expert_map is None
            else placement.of_expert_map(expert_map, comm.rank, comm.size)
        )
        for rounds in self._batches:
            rounds.expert_to_rank = table
            if expert_map is not None:
                here = torch.nonzero(expert_map >= 0).flatten().tolist()
                prove("vLLM", rounds, (hidden_size,), self._dtype, here)

    def _max_rows(self, num_tokens: int) -> int:
        """The most tokens that any rank sends now, as far as vLLM knows."""
        metadata = self._forward_context.get_forward_context().dp_metadata
        most = num_tokens if metadata is None else max(metadata.get_chunk_sizes_across_dp_rank())
        return max(most, 1)

    def _quantised(self, a1: torch.Tensor, quant_config: Any) -> list[torch.Tensor]:
        rows, scales = _quantise()(
            a1,
            quant_config.a1_gscale,
            quant_config.quant_dtype,
            quant_config.per_act_token_quant,
            quant_config.block_shape,
            is_scale_swizzled=False,  # rows are not together yet
            mx_alignment=quant_config.mx_alignment,
        )
        if scales is None or scales.dim() != 2 or scales.shape[0] != a1.shape[0]:
            came = None if scales is None else list(scales.shape)
            raise ValueError(
                f"quant_dtype {quant_config.quant_dtype} gives scales {came} for {a1.shape[0]} tokens; supported are "
                "recipes with scales for each token"
            )
        return [rows.contiguous(), scales.contiguous()]


def _arrived(received: Received, quantised: _Quantised, quant_config: Any) -> Prepared:
    """The rows and scales that vLLM's experts take."""
    flat = received.flat
    rows, scales = flat.payloads[0], None
    if quantised is _Quantised.ON_ARRIVAL:
        rows, scales = _quantised_on_arrival(rows, flat.topk_ids, quant_config)
    elif quantised is _Quantised.BEFORE:
        scales = flat.payloads[1]
        if quant_config.quant_dtype == "nvfp4" and quant_config.is_scale_swizzled:
            width = scales.shape[-1]
            interleave = importlib.import_module("vllm.utils.flashinfer").nvfp4_block_scale_interleave
            scales = interleave(scales.view(torch.uint8)).view(-1, width)
    return rows, scales, None, flat.topk_ids, flat.topk_weights


def _quantise() -> Any:
    return importlib.import_module(f"{_FUSED_MOE}.utils").moe_kernel_quantize_input


def _has_scales_for_each_token(quant_config: Any) -> bool:
    named = quant_config.quant_dtype in ("nvfp4", "mxfp8")
    return named or quant_config.per_act_token_quant or quant_config.block_shape is not None


def _quantised_on_arrival(
    rows: torch.Tensor, topk_ids: torch.Tensor, quant_config: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """vLLM's quantisation of received rows, by this rank's scale or by one for all of them."""
    # Slots without a token have bytes of earlier rounds, which would count in a scale that is taken from the rows.
    rows = rows.masked_fill((topk_ids < 0).all(1, keepdim=True), 0)
    quantised: tuple[torch.Tensor, torch.Tensor | None] = _quantise()(
        rows,
        quant_config.a1_scale,
        quant_config.quant_dtype,
        quant_config.per_act_token_quant,
        quant_config.block_shape,
        is_scale_swizzled=quant_config.is_scale_swizzled,
        mx_alignment=quant_config.mx_alignment,
    )
    return quantised
