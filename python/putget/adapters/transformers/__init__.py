"""transformers: ``ep_implementation="putget"`` for expert parallelism at inference, from transformers 5.23.

    from putget.adapters import transformers as putget_transformers
    putget_transformers.register(max_tokens_per_rank=4096)
    config = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="putget")
    model = AutoModelForCausalLM.from_pretrained(..., distributed_config=config)

The ranks of a tensor-parallel group hold one batch. Each sends a slice of it, and the slices' results are gathered.
Ranks with a batch of their own (``fsdp_size``) send all of it. The split sizes of transformers' own ``all_to_all`` are
read by the host in every layer; here the host reads nothing.

``spread`` and ``batching_manager`` are for ranks with requests of their own, which ``putget serve`` starts; ``take_in``
for new processes of ranks that were lost.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from putget import BackendUnavailable, Communicator
from putget.adapters import placement
from putget.adapters.engines import require_names
from putget.adapters.shared import communicator_of
from putget.adapters.transformers.batching import batching_manager
from putget.adapters.transformers.exchange import ExpertExchange, check_experts, require_transformers
from putget.adapters.transformers.joining import take_in
from putget.adapters.transformers.passes import Spread
from putget.adapters.transformers.spreading import spread

NAME = "putget"
_MODULE = "transformers.distributed.expert_parallel"
__all__ = [
    "ExpertRounds",
    "Spread",
    "batching_manager",
    "check_experts",
    "register",
    "require_transformers",
    "spread",
    "take_in",
]


class ExpertRounds(ExpertExchange):
    """How the experts of one layer get their tokens: ``register`` puts it in front of EPImplementation.

    Args:
        experts: The layer's experts, sharded by transformers.
        ep_mesh: The ranks that own different experts.
        tp_mesh: The ranks that hold the same batch.

    Raises:
        ValueError: The experts' weights are quantised, or not known.
        BackendUnavailable, PeerTimeout: As ``putget.Workspace``; at the first call of a layer.
    """

    remedy = "call putget.adapters.transformers.register(max_tokens_per_rank=...) before the model is made"

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        check_experts(experts)
        super().__init__(experts, ep_mesh, tp_mesh)  # type: ignore[call-arg]

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
        output = self.exchange(hidden_states[mine], top_k_index[mine], top_k_weights[mine])
        if tp_size == 1:
            return output
        padded = output.new_zeros(each, hidden_size)
        padded[: len(output)] = output
        gathered = output.new_empty(each * tp_size, hidden_size)
        dist.all_gather_into_tensor(gathered, padded, group=self.tp_mesh.get_group())  # type: ignore[attr-defined]
        return gathered[:num_tokens]

    def group(self) -> tuple[Communicator, placement.Table]:
        """The ranks of ``ep_mesh``, which own equal shares."""
        comm = communicator_of(self.ep_mesh.get_group())  # type: ignore[attr-defined]
        local = self.num_local_experts
        return comm, placement.even(local * comm.size, comm.size, engine="transformers", num_local_experts=local)


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
