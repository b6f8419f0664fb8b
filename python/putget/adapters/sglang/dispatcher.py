"""A dispatcher for SGLang's mixture-of-experts layers. ``putget.adapters.sglang`` gives it SGLang's base class."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch

from putget import BackendUnavailable, Communicator, Payload, ProtocolMisuse, Received, config
from putget.adapters import placement
from putget.adapters.engines import announce, announce_launch, announce_overlap
from putget.adapters.proof import prove
from putget.adapters.rounds import Rounds
from putget.adapters.sglang.overlap import most_tokens, num_batches
from putget.adapters.shared import (
    SharedWorkspace,
    combine_dtype_of,
    communicator_of,
    default_device,
    engine_workspace_bytes,
    shared_workspace,
)

MODULE = "sglang.srt.layers.moe.token_dispatcher.flashinfer"
_UTILS = "sglang.srt.layers.moe.utils"
CAPACITY_VARIABLE = "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK"

_ROWS = "combine_input.hidden_states"  # for messages

# Runners that take -1 as "no expert"; the others of SGLang's take num_experts.
_TAKE_MINUS_ONE = {"deep_gemm", "flashinfer_trtllm", "flashinfer_trtllm_routed"}
_NVFP4_GROUP, _MXFP8_GROUP = 16, 32


def _optional(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


class Sent(NamedTuple):
    """The facts about the first half of a dispatch that the second half needs."""

    recipe: str
    router_logits: Any
    dtype: torch.dtype


class DispatcherRounds:
    """SGLang's dispatcher on putget: what FlashinferDispatcher takes and gives, without its dummy rows.

    - Ranks without tokens send nothing and allocate nothing.
    - Rows are quantised before dispatch, by SGLang's own kernels: NVFP4 or MXFP8 where SGLang asks for it.
    - The runner may write into the workspace (``moe_output``) or return rows of its own.
    - Any runner that takes expert ids and weights works: ids are global, slots without a token have the id that the
      runner takes as "no expert".
    - The workspace holds what one rank sends in one forward, as the server arguments say, from each rank once.
    - Halves (``dispatch_a``, ``dispatch_b``, ``combine_a``, ``combine_b``) for two-batch overlap: each of the two
      batches has rounds and a workspace of its own.

    Args:
        group: The torch.distributed group of the expert-parallel ranks.
        router_topk: Experts of a token.
        num_experts: Physical expert slots of all ranks together.
        num_local_experts: Those of this rank; equal blocks on every rank, as SGLang places physical experts.
        hidden_size: Length of a row.
        params_dtype: Element type of what the experts return; by default that of the hidden states, or bfloat16 where
            these are quantised.
        moe_runner_config: SGLang's; it names the runner.
        enable_sp_prefill_a2a: Accepted: prefill and decode take the same way here.

    Raises:
        ValueError: An argument is wrong, here or on another rank.
        BackendUnavailable, PeerTimeout: As ``putget.Workspace``.
    """

    recipe: ClassVar[str | None] = None
    low_precision_combine: ClassVar[bool] = False  # rows come back as E4M3 with one float32 scale for 128 values
    engine_module: ClassVar[Any] = None  # SGLang's module of FlashinferDispatcher

    def __init__(
        self,
        group: Any,
        router_topk: int,
        num_experts: int | None = None,
        num_local_experts: int | None = None,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        moe_runner_config: Any = None,
        enable_sp_prefill_a2a: bool = False,
    ) -> None:
        super().__init__()
        if num_experts is None or hidden_size is None:
            raise ValueError(f"num_experts is {num_experts} and hidden_size {hidden_size}, expected both")
        self.num_experts = num_experts
        self.num_local_experts = num_local_experts
        self.hidden_size = hidden_size
        self.router_topk = router_topk
        self.runner_backend = getattr(moe_runner_config, "runner_backend", None)
        comm = communicator_of(group)
        self.ep_size, self.ep_rank = comm.size, comm.rank
        table = placement.even(num_experts, comm.size, engine="SGLang", num_local_experts=num_local_experts)
        self.max_num_tokens = capacity()
        announce("sglang", comm, num_experts=num_experts, device=default_device())
        row = Payload((hidden_size,), torch.bfloat16 if params_dtype is None else params_dtype)
        own = num_local_experts or num_experts // comm.size
        self._batches = [
            Rounds(
                self._workspace(comm, row, index),
                num_experts=num_experts,
                top_k=router_topk,
                max_tokens_per_rank=self.max_num_tokens,
                output=None if params_dtype is None else row,
                expert_to_rank=table,
                combine_dtype=combine_dtype_of(self.low_precision_combine),
            )
            for index in range(num_batches())
        ]
        self._recipe_of: tuple[Any, str] | None = None  # with the quant_config that it was read for
        self._sent: dict[int, Sent] = {}  # by batch, between the halves of its dispatch
        for rounds in self._batches:
            prove("SGLang", rounds, row.shape, row.dtype, range(comm.rank * own, (comm.rank + 1) * own))

    def _workspace(self, comm: Communicator, row: Payload, batch: int) -> SharedWorkspace:
        """The memory of one batch of those that overlap."""
        num_bytes = engine_workspace_bytes(
            ep_size=comm.size,
            max_tokens_per_rank=self.max_num_tokens,
            dispatch_bytes=row.row_bytes,
            output=row,
            combine_dtype=combine_dtype_of(self.low_precision_combine),
        )
        arguments = {
            "tokens of a rank (chunked_prefill_size)": self.max_num_tokens,
            "hidden_size": row.shape[0],
            "params_dtype": row.dtype,
        }
        return shared_workspace(
            comm,
            num_bytes,
            share_by=("sglang", is_speculative(), batch),
            timeout_s=config.engine_timeout_s(),
            arguments=arguments,
        )

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any, tbo_subbatch_index: int | None = None) -> Any:
        """Puts each token's rows into the ranks of its experts.

        Args:
            hidden_states: [num_tokens, hidden_size].
            topk_output: SGLang's top-k output with ids and weights, or one that can be turned into that.
            tbo_subbatch_index: Which of two batches that overlap, 0 or 1; None is 0.

        Returns:
            SGLang's FlashinferDispatchOutput with [ep_size * max_rows, *] rows, where max_rows is the largest number of
            tokens of any rank: views into the workspace, valid until combine.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: The last dispatch of this batch has not been combined.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        rounds = self._of(tbo_subbatch_index)
        arguments, sent = self._to_send(hidden_states, topk_output, tbo_subbatch_index)
        received = rounds.dispatch(**arguments)
        announce_launch("sglang", rounds.all_to_all, hidden_states.shape[0])
        return self._arrived(rounds, received, sent)

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any, tbo_subbatch_index: int | None = None) -> None:
        """The half of ``dispatch`` that puts and waits for nobody; arguments and errors as there."""
        rounds = self._of(tbo_subbatch_index)
        arguments, sent = self._to_send(hidden_states, topk_output, tbo_subbatch_index)
        rounds.dispatch_start(**arguments)
        if tbo_subbatch_index:
            announce_overlap("sglang")
        announce_launch("sglang", rounds.all_to_all, hidden_states.shape[0])
        self._sent[tbo_subbatch_index or 0] = sent

    def dispatch_b(self, tbo_subbatch_index: int | None = None) -> Any:
        """The half of ``dispatch`` that waits: what it returns.

        Raises:
            ProtocolMisuse: No ``dispatch_a`` of this batch came before.
            PeerTimeout: As ``AllToAll.dispatch_finish``.
        """
        rounds = self._of(tbo_subbatch_index)
        sent = self._sent.pop(tbo_subbatch_index or 0, None)
        if sent is None:
            raise ProtocolMisuse(f"dispatch_b of batch {tbo_subbatch_index or 0}: no dispatch_a came before it")
        return self._arrived(rounds, rounds.dispatch_finish(), sent)

    def _to_send(self, hidden_states: torch.Tensor, topk_output: Any, batch: int | None) -> tuple[dict[str, Any], Sent]:
        """The arguments of a dispatch, and what is to be known when its rows have come."""
        if not hasattr(topk_output, "topk_ids"):
            if not hasattr(topk_output, "to_standard"):
                raise ValueError(
                    f"topk_output is a {type(topk_output).__name__}, expected one with topk_ids and topk_weights: this "
                    "runner routes by itself"
                )
            topk_output = topk_output.to_standard()
        recipe = self._recipe()
        payloads = self._quantise(recipe, hidden_states.contiguous())
        ids, weights = topk_output.topk_ids, topk_output.topk_weights.float()
        num_tokens = hidden_states.shape[0]
        if ids.shape[0] == 0 < num_tokens:
            # A rank without requests, whose batch SGLang fills up to the others': these rows go nowhere.
            ids = ids.new_full((num_tokens, self.router_topk), -1)
            weights = weights.new_zeros(ids.shape)
        arguments = {
            "topk_ids": ids.contiguous(),
            "topk_weights": weights.contiguous(),
            "payloads": payloads,
            "names": ["hidden_states", "hidden_states_scale"][: len(payloads)],
            "max_rows": self._max_rows(num_tokens, batch),
        }
        return arguments, Sent(recipe, topk_output.router_logits, hidden_states.dtype)

    def _arrived(self, rounds: Rounds, received: Received, sent: Sent) -> Any:
        """The input of the runner."""
        flat = received.flat
        scale = flat.payloads[1] if len(flat.payloads) > 1 else None
        if sent.recipe == "nvfp4" and self._runner == "flashinfer_cutlass":
            scale = self._kernel("nvfp4_block_scale_interleave")(scale)
        return self._given_to_runner(rounds, flat, scale, sent)

    def _given_to_runner(self, rounds: Rounds, received: Any, scale: torch.Tensor | None, sent: Sent) -> Any:
        """SGLang's FlashinferDispatchOutput of what arrived."""
        ids = received.topk_ids
        if self._invalid_id() != -1:
            ids = torch.where(ids < 0, self._invalid_id(), ids)
        module = self.engine_module
        fields = {
            "hidden_states": received.payloads[0],
            "hidden_states_scale": scale,
            "topk_output": module.StandardTopKOutput(received.topk_weights, ids, sent.router_logits),
            "moe_output": rounds.combine_input(),
            "output_dtype": sent.dtype,
        }
        output = module.FlashinferDispatchOutput
        return output(**{name: fields[name] for name in output._fields})

    def combine(self, combine_input: Any, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        """Gets each token's rows back and sums them: [num_tokens, hidden_size].

        Args:
            combine_input: SGLang's combine input, "flashinfer" or "standard": its hidden_states are
                [ep_size * max_rows, hidden_size], in the order of the rows that dispatch returned.
            tbo_subbatch_index: As for ``dispatch``.

        Raises:
            ValueError: Another format, or rows of another shape, dtype or layout; nothing has happened on any rank.
            ProtocolMisuse: No dispatch of this batch came before.
            PeerTimeout: As ``AllToAll.combine``.
        """
        return self._of(tbo_subbatch_index).combine(_rows_of(combine_input), name=_ROWS)

    def combine_a(self, combine_input: Any, tbo_subbatch_index: int | None = None) -> None:
        """The half of ``combine`` that gives this rank's rows; arguments and errors as there."""
        self._of(tbo_subbatch_index).combine_start(_rows_of(combine_input), name=_ROWS)

    def combine_b(self, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        """The half of ``combine`` that waits and sums; errors as there."""
        return self._of(tbo_subbatch_index).combine_finish()

    def release(self) -> None:
        """Gives up rounds that were dispatched and will not be combined, on all ranks alike."""
        for index, rounds in enumerate(self._batches):
            if self._sent.pop(index, None) is not None:
                rounds.dispatch_finish()
            rounds.release()

    def _of(self, batch: int | None) -> Rounds:
        """The rounds of a batch.

        Raises:
            ValueError: There is no such batch.
        """
        if (batch or 0) not in range(len(self._batches)):
            raise ValueError(
                f"tbo_subbatch_index is {batch}, allowed are 0 to {len(self._batches) - 1}: two batches overlap with "
                "--enable-two-batch-overlap"
            )
        return self._batches[batch or 0]

    # --- what SGLang says ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def _runner(self) -> str:
        """The name of the layer's runner, found once: SGLang looks it up among its options."""
        backend = self.runner_backend
        if backend is None:
            utils = importlib.import_module(_UTILS)
            backend = utils.get_moe_runner_backend() if hasattr(utils, "get_moe_runner_backend") else None
        return str(getattr(backend, "value", backend))

    def _invalid_id(self) -> int:
        """The runner's number for "no expert". Before SGLang had a runner configuration it was -1 for all."""
        return -1 if self.runner_backend is None or self._runner in _TAKE_MINUS_ONE else self.num_experts

    @functools.cached_property
    def _said_of_batches(self) -> tuple[ModuleType, ModuleType | None]:
        """SGLang's modules that know of all ranks' batches, found once."""
        return importlib.import_module("sglang.srt.layers.dp_attention"), _optional("sglang.srt.runtime_context")

    def _max_rows(self, num_tokens: int, batch: int | None) -> int:
        """The most tokens that any rank sends now, as far as SGLang knows."""
        if batch is not None:
            known = most_tokens()
            return self._checked(num_tokens, self.max_num_tokens if known is None else known)
        attention, context = self._said_of_batches
        counts = attention.get_dp_global_num_tokens()
        ranks_a_group = context.get_parallel().attn_tp_size if context is not None else 1
        if counts is None or (context is not None and len(counts) < 2):
            most = num_tokens
        else:
            most = -(-max(counts) // ranks_a_group)
        return self._checked(num_tokens, most)

    def _checked(self, num_tokens: int, most: int) -> int:
        """Slots of a source where a rank sends at most so many tokens."""
        if num_tokens > most:
            raise ValueError(f"hidden_states has {num_tokens} tokens, SGLang announced at most {most} a rank")
        if most > self.max_num_tokens:
            raise ValueError(
                f"a rank sends {most} tokens, the workspace is sized for {self.max_num_tokens}: raise "
                f"{CAPACITY_VARIABLE}, or lower --chunked-prefill-size or the batch size"
            )
        return max(most, 1)

    def _recipe(self) -> str:
        """How rows are quantised; read again for another quant_config, because SGLang looks at its environment."""
        given = self.quant_config  # type: ignore[attr-defined]
        if self._recipe_of is None or self._recipe_of[0] is not given:
            self._recipe_of = (given, self._found_recipe(given or {}))
        return self._recipe_of[1]

    def _found_recipe(self, quant_config: dict[str, Any]) -> str:
        if self.recipe is not None:
            return self.recipe
        name = None
        utils = importlib.import_module(_UTILS)
        if hasattr(utils, "get_flashinfer_a2a_dispatch_type"):
            name = utils.get_flashinfer_a2a_dispatch_type().value
        if name in (None, "nvfp4") and quant_config.get("input_global_scale") is not None:
            return "nvfp4"
        return "mxfp8" if name == "mxfp8" and quant_config.get("use_mxfp8", False) else "bf16"

    def _kernel(self, name: str) -> Any:
        """A kernel that SGLang's own dispatcher uses."""
        found = getattr(self.engine_module, name, None)
        if found is None:
            found = getattr(_optional("flashinfer"), name, None)
        if found is None:
            raise BackendUnavailable(f"{name} is not there: FlashInfer is not installed")
        return found

    def _quantise(self, recipe: str, rows: torch.Tensor) -> list[torch.Tensor]:
        """The payloads of a recipe; nothing is launched for no rows."""
        num_tokens, width = rows.shape[0], self.hidden_size
        if recipe == "bf16":
            return [rows]
        if num_tokens == 0:
            return [torch.empty(0, *kind.shape, dtype=kind.dtype, device=rows.device) for kind in _kinds(recipe, width)]
        if recipe == "nvfp4":
            global_scale = self.quant_config["input_global_scale"]  # type: ignore[attr-defined]
            x, scale = self._kernel("fp4_quantize")(rows, global_scale, is_sf_swizzled_layout=False)
        else:
            x, scale = self._kernel("mxfp8_quantize")(rows, False)
        kinds = _kinds(recipe, width)
        return [
            tensor.view(kind.dtype).reshape(num_tokens, *kind.shape).contiguous()
            for tensor, kind in zip((x, scale), kinds, strict=True)
        ]


def _kinds(recipe: str, hidden_size: int) -> tuple[Payload, Payload]:
    """Rows and scales of a quantised recipe."""
    if recipe == "nvfp4":
        return Payload((hidden_size // 2,), torch.uint8), Payload((hidden_size // _NVFP4_GROUP,), torch.uint8)
    return Payload((hidden_size,), torch.float8_e4m3fn), Payload((hidden_size // _MXFP8_GROUP,), torch.uint8)


def _rows_of(combine_input: Any) -> torch.Tensor:
    """The experts' rows.

    Raises:
        ValueError: Another format.
    """
    form = getattr(combine_input.format, "value", combine_input.format)
    if form not in ("flashinfer", "standard"):
        raise ValueError(f"combine_input has format {form!r}, supported are 'flashinfer' and 'standard'")
    rows: torch.Tensor = combine_input.hidden_states
    return rows


def is_speculative() -> bool:
    """Whether the layer belongs to a draft model, whose rounds must not share memory with the main model's."""
    context = _optional("sglang.srt.runtime_context")
    return bool(context.get_flags().moe.speculative_context) if context is not None else False


def capacity() -> int:
    """Most tokens that one rank sends in one forward, from SGLang's server arguments."""
    overrides = _optional("sglang.srt.arg_groups.overrides")
    context = _optional("sglang.srt.runtime_context")
    if overrides is not None and context is not None:
        return int(overrides.flashinfer_a2a_max_dispatch_tokens_per_rank(context.max_prefill_buffer_tokens()))
    configured = importlib.import_module("sglang.srt.utils").get_int_env_var(CAPACITY_VARIABLE, 0)
    if configured:
        return int(configured)
    args = importlib.import_module("sglang.srt.server_args").get_global_server_args()
    chunk = args.chunked_prefill_size
    prefill = int(chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens)
    requests = int(args.cuda_graph_max_bs or args.max_running_requests or 0)
    return max(prefill, requests * int(args.speculative_num_draft_tokens or 1), 1)
