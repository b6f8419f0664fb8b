"""A whole layer as one torch operator, so that ``torch.compile`` traces a model without a graph break.

The operator is ``torch.ops.putget.moe_layer``. What it returns is a tensor of its own, so nothing is copied out of the
workspace or into it, as ``putget.ops`` has to.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from putget.errors import ProtocolMisuse


class Layer(Protocol):
    """The function that the operator calls."""

    def run(self, x: Tensor, num_valid_tokens: Tensor | None) -> Tensor:
        """The layer, [num_tokens, hidden_size] to the same."""


_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keys = itertools.count(1)


class LayerOperator:
    """The operator of one layer, which must live as long as this is used."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        self._key = next(_keys)
        _layers[self._key] = layer
        # The operator is said to change it: that keeps calls in order, and keeps a compiler from leaving one out.
        self._state = torch.zeros(1, dtype=torch.uint8, device=device)

    def __call__(self, x: Tensor, num_valid_tokens: Tensor | None) -> Tensor:
        """See ``Layer.run``."""
        result: Tensor = torch.ops.putget.moe_layer(self._key, self._state, x, num_valid_tokens)
        return result


def _run(key: int, state: Tensor, x: Tensor, num_valid_tokens: Tensor | None) -> Tensor:
    layer = _layers.get(key)
    if layer is None:
        raise ProtocolMisuse("the layer of this operator is gone")
    result: Tensor = layer.run(x, num_valid_tokens)
    return result


def _shape(key: int, state: Tensor, x: Tensor, num_valid_tokens: Tensor | None) -> Tensor:
    return torch.empty_like(x)


def _register() -> Any:
    library: Any = torch.library.Library("putget", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("moe_layer(int key, Tensor(a!) state, Tensor x, Tensor? num_valid_tokens) -> Tensor")
    for backend in ("CPU", "CUDA"):
        library.impl("moe_layer", _run, backend)
    torch.library.register_fake("putget::moe_layer", _shape, lib=library)
    return library


_library = _register()  # the operator lives as long as this
