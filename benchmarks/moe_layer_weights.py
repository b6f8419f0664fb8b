"""Weights of the benchmark's layer, which follow from the seed alone, and the dense layer in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from putget.moe import grouped_fp8
from putget.moe.router import GroupLimitedRouting


@dataclass(frozen=True)
class ModelShape:
    """The layer.

    Attributes:
        weights: "fp8" or "bf16".
        shared: whether there is a shared expert, as large as the others.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_groups: int
    topk_groups: int
    weights: str
    shared: bool = True


class State(Mapping[str, Tensor]):
    """A dense layer's state whose tensors are made when they are asked for: no rank holds all of them."""

    def __init__(self, shape: ModelShape, seed: int, device: torch.device) -> None:
        self._shape = shape
        self._seed = seed
        self._device = device
        self._made: tuple[str, dict[str, Tensor]] = ("", {})

    def __getitem__(self, name: str) -> Tensor:
        network, _, _ = name.rpartition("_proj.")
        network = network.rpartition(".")[0] or name
        if self._made[0] != network:
            self._made = (network, self._make(network))
        return self._made[1][name]

    def _make(self, network: str) -> dict[str, Tensor]:
        shape, device = self._shape, self._device
        number = {"shared_experts": -1, "gate.weight": -2, "gate.e_score_correction_bias": -3}.get(network)
        number = int(network.rpartition(".")[2]) if number is None else number
        generator = torch.Generator(device).manual_seed(self._seed * 1_000_003 + 10 + number)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5

        if network == "gate.weight":
            return {network: matrix(shape.num_experts, shape.hidden).bfloat16()}
        if network == "gate.e_score_correction_bias":
            return {network: torch.randn(shape.num_experts, generator=generator, device=device) * 0.01}
        made = {}
        for factor in ("gate", "up", "down"):
            sizes = (shape.hidden, shape.intermediate) if factor == "down" else (shape.intermediate, shape.hidden)
            weight = matrix(*sizes)
            name = f"{network}.{factor}_proj.weight"
            if shape.weights == "fp8":
                made[name], made[f"{name}_scale_inv"] = grouped_fp8.quantise_blocks(weight)
            else:
                made[name] = weight.bfloat16()
        return made

    def __contains__(self, name: object) -> bool:
        text = str(name)
        return not text.endswith("_scale_inv") or self._shape.weights == "fp8"

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError("tensors are asked for by name")

    def __len__(self) -> int:
        raise NotImplementedError("tensors are asked for by name")


def make_state(shape: ModelShape, seed: int, device: torch.device) -> Mapping[str, Tensor]:
    """The dense layer's state."""
    return State(shape, seed, device)


def route(shape: ModelShape, seed: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """ids and weights [num_tokens, top_k] that the layer's router gives."""
    state = make_state(shape, seed, x.device)
    logits = x.float() @ state["gate.weight"].float().T
    rule = GroupLimitedRouting(shape.num_groups, shape.topk_groups)
    return rule.route(logits, shape.top_k, state["gate.e_score_correction_bias"])


def choose_by_zipf(shape: ModelShape, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """ids and weights [num_tokens, top_k]: expert e is asked for at random, 1 / (e + 1) as often as the first."""
    likely = 1.0 / torch.arange(1, shape.num_experts + 1, device=x.device)
    ids = torch.multinomial(likely.expand(len(x), -1), shape.top_k, generator=generator)
    return ids.int(), torch.full(ids.shape, 1.0 / shape.top_k, device=x.device)


def dense_output(shape: ModelShape, seed: int, x: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
    """[num_tokens, hidden] float32: the layer with no parallelism, on rows and weights as FP8 leaves them."""
    state = make_state(shape, seed, x.device)
    ids, weights = chosen
    rows = x.float()
    if shape.weights == "fp8":
        rows = grouped_fp8.dequantise_rows(*grouped_fp8.quantise_rows(x))
    out = _network(state, "shared_experts", rows) if shape.shared else torch.zeros_like(rows)
    for token, row in enumerate(rows):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            out[token] += weight * _network(state, f"experts.{expert}", row[None])[0]
    return out


def _network(state: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
    def weight(factor: str) -> Tensor:
        full = f"{name}.{factor}_proj.weight"
        codes = state[full]
        if f"{full}_scale_inv" in state:
            return grouped_fp8.dequantise_blocks(codes, state[f"{full}_scale_inv"])
        return codes.float()

    return (silu(rows @ weight("gate").T) * (rows @ weight("up").T)) @ weight("down").T
