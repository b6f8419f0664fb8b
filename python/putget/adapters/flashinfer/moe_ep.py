"""putget as a communication of ``flashinfer.moe_ep``: ``register()``, and then its backend name is "putget".

from putget.adapters.flashinfer import moe_ep
moe_ep.register()
communication = flashinfer.moe_ep.create_communication(bootstrap, params, "putget")
layer = flashinfer.moe_ep.MoEEpLayer(..., backend=SplitConfig(comm="putget"))
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from putget import Payload
from putget.adapters import placement
from putget.adapters.engines import require_names
from putget.adapters.flashinfer.moe_alltoall import with_invalid_id
from putget.adapters.rounds import Rounds
from putget.adapters.shared import (
    TIMEOUT_S,
    WARMUP_TIMEOUT_S,
    combine_dtype_of,
    communicator_of,
    engine_workspace_bytes,
    shared_workspace,
)

NAME = "putget"
_NEEDED = ("MoEEpCommunication", "MoEEpDispatchResult", "register_communication")


@dataclass(frozen=True)
class PutgetConfig:
    """Options, where the name alone is not enough: ``create_communication(..., backend=PutgetConfig(...))``.

    Attributes:
        timeout_s: Deadline of every wait, in seconds.
        warmup_timeout_s: Deadline of set-up and first rounds, in seconds.
        device: Where the rows live; None: the current CUDA device, or the CPU where there is none.
        share_by: Communications with an equal value share memory; those whose rounds overlap need different ones.
        use_low_precision_combine: Rows come back as E4M3 with one float32 scale for 128 values.
    """

    timeout_s: float = TIMEOUT_S
    warmup_timeout_s: float = WARMUP_TIMEOUT_S
    device: str | None = None
    share_by: int = 0
    use_low_precision_combine: bool = False
    backend_name: str = NAME


class CommunicationRounds:
    """The class that ``MoEEpCommunication`` asks for; ``register`` puts it in front of that class.

    Args:
        bootstrap: FlashInfer's BootstrapConfig: rank, world_size and process_group.
        params: FlashInfer's MoEEpCommParams.
        config: Options.
    """

    def __init__(self, bootstrap: Any, params: Any, config: PutgetConfig | None = None) -> None:
        super().__init__(bootstrap, params)  # type: ignore[call-arg]
        options = PutgetConfig() if config is None else config
        comm = communicator_of(bootstrap.process_group)
        if (comm.rank, comm.size) != (bootstrap.rank, bootstrap.world_size):
            raise ValueError(
                f"bootstrap says rank {bootstrap.rank} of {bootstrap.world_size}, its process group rank {comm.rank} "
                f"of {comm.size}"
            )
        self._params = params
        row = Payload((params.hidden_size,), params.token_dtype)
        combine_dtype = combine_dtype_of(options.use_low_precision_combine)
        shared = shared_workspace(
            comm,
            engine_workspace_bytes(
                ep_size=comm.size,
                max_tokens_per_rank=params.max_tokens_per_rank,
                dispatch_bytes=max(params.dispatch_bytes_per_token, row.row_bytes),
                output=row,
                combine_dtype=combine_dtype,
            ),
            None if options.device is None else torch.device(options.device),
            share_by=options.share_by,
            timeout_s=options.timeout_s,
            warmup_timeout_s=options.warmup_timeout_s,
            arguments={
                "max_tokens_per_rank": params.max_tokens_per_rank,
                "hidden_size": params.hidden_size,
                "dispatch_bytes_per_token": params.dispatch_bytes_per_token,
            },
        )
        self._rounds = Rounds(
            shared,
            num_experts=params.num_experts,
            top_k=params.top_k,
            max_tokens_per_rank=params.max_tokens_per_rank,
            output=row,
            expert_to_rank=placement.even(params.num_experts, comm.size, engine="flashinfer.moe_ep"),
            combine_dtype=combine_dtype,
        )

    @classmethod
    def is_platform_supported(cls) -> bool:
        """True: what a machine lacks is said when it is used."""
        return True

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
    ) -> Any:
        """Puts each token's rows into the ranks of its experts.

        Args:
            hidden_states: [num_tokens, *], quantised or not.
            topk_ids: [num_tokens, top_k] int32 or int64 global expert ids; -1 is "no expert".
            topk_weights: [num_tokens, top_k] float32, or None.
            hidden_states_scale: [num_tokens, *] scale factors, or None.
            max_tokens_per_rank: Slots of each source that this rank looks at; it may differ between ranks.
            eplb_local_stats: Must be None.

        Returns:
            MoEEpDispatchResult: views into the workspace, valid until combine.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: The last dispatch has not been combined.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        if eplb_local_stats is not None:
            raise ValueError("eplb_local_stats is given, supported is None: no statistics travel with the rows")
        payloads, names = [hidden_states], ["hidden_states"]
        if hidden_states_scale is not None:
            payloads.append(hidden_states_scale)
            names.append("hidden_states_scale")
        flat = self._rounds.dispatch(topk_ids, topk_weights, payloads, names=names, max_rows=max_tokens_per_rank).flat
        result = importlib.import_module("flashinfer.moe_ep").MoEEpDispatchResult
        return result(
            hidden_states=flat.payloads[0],
            hidden_states_scale=flat.payloads[1] if hidden_states_scale is not None else None,
            topk_ids=with_invalid_id(flat.topk_ids, self._params.invalid_expert_id),
            topk_weights=None if topk_weights is None else flat.topk_weights,
            tokens_per_rank=self._rounds.max_rows,
        )

    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        """Gets each token's rows back and sums them: [num_tokens, hidden_size].

        Args:
            expert_output: [ep_size * tokens_per_rank, hidden_size] or [ep_size, tokens_per_rank, hidden_size], in the
                order of the rows that dispatch returned.
            output: Where to write.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: No dispatch came before.
            PeerTimeout: As ``AllToAll.combine``.
        """
        return self._rounds.combine(expert_output, name="expert_output", out=output)

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[ep_size * tokens_per_rank, hidden_size] in the workspace, or None for another dtype than the layer's."""
        rows = self._rounds.combine_input()
        return rows if rows.dtype == dtype else None

    def destroy(self) -> None:
        """Does nothing: the workspace is shared; ``putget.adapters.shared.close_shared`` frees it."""


def register() -> type:
    """Registers putget with ``flashinfer.moe_ep`` and returns the communication class.

    Raises:
        BackendUnavailable: This FlashInfer has no such registry; it came with 0.7.2.
        ImportError: FlashInfer is not installed.
    """
    moe_ep = importlib.import_module("flashinfer.moe_ep")
    require_names("FlashInfer before 0.7.2", moe_ep, _NEEDED)
    kind = type("PutgetCommunication", (CommunicationRounds, moe_ep.MoEEpCommunication), {})
    registered: type = moe_ep.register_communication(NAME)(kind)
    return registered
