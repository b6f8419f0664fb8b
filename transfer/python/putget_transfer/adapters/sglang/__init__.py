"""A transfer backend for SGLang: `--disaggregation-transfer-backend putget`.

KV caches go from prefill servers to decode servers by `putget_transfer.kv`. Written for SGLang 0.5.23. An installed
package registers it by the entry point `sglang.srt.plugins`; without one, a launch script calls `install()` first.
Nothing of SGLang is imported before that. Options come from `PUTGET_KV_OPTIONS`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

NAME = "putget"
_UTILS = "sglang.srt.disaggregation.utils"
_DECODE = "sglang.srt.disaggregation.decode"
_CLASSES = {
    "MANAGER": ("manager", "PutgetKVManager"),
    "SENDER": ("sender", "PutgetKVSender"),
    "RECEIVER": ("receiver", "PutgetKVReceiver"),
    "BOOTSTRAP_SERVER": ("bootstrap", "PutgetKVBootstrapServer"),
}

__all__ = ["NAME", "install", "register"]


def register() -> None:
    """Tell SGLang the backend's name. SGLang calls it in each of its processes, and applies the hooks then."""
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    if NAME in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    choices.add_disagg_transfer_backend_choices([NAME])
    _add_member(importlib.import_module(_UTILS).TransferBackend)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    around = hooks.HookType.AROUND
    hooks.HookRegistry.register(f"{_UTILS}.get_kv_class", _kv_class, around)
    hooks.HookRegistry.register(f"{_DECODE}.DecodeTransferQueue.__init__", _hold_until_drained, around)


def install() -> None:
    """The same without an entry point: call it in each process, before SGLang reads its arguments."""
    register()
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()


def _add_member(kind: Any) -> None:
    """Have `TransferBackend("putget")` be a member of its own."""
    member = object.__new__(kind)
    member._name_, member._value_ = NAME.upper(), NAME
    missing = kind._missing_
    kind._missing_ = classmethod(lambda _, value: member if value == NAME else missing(value))


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Give the backend's own classes, and SGLang's for all other backends."""
    if transfer_backend.value != NAME or class_type.name not in _CLASSES:
        return original(transfer_backend, class_type)
    module, name = _CLASSES[class_type.name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def _hold_until_drained(original: Callable[..., None], queue: Any, *args: Any, **options: Any) -> None:
    """Have a failed request keep its pages until nothing can write to them, however long that takes.

    SGLang's timeout gives them to the next request although a write may still come.
    """
    original(queue, *args, **options)
    context = importlib.import_module("sglang.srt.runtime_context")
    if context.get_disagg().disaggregation_transfer_backend == NAME:
        queue.enable_deferred_kv_release = True
        queue.deferred_kv_release_timeout = math.inf
