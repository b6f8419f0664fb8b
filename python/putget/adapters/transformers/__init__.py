"""transformers: ``ep_implementation="putget"`` for expert parallelism at inference, from transformers 5.23.

    from putget.adapters import transformers as putget_transformers
    putget_transformers.register(max_tokens_per_rank=4096)
    config = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="putget")
    model = AutoModelForCausalLM.from_pretrained(..., distributed_config=config)

The ranks of a tensor-parallel group hold one batch. Each sends a slice of it, and the slices' results are gathered.
Ranks with a batch of their own (``fsdp_size``) send all of it. The split sizes of transformers' own ``all_to_all`` are
read by the host in every layer; here the host reads nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from putget import BackendUnavailable, Payload
from putget.adapters import placement
from putget.adapters.engines import announce, announce_launch, require_names, require_version
from putget.adapters.rounds import Rounds
from putget.adapters.shared import communicator_of, engine_workspace_bytes, shared_workspace

NAME = "putget"
_MODULE = "transformers.distributed.expert_parallel"
_WEIGHTS = ("gate_up_proj", "down_proj")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def require_transformers() -> str:
    """The version of transformers that is installed.

    Raises:
        BackendUnavailable: There is none, or one before 5.23 or from 6 on.
    """
    return require_version("transformers", ["transformers"], "5.23", "6")


class ExpertRounds:
    """How the experts of one layer get their tokens: ``register`` puts it in front of EPImplementation.

    Args:
        experts: The layer's experts, sharded by transformers.
        ep_mesh: The ranks that own different experts.
        tp_mesh: The ranks that hold the same batch.

    Raises:
        ValueError: The experts' weights are quantised, or not known.
        BackendUnavailable, PeerTimeout: As ``putget.Workspace``; at the first call of a layer.
    """

    max_tokens_per_rank: int = 4096

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        check_experts(experts)
        super().__init__(experts, ep_mesh, tp_mesh)  # type: ignore[call-arg]
        self._rounds: Rounds | None = None

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted output of the experts for each token.

        Args:
            hidden_states: [num_tokens, hidden_size] bfloat16, float16 or float32.
            top_k_index: [num_tokens, top_k] int64 global expert ids.
            top_k_weights: [num_tokens, top_k].

        Returns:
            [num_tokens, hidden_size] of the dtype of hidden_states.

        Raises:
            ValueError: An argument is wrong, or gradients are asked for; nothing has happened on any rank.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            raise ValueError(
                'ep_implementation "putget" has no gradients: run it under torch.no_grad(), or train with "all_to_all"'
            )
        tp_size, tp_rank = self.tp_mesh.size(), self.tp_mesh.get_local_rank()  # type: ignore[attr-defined]
        num_tokens, hidden_size = hidden_states.shape
        each = -(-num_tokens // tp_size)
        mine = slice(min(tp_rank * each, num_tokens), min((tp_rank + 1) * each, num_tokens))
        output = self._exchange(hidden_states[mine], top_k_index[mine], top_k_weights[mine])
        if tp_size == 1:
            return output
        padded = output.new_zeros(each, hidden_size)
        padded[: len(output)] = output
        gathered = output.new_empty(each * tp_size, hidden_size)
        dist.all_gather_into_tensor(gathered, padded, group=self.tp_mesh.get_group())  # type: ignore[attr-defined]
        return gathered[:num_tokens]

    def _exchange(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Dispatch, this rank's experts on what arrived, and combine; for rows that no other rank sends."""
        rounds = self._rounds_for(rows, ids.shape[1])
        if len(rows) > rounds.max_tokens_per_rank:
            raise ValueError(
                f"a rank sends {len(rows)} tokens, the workspace is for {rounds.max_tokens_per_rank}: call "
                "putget.adapters.transformers.register(max_tokens_per_rank=...) before the model is made"
            )
        flat = rounds.dispatch(
            ids.contiguous(), weights.float().contiguous(), [rows.contiguous()], names=["hidden_states"]
        ).flat
        announce_launch("transformers", rounds.all_to_all, len(rows))
        received = flat.payloads[0]
        owner = rounds.shared.comm.rank * self.num_local_experts  # type: ignore[attr-defined]
        local = flat.topk_ids.long() - owner
        here = (local >= 0) & (local < self.num_local_experts)  # type: ignore[attr-defined]
        # Slots without a token hold the rows of earlier rounds: zeros, so that no NaN of theirs reaches a sum.
        received = torch.where(here.any(1, keepdim=True), received, 0)
        output = self.experts_forward(  # type: ignore[attr-defined]
            received,
            torch.where(here, local, self.num_local_experts),  # type: ignore[attr-defined]
            torch.where(here, flat.topk_weights, 0.0).to(weights.dtype),
        )
        return rounds.combine(output.to(rows.dtype).contiguous(), name="the experts' output")

    def _rounds_for(self, rows: torch.Tensor, top_k: int) -> Rounds:
        """The rounds of this layer, made at the first call (collective)."""
        if self._rounds is None:
            comm = communicator_of(self.ep_mesh.get_group())  # type: ignore[attr-defined]
            local = self.num_local_experts  # type: ignore[attr-defined]
            num_experts = local * comm.size
            output = Payload((rows.shape[1],), rows.dtype)
            announce("transformers", comm, num_experts=num_experts, device=rows.device)
            shared = shared_workspace(
                comm,
                engine_workspace_bytes(
                    ep_size=comm.size,
                    max_tokens_per_rank=self.max_tokens_per_rank,
                    dispatch_bytes=output.row_bytes,
                    output=output,
                ),
                rows.device,
                share_by="transformers",
                arguments={"max_tokens_per_rank": self.max_tokens_per_rank, "hidden_size": rows.shape[1]},
            )
            self._rounds = Rounds(
                shared,
                num_experts=num_experts,
                top_k=top_k,
                max_tokens_per_rank=self.max_tokens_per_rank,
                output=output,
                expert_to_rank=placement.even(num_experts, comm.size, engine="transformers", num_local_experts=local),
            )
        return self._rounds


def check_experts(experts: Any) -> None:
    """Refuses experts whose weights are not plain ones.

    Raises:
        ValueError: A weight is missing or quantised; the message names it.
    """
    kind = type(experts).__name__
    weights = dict(experts.named_parameters())
    missing = [name for name in _WEIGHTS if name not in weights]
    if missing:
        raise ValueError(
            f"{kind} has no {' and no '.join(missing)}: putget knows experts with {' and '.join(_WEIGHTS)}"
        )
    for name, weight in weights.items():
        if weight.dtype not in _DTYPES:
            raise ValueError(
                f"{kind}.{name} is {weight.dtype}: quantised experts are not known, supported are bfloat16, float16 "
                'and float32; use ep_implementation="all_to_all"'
            )


def register(*, max_tokens_per_rank: int = 4096) -> type:
    """Registers ``ep_implementation="putget"`` with transformers, on every rank, and returns the class.

    Args:
        max_tokens_per_rank: Most tokens that one rank sends in one forward; the workspace holds them from each rank.

    Raises:
        ValueError: max_tokens_per_rank is not a positive int.
        BackendUnavailable: This transformers is not known.
    """
    if not isinstance(max_tokens_per_rank, int) or isinstance(max_tokens_per_rank, bool) or max_tokens_per_rank < 1:
        raise ValueError(f"max_tokens_per_rank is {max_tokens_per_rank!r}, expected a positive int")
    version = require_transformers()
    module = importlib.import_module(_MODULE)
    require_names("transformers", module, ("EPImplementation", "EPImplementationInterface"))
    base = module.EPImplementation
    if not hasattr(module.EPImplementationInterface, "register"):
        raise BackendUnavailable(f"transformers {version}: EPImplementationInterface has no register")
    namespace = {"max_tokens_per_rank": max_tokens_per_rank, "__doc__": ExpertRounds.__doc__}
    kind = type("PutgetEP", (ExpertRounds, base), namespace)
    module.EPImplementationInterface.register(NAME, kind)
    return kind
