"""Weights of a dense layer, by the names that DeepSeek-V3's checkpoints have, for the experts of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from putget.moe.experts import Bf16Experts, Fp8Experts
from putget.moe.grouped_fp8 import GROUP, check_multiple, dequantise_blocks
from putget.moe.router import Router

_FACTORS = ("gate_proj", "up_proj", "down_proj")


class DenseState:
    """The tensors of one dense layer.

    Args:
        tensors: By name: ``gate.weight`` [num_experts, hidden]; ``gate.e_score_correction_bias`` [num_experts], where
            the router has a bias; for each expert N ``experts.N.gate_proj.weight`` and ``up_proj`` [intermediate,
            hidden], ``down_proj`` [hidden, intermediate]; ``shared_experts.gate_proj.weight`` and so on. A
            float8_e4m3fn weight has its scales [rows / 128, columns / 128] beside it as ``weight_scale_inv``. Only what
            is needed is looked up.
        prefix: Of all names, such as ``model.layers.3.mlp.``.
    """

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = prefix

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor.

        Raises:
            ValueError: It is missing, or has another shape.
        """
        full = self._prefix + name
        if full not in self._tensors:
            raise ValueError(f"state has no {full}")
        found = self._tensors[full]
        if tuple(found.shape) != shape:
            raise ValueError(f"{full} has shape {list(found.shape)}, expected {list(shape)}")
        return found

    def router(self, router: Router) -> list[tuple[Tensor, Tensor]]:
        """Each parameter of a router, and its tensor here.

        Raises:
            ValueError: One is missing or has another shape.
        """
        named = (("gate.weight", router.weight), ("gate.e_score_correction_bias", router.correction_bias))
        return [(one, self.tensor(name, tuple(one.shape))) for name, one in named if one is not None]

    def network(self, name: str, hidden: int, intermediate: int) -> tuple[list[Tensor], list[Tensor] | None]:
        """Gate, up and down of one feed-forward network, and their scales where the weights are FP8.

        Raises:
            ValueError: One is missing or has another shape, or some but not all are FP8.
        """
        shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        weights = [
            self.tensor(f"{name}.{factor}.weight", shape) for factor, shape in zip(_FACTORS, shapes, strict=True)
        ]
        quantised = [weight.dtype == torch.float8_e4m3fn for weight in weights]
        if not any(quantised):
            return weights, None
        if not all(quantised):
            raise ValueError(f"{self._prefix}{name}: weights are {[str(w.dtype) for w in weights]}, expected one kind")
        check_multiple(f"{self._prefix}{name}: hidden_size", hidden)
        check_multiple(f"{self._prefix}{name}: intermediate_size", intermediate)
        scales = [
            self.tensor(f"{name}.{factor}.weight_scale_inv", (rows // GROUP, columns // GROUP))
            for factor, (rows, columns) in zip(_FACTORS, shapes, strict=True)
        ]
        return weights, scales


def load_router(router: Router, state: DenseState) -> None:
    """Copies the router's weight and bias."""
    for parameter, tensor in state.router(router):
        parameter.copy_(tensor)


def load_networks(
    experts: Bf16Experts | Fp8Experts,
    names: Sequence[str | None],
    state: DenseState,
    written: set[int] | None = None,
) -> None:
    """Copies feed-forward networks into experts 0, 1, ..., quantised or dequantised where the two differ.

    Experts whose name is None stay as they are. `written` gets each of the others before it changes.
    """
    require_networks(experts, names, state)
    write_networks(experts, names, state, set() if written is None else written)


def require_networks(experts: Bf16Experts | Fp8Experts, names: Sequence[str | None], state: DenseState) -> None:
    """Raises ValueError where a network is missing or has another shape, before anything is changed."""
    for name in names:
        if name is not None:
            state.network(name, experts.hidden_size, experts.down.shape[2])


def write_networks(
    experts: Bf16Experts | Fp8Experts, names: Sequence[str | None], state: DenseState, written: set[int]
) -> None:
    """The part of ``load_networks`` behind ``require_networks``."""
    for index, name in enumerate(names):
        if name is None:
            continue
        weights, scales = state.network(name, experts.hidden_size, experts.down.shape[2])
        written.add(index)
        if scales is not None and isinstance(experts, Fp8Experts):
            experts.load_codes(index, weights, scales)
            continue
        if scales is not None:
            weights = [dequantise_blocks(w, s.float()) for w, s in zip(weights, scales, strict=True)]
        gate, up, down = (weight.to(experts.down.device).float() for weight in weights)
        experts.load(index, gate, up, down)
