"""Routers: which experts a token goes to, and with what weights.

Scores are float32. Of experts with equal scores the lower id wins, on every device, so ranks and runs agree.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from putget._arguments import check_int
from putget.balancer import ReplicaChoice
from putget.balancer.choice import BY_PAIR

_TINY = 1e-20  # keeps weights finite where every chosen score has underflowed


@dataclass(frozen=True)
class Placing:
    """Changes to the chosen experts, before dispatch.

    Attributes:
        choose: Turns experts into slots; None: ids stay experts.
        expert_load: [num_experts] int32 on the device, to which each token adds 1 for each of its experts; or None.
        num_valid_tokens: One int32 on the device: tokens from there on are padding, which is not counted. With `choose`
            their slots are -1. Or None.
    """

    choose: ReplicaChoice | None = None
    expert_load: Tensor | None = None
    num_valid_tokens: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """Counts ids [num_tokens, top_k] int32, and returns them or their slots."""
        if self.expert_load is not None:
            ones = torch.ones_like(ids)
            if self.num_valid_tokens is not None:
                ones *= (torch.arange(len(ids), device=ids.device) < self.num_valid_tokens)[:, None]
            self.expert_load.scatter_add_(0, ids.flatten().long(), ones.flatten())
        return ids if self.choose is None else self.choose(ids, num_valid_tokens=self.num_valid_tokens)


_AS_THEY_ARE = Placing()


@dataclass(frozen=True)
class SoftmaxRouting:
    """The experts with the largest softmax probabilities, as in Mixtral and Qwen3.

    Attributes:
        renormalise: Weights are divided by their sum.
        scale: What weights are multiplied by in the end.
    """

    renormalise: bool = True
    scale: float = 1.0

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where top_k experts cannot be had."""
        check_int("top_k", top_k, 1, num_experts)

    def route(
        self, logits: Tensor, top_k: int, bias: Tensor | None = None, placing: Placing = _AS_THEY_ARE
    ) -> tuple[Tensor, Tensor]:
        """Weights and ids.

        Args:
            logits: [num_tokens, num_experts] float32.
            top_k: Experts of a token.
            bias: [num_experts] float32, added to the probabilities for the choice only; or None.
            placing: What becomes of the ids.

        Returns:
            ids (or slots) [num_tokens, top_k] int32 and weights [num_tokens, top_k] float32, the largest first.
        """
        if logits.is_cuda:
            chosen = _fused(logits, bias, top_k, (1, 1, 1), False, self.renormalise, self.scale, placing)
            if chosen is not None:
                return chosen
        scores = torch.softmax(logits, dim=-1)
        ids = largest(scores if bias is None else scores + bias, top_k)
        return placing(ids.int()), _weights(scores, ids, self.renormalise, self.scale)


@dataclass(frozen=True)
class GroupLimitedRouting:
    """Sigmoid scores, a correction bias and group limits: "noaux_tc" of DeepSeek-V3.

    DeepSeek-V3 technical report, section 2.1.2: scores are sigmoids of the logits; a bias per expert, which balances
    load without an auxiliary loss, is added for the choice only; experts are chosen from the ``topk_groups`` best of
    ``num_groups`` equal groups; a group is rated by the sum of its ``rated_by`` largest biased scores; weights are the
    unbiased scores.

    Attributes:
        num_groups: Groups of consecutive experts ("n_group").
        topk_groups: Groups that a token may use ("topk_group").
        renormalise: Weights are divided by their sum ("norm_topk_prob").
        scale: What weights are multiplied by in the end ("routed_scaling_factor").
        rated_by: Experts whose scores rate a group. The report has top_k / topk_groups of them: 2 in DeepSeek-V3.
    """

    num_groups: int = 8
    topk_groups: int = 4
    renormalise: bool = True
    scale: float = 2.5
    rated_by: int = 2

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where the groups do not fit the experts, or top_k experts cannot be had."""
        check_int("num_groups", self.num_groups, 1, num_experts)
        check_int("topk_groups", self.topk_groups, 1, self.num_groups)
        if num_experts % self.num_groups:
            raise ValueError(f"num_experts is {num_experts}, expected a multiple of num_groups, {self.num_groups}")
        each = num_experts // self.num_groups
        check_int("rated_by", self.rated_by, 1, num_experts)
        check_int("top_k", top_k, 1, self.topk_groups * each)

    def route(
        self, logits: Tensor, top_k: int, bias: Tensor | None = None, placing: Placing = _AS_THEY_ARE
    ) -> tuple[Tensor, Tensor]:
        """See ``SoftmaxRouting.route``."""
        if logits.is_cuda:
            groups = (self.num_groups, self.topk_groups, self.rated_by)
            chosen = _fused(logits, bias, top_k, groups, True, self.renormalise, self.scale, placing)
            if chosen is not None:
                return chosen
        scores = torch.sigmoid(logits)
        biased = scores if bias is None else scores + bias
        if self.topk_groups < self.num_groups:
            grouped = biased.view(len(logits), self.num_groups, logits.shape[1] // self.num_groups)
            rating = grouped.topk(min(self.rated_by, grouped.shape[2]), dim=2).values.sum(dim=2)
            allowed = torch.zeros_like(rating, dtype=torch.bool)
            allowed.scatter_(1, largest(rating, self.topk_groups), True)
            biased = grouped.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)
        ids = largest(biased, top_k)
        return placing(ids.int()), _weights(scores, ids, self.renormalise, self.scale)


Routing = SoftmaxRouting | GroupLimitedRouting


class Router(nn.Module):
    """A linear layer for the logits, and a rule of choice.

    Args:
        hidden_size: Elements of a token.
        num_experts: Experts.
        top_k: Experts of a token.
        routing: The rule.
        bias: Whether there is a correction bias, a parameter of zeros at first.
        dtype: Of the weight. Logits are sums in float32 whatever it is.
        device: Where the parameters are.

    Attributes:
        weight: [num_experts, hidden_size].
        correction_bias: [num_experts] float32, or None.

    Raises:
        ValueError: An argument is wrong.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        routing: Routing | None = None,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size, 1, 1 << 20)
        check_int("num_experts", num_experts, 1, 1 << 20)
        self.routing = SoftmaxRouting() if routing is None else routing
        if not isinstance(self.routing, SoftmaxRouting | GroupLimitedRouting):
            raise ValueError(f"routing is {routing!r}, expected a SoftmaxRouting or a GroupLimitedRouting")
        self.routing.check(num_experts, top_k)
        self.top_k = top_k
        weight = torch.randn(num_experts, hidden_size, device=device).mul_(hidden_size**-0.5).to(dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.correction_bias = (
            nn.Parameter(torch.zeros(num_experts, device=device), requires_grad=False) if bias else None
        )

    def forward(self, x: Tensor, placing: Placing = _AS_THEY_ARE) -> tuple[Tensor, Tensor]:
        """ids [num_tokens, top_k] int32 and weights [num_tokens, top_k] float32 of x [num_tokens, hidden_size]."""
        return self.routing.route(logits_of(x, self.weight), self.top_k, self.correction_bias, placing)


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """x [num_tokens, hidden_size] times weight [num_experts, hidden_size] transposed, in float32.

    Products of two BF16 values are exact in float32, so on CUDA the tensor cores may have them as they are.
    """
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and len(x):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.nn.functional.linear(x.float(), weight.float())


def largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest float32 scores of each row, in descending order; of equal ones the lower index first.

    ``torch.topk`` leaves ties to the device. So it is given integers: the score's bits, in the order of the numbers,
    above the index.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, which it must equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = scores.shape[-1] - 1
    key = (ordered << 32) + torch.arange(last, -1, -1, device=scores.device)
    return last - (key.topk(count, dim=-1).values & 0xFFFFFFFF)


def _fused(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    groups: tuple[int, int, int],
    sigmoid: bool,
    renormalise: bool,
    scale: float,
    placing: Placing,
) -> tuple[Tensor, Tensor] | None:
    """The choice by one kernel instead of two dozen; None where it does not know the shape, or there is no Triton.

    Replicas are chosen in it too, if the way looks at one pair alone.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    from putget.moe import router_triton

    if not router_triton.fits(logits.shape[1], *groups):
        return None
    choose = placing.choose
    in_kernel = choose is not None and choose.how in BY_PAIR
    ids, weights = router_triton.choose(
        logits.contiguous(),
        bias,
        top_k,
        groups=groups,
        sigmoid=sigmoid,
        renormalise=renormalise,
        scale=scale,
        tiny=_TINY,
        replicas=choose if in_kernel else None,
        expert_load=placing.expert_load,
        num_valid_tokens=placing.num_valid_tokens,
    )
    if choose is not None and not in_kernel:
        ids = choose(ids, num_valid_tokens=placing.num_valid_tokens)
    return ids, weights


def _weights(scores: Tensor, ids: Tensor, renormalise: bool, scale: float) -> Tensor:
    chosen = scores.gather(1, ids)
    if renormalise:
        chosen = chosen / (chosen.sum(dim=1, keepdim=True) + _TINY)
    return chosen * scale
