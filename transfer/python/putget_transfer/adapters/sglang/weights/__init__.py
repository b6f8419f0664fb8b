"""Weight updates of SGLang's servers on `putget_transfer.weights`: `--custom-weight-loader` with the name `LOADER`.

Written for SGLang 0.5.23. A trainer imports `Trainer` and `TrainerInit` from here. A version lands beside serving, in a
second copy. SGLang's weight-update session, in which the copy moves into the model, is as short as that.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

LOADER = f"{__name__}.load"
"""The loader's name, for `--custom-weight-loader` and as `load_format`."""
_PARTS = {"HTTPClient": "client", "Trainer": "trainer", "TrainerInit": "trainer"}

__all__ = ["LOADER", "HTTPClient", "Trainer", "TrainerInit", "load"]


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Take a call of a trainer: SGLang's own loader of weights, which carries no weights here."""
    importlib.import_module(f"{__name__}.worker").load(model, named_tensors)


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PARTS[name]}"), name)
