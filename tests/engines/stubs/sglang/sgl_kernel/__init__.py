"""A stand-in for SGLang's kernels, which have no build for a CPU: what is imported from here is not called."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    return missing
