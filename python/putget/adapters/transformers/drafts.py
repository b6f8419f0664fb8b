"""Draft layers of transformers (multi-token prediction): kept, so that their experts can be spread."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from putget import BackendUnavailable

_MODULE = "transformers.modeling_layers"


def load_drafts(model: Any) -> Any:
    """The draft layers of a model, from its checkpoint, as ``generate(use_mtp=True)`` loads them in each call.

    Raises:
        ValueError: The model has none.
        BackendUnavailable: This transformers has none.
    """
    config = model.config.get_text_config()
    if not getattr(config, "num_mtp_layers", None):
        raise ValueError(f"use_mtp is True, but {type(config).__name__} has no num_mtp_layers: leave use_mtp out")
    first = config.num_hidden_layers
    # transformers looks for draft layers by the number of layers of the models that were released.
    layers = {rf"model\.layers\.{number}\." for number in range(first, first + config.num_mtp_layers)}
    model._keys_to_ignore_on_load_unexpected = layers.union(model._keys_to_ignore_on_load_unexpected or ())
    device = next(model.parameters()).device
    return _kind().from_pretrained(model, device_map={"": device}).eval()


@contextlib.contextmanager
def kept_drafts(model: Any, drafts: Any) -> Iterator[None]:
    """Inside of it ``generate(use_mtp=True)`` of this model takes these draft layers in place of loading them."""
    kind = _kind()
    load = kind.__dict__["from_pretrained"]

    def find(main_model: Any, *args: Any, **options: Any) -> Any:
        return drafts if main_model is model else load.__get__(None, kind)(main_model, *args, **options)

    kind.from_pretrained = staticmethod(find)
    try:
        yield
    finally:
        kind.from_pretrained = load


def _kind() -> Any:
    kind = getattr(importlib.import_module(_MODULE), "MtpModel", None)
    if kind is None:
        raise BackendUnavailable("this transformers has no MtpModel: leave use_mtp out")
    return kind
