"""The layer with no parallelism, in float32 and in plain torch: what ExpertParallelMoE is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

GROUP = 128
GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu}


def through_fp8(x: Tensor, rows: int) -> Tensor:
    """x [m, n] as it is after E4M3 with one scale for rows x 128 values."""
    blocks = x.double().view(x.shape[0] // rows, rows, x.shape[1] // GROUP, GROUP)
    scales = (blocks.abs().amax(dim=(1, 3), keepdim=True) / 448).float().clamp(min=1e-12)
    codes = (blocks.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scales).view(x.shape)


@dataclass(frozen=True)
class Dense:
    """A dense layer whose weights follow from a seed, so that every rank can make them.

    Attributes:
        groups: (num_groups, topk_groups) of sigmoid routing, or None for softmax.
        shared: intermediate size of the shared experts, or 0.
        fp8: weights and rows are what FP8 leaves of them; what lies between the products is not.
    """

    hidden: int = 128
    intermediate: int = 128
    num_experts: int = 8
    top_k: int = 2
    groups: tuple[int, int] | None = None
    shared: int = 0
    fp8: bool = False
    gate: str = "silu"
    seed: int = 0

    def state(self) -> dict[str, Tensor]:
        """BF16 weights by the names of DeepSeek-V3's checkpoints."""
        generator = torch.Generator().manual_seed(self.seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * columns**-0.5).bfloat16()

        state = {"gate.weight": matrix(self.num_experts, self.hidden)}
        if self.groups is not None:
            state["gate.e_score_correction_bias"] = torch.randn(self.num_experts, generator=generator) * 0.1
        sizes = {f"experts.{expert}": self.intermediate for expert in range(self.num_experts)}
        if self.shared:
            sizes["shared_experts"] = self.shared
        for name, size in sizes.items():
            state[f"{name}.gate_proj.weight"] = matrix(size, self.hidden)
            state[f"{name}.up_proj.weight"] = matrix(size, self.hidden)
            state[f"{name}.down_proj.weight"] = matrix(self.hidden, size)
        return state

    def tokens(self, rank: int, num_tokens: int, round_: int = 0) -> Tensor:
        """[num_tokens, hidden] bfloat16."""
        generator = torch.Generator().manual_seed(self.seed * 7919 + rank * 101 + round_ + 1)
        return torch.randn(num_tokens, self.hidden, generator=generator).bfloat16()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """ids and weights of each token's experts."""
        state = self.state()
        logits = x.float() @ state["gate.weight"].float().T
        if self.groups is None:
            scores = torch.softmax(logits, dim=1)
            weights, ids = scores.topk(self.top_k)
            return ids, weights / weights.sum(1, keepdim=True)
        num_groups, topk_groups = self.groups
        scores = torch.sigmoid(logits)
        biased = scores + state["gate.e_score_correction_bias"]
        by_group = biased.view(len(x), num_groups, self.num_experts // num_groups)
        best = by_group.topk(min(2, by_group.shape[2])).values.sum(2).topk(topk_groups).indices
        for token, groups in enumerate(best.tolist()):
            for group in set(range(num_groups)) - set(groups):
                by_group[token, group] = -torch.inf
        ids = by_group.flatten(1).topk(self.top_k).indices
        weights = scores.gather(1, ids)
        return ids, 2.5 * weights / weights.sum(1, keepdim=True)

    def forward(self, x: Tensor, num_valid: int | None = None) -> Tensor:
        """[num_tokens, hidden] float32; tokens from num_valid on have shared experts only."""
        ids, weights = self.route(x)
        state = self.state()
        rows = through_fp8(x, 1) if self.fp8 and len(x) else x.float()
        out = torch.zeros(len(x), self.hidden)
        for token in range(len(x) if num_valid is None else num_valid):
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                out[token] += weight * self._network(state, f"experts.{expert}", rows[token : token + 1])[0]
        if self.shared:
            out += self._network(state, "shared_experts", rows)
        return out

    def _network(self, state: dict[str, Tensor], name: str, rows: Tensor) -> Tensor:
        gate, up, down = (state[f"{name}.{factor}_proj.weight"].float() for factor in ("gate", "up", "down"))
        if self.fp8:
            gate, up, down = (through_fp8(weight, GROUP) for weight in (gate, up, down))
        return (GATES[self.gate](rows @ gate.T) * (rows @ up.T)) @ down.T


def relative_error(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a token, by the Euclidean norm; 0 where there are none."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    if not len(want):
        return 0.0
    error = (got.cpu().float() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    return float(error.max())
