"""``spread``: a loaded transformers model becomes expert-parallel in place; each rank has requests of its own."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from putget import Communicator
from putget.adapters import placement
from putget.adapters.shared import TIMEOUT_S, close_shared
from putget.adapters.transformers.exchange import ExpertExchange, check_experts, require_transformers
from putget.lockstep import Lockstep

_SETUP_S = 300.0  # ranks load their weights at their own pace
_LOOKED_AT = 1024  # values of each tensor that ranks compare
_SLEEP_S = 1.0


class SpreadExperts(ExpertExchange):
    """The experts of one layer: this rank's weights, and the rounds that bring them tokens.

    Args:
        experts: transformers' module, whose weights are replaced by this rank's part.
        comm: The ranks.
        layer: Its number, which ranks compare in each round; None: they do not.
        max_tokens_per_rank: Most tokens that one rank sends.
        timeout_s: Deadline of a wait in a round, in seconds.
        top_k: Experts of a token.
        hidden_size: Elements of a row.
    """

    remedy = "call spread(max_tokens_per_rank=...) with more"

    def __init__(
        self,
        experts: Any,
        comm: Communicator,
        *,
        layer: int | None,
        max_tokens_per_rank: int,
        timeout_s: float,
        top_k: int,
        hidden_size: int,
    ) -> None:
        self._comm = comm
        self._owners = placement.linear(experts.num_experts, comm.size)
        self.num_local_experts = self._owners.count(comm.rank)
        self.max_tokens_per_rank, self.timeout_s = max_tokens_per_rank, timeout_s
        self.experts_forward = experts.forward
        self.layer = layer
        first = self._owners.index(comm.rank)
        for name, weight in list(experts.named_parameters(recurse=False)):
            part = weight.detach()[first : first + self.num_local_experts].clone()
            setattr(experts, name, torch.nn.Parameter(part, requires_grad=False))
        experts.num_experts = self.num_local_experts
        experts._is_expert_parallel = True  # transformers' kernels leave out the id that stands for "none"
        experts.forward = self
        weight = experts.down_proj
        self._nothing = (
            weight.new_empty(0, hidden_size),
            torch.empty(0, top_k, dtype=torch.int64, device=weight.device),
            weight.new_empty(0, top_k),
        )

    def group(self) -> tuple[Communicator, placement.Table]:
        """All ranks; the first ``num_experts % ep_size`` own one expert more."""
        return self._comm, self._owners

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted output of all ranks' experts for this rank's tokens; arguments as transformers has them."""
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            raise ValueError("a spread model has no gradients: run it under torch.no_grad()")
        return self.exchange(hidden_states, top_k_index, top_k_weights)

    def idle(self) -> None:
        """The same without a token."""
        self.exchange(*self._nothing)


class Spread:
    """A model's expert layers on all ranks, as ``spread`` returns them.

    Attributes:
        comm: The ranks.
        layers: The expert layers, in the order of a pass.
        lockstep: The passes of all ranks.
    """

    def __init__(self, model: Any, comm: Communicator, layers: list[SpreadExperts], timeout_s: float) -> None:
        self.comm = comm
        self.layers = layers
        self.lockstep = Lockstep(comm, timeout_s=timeout_s)
        self._model = model

    def idle_pass(self) -> None:
        """Takes part in a pass of other ranks: the expert layers alone, without a token."""
        with torch.no_grad():
            for layer in self.layers:
                layer.idle()
        self.lockstep.end(was_idle=True)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside of it each forward of the model is a pass; ranks may make different numbers of them.

        At its end a rank takes part in the passes of others, until all have come there. All ranks enter it.

            with spread.together():
                model.generate(...)
        """
        forward = self._model.forward

        def in_step(*args: Any, **options: Any) -> Any:
            self.lockstep.begin()
            found = forward(*args, **options)
            self.lockstep.end()
            return found

        self._model.forward = in_step
        try:
            yield
        finally:
            self._model.forward = forward
        self.lockstep.finish()
        while not self.lockstep.all_finished:
            if self.lockstep.begun() is None:
                self.lockstep.wait(None, _SLEEP_S)
            else:
                self.idle_pass()

    def end(self) -> None:
        """Frees the workspace and ends the connections; the model cannot run any more. Idempotent."""
        self.lockstep.close()
        close_shared(self.comm)


def spread(
    model: Any,
    comm: Communicator,
    *,
    max_tokens_per_rank: int = 4096,
    check_layers: bool = False,
    timeout_s: float = TIMEOUT_S,
    setup_timeout_s: float = _SETUP_S,
) -> Spread:
    """Makes a loaded model of transformers expert-parallel, in place. Collective.

    Each rank keeps the weights of its own experts, in contiguous blocks; all else is whole on every rank. Ranks have
    requests of their own: run the model inside of ``Spread.together``, or by ``batching_manager``.

    Args:
        model: A model for causal language modelling, on its device, the same on all ranks.
        comm: The ranks.
        max_tokens_per_rank: Most tokens that one rank sends in one pass; the workspace holds them from each rank.
        check_layers: Whether ranks say in each round which layer they are in. The host waits for it.
        timeout_s: Deadline of a wait in a pass, in seconds: as long as another rank may take for a layer.
        setup_timeout_s: Deadline in seconds for ranks to come here.

    Raises:
        ValueError: The model has no experts, fewer than there are ranks, or quantised ones; max_tokens_per_rank is no
            positive int; ranks have other weights, sizes or versions of transformers. Nothing has changed.
        BackendUnavailable: This transformers is not known.
        PeerTimeout: A rank did not come in time.
    """
    version = require_transformers()
    if not isinstance(max_tokens_per_rank, int) or isinstance(max_tokens_per_rank, bool) or max_tokens_per_rank < 1:
        raise ValueError(f"max_tokens_per_rank is {max_tokens_per_rank!r}, expected a positive int")
    found = _experts_of(model, comm.size)
    top_k, hidden_size = (_size_of(model, name) for name in ("num_experts_per_tok", "hidden_size"))
    comm.compare(
        "spread",
        {
            "transformers": version,
            "max_tokens_per_rank": max_tokens_per_rank,
            "top_k": top_k,
            "check_layers": check_layers,
            "expert layers": [(name, [tuple(p.shape) for p in experts.parameters()]) for name, experts in found],
            "dtype": model.dtype,
            "weights": _digest(model),
        },
        setup_timeout_s,
    )
    layers = [
        SpreadExperts(
            experts,
            comm,
            layer=number if check_layers else None,
            max_tokens_per_rank=max_tokens_per_rank,
            timeout_s=timeout_s,
            top_k=top_k,
            hidden_size=hidden_size,
        )
        for number, (_, experts) in enumerate(found)
    ]
    return Spread(model, comm, layers, setup_timeout_s)


def _experts_of(model: Any, ep_size: int) -> list[tuple[str, Any]]:
    """The expert layers of a model by name, in the order of a pass."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "num_experts")
        and any(key == "gate_up_proj" for key, _ in module.named_parameters(recurse=False))
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts: no module has num_experts and gate_up_proj")
    for name, experts in found:
        check_experts(experts)
        if isinstance(experts.forward, SpreadExperts):
            raise ValueError(f"{name} is spread already")
        if experts.num_experts < ep_size:
            raise ValueError(
                f"{name} has {experts.num_experts} experts, expected at least one for each of {ep_size} ranks"
            )
    return found


def _size_of(model: Any, name: str) -> int:
    config = model.config.get_text_config()
    size = getattr(config, name, None)
    if not isinstance(size, int):
        raise ValueError(f"{type(config).__name__} has no {name}, which the experts' rounds need")
    return size


def _digest(model: Any) -> str:
    """A word for the model's weights: the beginning of each tensor."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        values = weight.detach().flatten()[:_LOOKED_AT].contiguous().view(torch.uint8).cpu()
        digest.update(name.encode() + bytes(values.tolist()))
    return digest.hexdigest()[:16]
