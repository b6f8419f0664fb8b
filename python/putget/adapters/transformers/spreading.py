"""``spread``: a loaded transformers model becomes expert-parallel in place; each rank has requests of its own."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch

from putget import Communicator, ProtocolMisuse
from putget.adapters import placement
from putget.adapters.shared import TIMEOUT_S, SharedWorkspace
from putget.adapters.transformers.drafts import load_drafts
from putget.adapters.transformers.exchange import ExpertExchange, check_experts, require_transformers
from putget.adapters.transformers.passes import Guard, Spread
from putget.adapters.transformers.slots import NEVER, LayerSlots, Terms, expert_bytes, placement_of, slots_of
from putget.balancer import Balancer, PlanOptions

_SETUP_S = 300.0  # ranks load their weights at their own pace
_LOOKED_AT = 1024  # values of each tensor that ranks compare


class SpreadExperts(ExpertExchange):
    """The experts of one layer: this rank's weights, and the rounds that bring them tokens.

    Args:
        experts: transformers' module, whose weights are replaced by this rank's part.
        comm: The ranks.
        number: The layer's place in a pass.
        slots: Where experts may have replicas, or move; None: each rank has its experts once.
        checks: Whether ranks compare the number in each round.
        max_tokens_per_rank: Most tokens that one rank sends.
        timeout_s: Deadline of a wait in a round, in seconds.
        top_k: Experts of a token.
        hidden_size: Elements of a row.

    """

    remedy = "call spread(max_tokens_per_rank=...) with more"
    _guard: Guard | None = None
    _balancer: Balancer | None = None

    def __init__(
        self,
        experts: Any,
        *,
        comm: Communicator,
        number: int,
        slots: LayerSlots | None,
        checks: bool,
        max_tokens_per_rank: int,
        timeout_s: float,
        top_k: int,
        hidden_size: int,
    ) -> None:
        self._comm, self._number, self._slots, self._checks = comm, number, slots, checks
        self._owners = placement.linear(experts.num_experts, comm.size) if slots is None else slots.owners
        self.num_local_experts = self._owners.count(comm.rank)
        self.max_tokens_per_rank, self.timeout_s = max_tokens_per_rank, timeout_s
        self.experts_forward = experts.forward
        first = self._owners.index(comm.rank)
        for name, weight in list(experts.named_parameters(recurse=False)):
            own = weight.detach()[first : first + self.num_local_experts].clone() if slots is None else slots.own[name]
            setattr(experts, name, torch.nn.Parameter(own, requires_grad=False))
        experts.num_experts = self.num_local_experts
        experts._is_expert_parallel = True  # transformers' kernels leave out the id that stands for "none"
        experts.forward = self
        weight = experts.down_proj
        self._nothing = (
            weight.new_empty(0, hidden_size),
            torch.empty(0, top_k, dtype=torch.int64, device=weight.device),
            weight.new_empty(0, top_k),
        )

    def attach(self, guard: Guard, balancer: Balancer | None) -> None:
        """Runs rounds by the guard from now on; the balancer's numbers travel with them."""
        self._guard, self._balancer = guard, balancer
        self.num_stats = int(self._checks) + (0 if balancer is None else balancer.stats.numel())

    def group(self) -> tuple[Communicator, placement.Table]:
        """All ranks; without slots, the first ``num_experts % ep_size`` own one expert more."""
        return self._comm, self._owners

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted output of all ranks' experts for this rank's tokens; arguments as transformers has them."""
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            raise ValueError("a spread model has no gradients: run it under torch.no_grad()")
        if self._slots is not None:
            self._slots.count(top_k_index)
        return self._guarded(hidden_states, top_k_index, top_k_weights)

    def idle(self) -> None:
        """The same without a token."""
        self._guarded(*self._nothing)

    def idle_once(self) -> None:
        """The same without the guard."""
        self._round(*self._nothing)

    def move(self, comm: Communicator, slots: LayerSlots, warmup_timeout_s: float) -> Callable[[], None]:
        """Runs rounds between other processes from now on. The call that it returns takes that back.

        Args:
            comm: The ranks.
            slots: This layer's, for these.
            warmup_timeout_s: Deadline of the first round, in seconds.
        """
        names = ("_comm", "_slots", "_rounds", "_guard", "_balancer", "warmup_timeout_s")
        before = {name: getattr(self, name) for name in names}
        self._comm, self._slots, self._rounds, self.warmup_timeout_s = comm, slots, None, warmup_timeout_s
        return lambda: self.__dict__.update(before)

    @property
    def slots(self) -> LayerSlots | None:
        """Where experts may have replicas, or move."""
        return self._slots

    @property
    def shared(self) -> SharedWorkspace:
        """The memory of its rounds, of which there was one."""
        assert self._rounds is not None
        return self._rounds.shared

    def stats(self) -> torch.Tensor | None:
        """The layer's number where ranks compare it, then the balancer's numbers."""
        device = self._nothing[0].device
        parts = [torch.tensor([self._number], dtype=torch.int32, device=device)] if self._checks else []
        if self._balancer is not None:
            parts.append(self._balancer.stats if self._number == 0 else torch.zeros_like(self._balancer.stats))
        return torch.cat(parts) if parts else None

    def hear(self, told: torch.Tensor) -> None:
        """Takes the same numbers of all ranks.

        Raises:
            ProtocolMisuse: Another rank is in another layer.
        """
        if self._balancer is not None and self._number == 0:
            self._balancer.hear(told[:, int(self._checks) :])
        if self._checks:
            active = self.shared.active_ranks
            for rank, layer in enumerate(told[:, 0].tolist()):
                if layer != self._number and active[rank]:
                    own = self._comm.rank
                    raise ProtocolMisuse(f"rank {own} is in layer {self._number}, rank {rank} in layer {layer}")

    def _guarded(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._guard is None:
            return self._round(rows, ids, weights)
        return self._guard(lambda: self._round(rows, ids, weights))

    def _round(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.exchange(rows, ids if self._slots is None else self._slots.choose(ids), weights)


def spread(
    model: Any,
    comm: Communicator,
    *,
    num_slots: int | None = None,
    balance: str = "off",
    plan: PlanOptions | None = None,
    use_mtp: bool = False,
    max_tokens_per_rank: int = 4096,
    check_layers: bool = False,
    timeout_s: float = TIMEOUT_S,
    setup_timeout_s: float = _SETUP_S,
) -> Spread:
    """Makes a loaded model of transformers expert-parallel, in place. Collective.

    Each rank keeps the weights of its own experts, in contiguous blocks; all else is whole on every rank. Ranks have
    requests of their own: run the model inside of ``Spread.together``, or by ``batching_manager``.

    With spare slots, on CPUs alone, ranks of one host keep a copy of all experts in its memory. If a rank is lost, the
    others take its experts from there, and run the interrupted round again. If they have no room, all raise an error.

    Args:
        model: A model for causal language modelling, on its device, the same on all ranks.
        comm: The ranks.
        num_slots: Expert slots of all ranks together, a multiple of the ranks. For k ranks that may be lost, give
            ``ep_size * ceil(num_experts / (ep_size - k))``. None: each rank has its experts once, or with ``balance``
            a spare slot or two.
        balance: "off": experts stay, and spare slots are empty. "static": spare slots hold replicas. "online": a
            ``putget.balancer.Balancer`` moves experts while ranks serve.
        plan: When that one plans, and what a plan may cost; the same on all ranks.
        use_mtp: Whether the model's draft layers (multi-token prediction) are loaded and spread, too:
            ``generate(use_mtp=True)`` then takes these. It is transformers' own loop.
        max_tokens_per_rank: Most tokens that one rank sends in one pass; the workspace holds them from each rank.
        check_layers: Whether ranks say in each round which layer they are in. The host waits for it.
        timeout_s: Deadline of a wait in a pass, in seconds: as long as another rank may take for a layer.
        setup_timeout_s: Deadline in seconds for ranks to come here.

    Raises:
        ValueError: The model has no experts, fewer than there are ranks, or quantised ones; a number or balance is not
            allowed; ranks have other weights, sizes or versions of transformers. Nothing has changed.
        MemoryError: The host has no room for a copy of all experts.
        BackendUnavailable: This transformers is not known.
        PeerTimeout: A rank did not come in time.
    """
    version = require_transformers()
    if not isinstance(max_tokens_per_rank, int) or isinstance(max_tokens_per_rank, bool) or max_tokens_per_rank < 1:
        raise ValueError(f"max_tokens_per_rank is {max_tokens_per_rank!r}, expected a positive int")
    drafts = load_drafts(model) if use_mtp else None
    found = _experts_of(model, comm.size)
    of_drafts = [] if drafts is None else [(f"draft {name}", one) for name, one in _experts_of(drafts, comm.size)]
    found += of_drafts
    top_k, hidden_size = (_size_of(model, name) for name in ("num_experts_per_tok", "hidden_size"))
    num_experts = found[0][1].num_experts
    slots = slots_of(num_slots, balance, num_experts, comm.size)
    if slots is not None and any(experts.num_experts != num_experts for _, experts in found):
        raise ValueError("layers have other numbers of experts: leave num_slots and balance out")
    if slots is not None and found[0][1].down_proj.device.type != "cpu":
        raise ValueError("num_slots and balance are for experts on CPUs: leave them out")
    said = {
        "num_slots": slots,
        "balance": balance,
        "transformers": version,
        "max_tokens_per_rank": max_tokens_per_rank,
        "top_k": top_k,
        "check_layers": check_layers,
        "expert layers": [(name, [tuple(p.shape) for p in experts.parameters()]) for name, experts in found],
        "dtype": model.dtype,
        "weights": [_digest(one) for one in (model, drafts) if one is not None],
    }
    comm.compare("spread", said, setup_timeout_s)
    modules = [experts for _, experts in found]
    make = functools.partial(
        SpreadExperts,
        comm=comm,
        checks=check_layers,
        max_tokens_per_rank=max_tokens_per_rank,
        timeout_s=timeout_s,
        top_k=top_k,
        hidden_size=hidden_size,
    )
    if slots is None:
        layers = [make(experts, number=number, slots=None) for number, experts in enumerate(modules)]
        return Spread(model, comm, layers, setup_timeout_s, drafts=drafts, num_draft_layers=len(of_drafts))
    terms = Terms(
        said,
        placement_of(len(modules), num_experts, slots, comm.size, balance != "off"),
        [expert_bytes(one) for one in modules],
        plan if balance == "online" else NEVER,
        timeout_s,
    )
    store = terms.host_store(comm, setup_timeout_s)
    layers, of_layers = [], []
    for number, experts in enumerate(modules):
        weights = {name: weight.detach() for name, weight in experts.named_parameters(recurse=False)}
        of_layers.append(LayerSlots(weights, terms.placement, number, comm, store))
        layers.append(make(experts, number=number, slots=of_layers[number]))
    comm.compare("host store", {"step": "saved"}, setup_timeout_s)
    balancer = terms.balancer(comm, of_layers, store)
    return Spread(model, comm, layers, setup_timeout_s, balancer, store, drafts, len(of_drafts), terms)


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
