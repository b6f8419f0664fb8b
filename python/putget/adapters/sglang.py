"""SGLang: ``--moe-a2a-backend flashinfer`` and ``--enable-eplb`` on putget, with ``PUTGET_ENGINES=1``.

SGLang finds the entry point in the group ``sglang.srt.plugins``. (``SGLANG_PLUGINS`` restricts which plug-ins it
loads.) Without the variable it changes nothing; with it, ``PutgetDispatcher`` stands where SGLang's
FlashinferDispatcher was, and putget's planner where SGLang's ``rebalance_experts`` was. Versions without plug-ins need
these lines at the top of the launch script, which SGLang's worker processes run too:

    from putget.adapters import sglang
    sglang.install()
    sglang.install_planner()

To keep SGLang's own dispatcher and change only what is under it, call ``putget.adapters.flashinfer.install()`` instead.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from putget import BackendUnavailable, config
from putget.adapters import sglang_planner
from putget.adapters.engines import replace_name, require_arguments, require_names, require_version
from putget.adapters.sglang_dispatcher import MODULE, DispatcherRounds

_NEEDED = ("BaseDispatcher", "FlashinferDispatchOutput", "FlashinferDispatcher", "StandardTopKOutput")


def require_sglang() -> str:
    """The version of SGLang that is installed.

    Raises:
        BackendUnavailable: There is none, or one that putget does not know; the message names what is supported.
    """
    return require_version("SGLang", ["sglang"], "0.5.9", "0.6")


def dispatcher_class(original: Any, *, recipe: str | None = None, low_precision_combine: bool = False) -> type:
    """A dispatcher on putget with the base class and the arguments of SGLang's FlashinferDispatcher.

    Args:
        original: SGLang's FlashinferDispatcher.
        recipe: What dispatch carries; see ``DispatcherRounds``.
        low_precision_combine: As for ``install``.

    Raises:
        BackendUnavailable: This SGLang has other names or arguments than putget knows.
    """
    module = importlib.import_module(original.__module__)
    require_names("SGLang", module, _NEEDED)
    namespace = {
        "recipe": recipe,
        "low_precision_combine": low_precision_combine,
        "engine_module": module,
        "__doc__": DispatcherRounds.__doc__,
    }
    kind = type("PutgetDispatcher", (DispatcherRounds, module.BaseDispatcher), namespace)
    require_arguments("SGLang", original, kind)
    return kind


def plugin() -> None:
    """The entry point: with ``PUTGET_ENGINES=1`` it registers the replacements with SGLang's hooks, else nothing.

    A planner that is not known stays SGLang's own: that is logged, and the dispatcher is registered all the same.

    Raises:
        BackendUnavailable: This SGLang is not known; SGLang reports it and goes on with its own dispatcher.
    """
    if not config.carries_engines():
        return
    require_sglang()
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    try:
        own = importlib.import_module(sglang_planner.MODULE)
        require_names("SGLang", own, [sglang_planner.NAME])
        planner = sglang_planner.planner(getattr(own, sglang_planner.NAME))
    except (BackendUnavailable, ImportError) as error:
        logging.getLogger("sglang.putget").error("the planner of expert placement stays SGLang's own: %s", error)
    else:
        target = f"{sglang_planner.MODULE}.{sglang_planner.NAME}"
        hooks.HookRegistry.register(target, planner, hooks.HookType.REPLACE)
    original = importlib.import_module(MODULE).FlashinferDispatcher
    target = f"{MODULE}.FlashinferDispatcher"
    hooks.HookRegistry.register(target, dispatcher_class(original), hooks.HookType.REPLACE)


def install(*, recipe: str | None = None, low_precision_combine: bool = False) -> None:
    """The same without SGLang's hooks, before or after SGLang's modules are imported, in every process that uses them.

    Args:
        recipe: What dispatch carries: "bf16", "nvfp4" or "mxfp8"; None: what SGLang would send.
        low_precision_combine: Rows come back as E4M3 with one float32 scale for 128 values, half of the bytes.

    Raises:
        ValueError: recipe is none of these.
        BackendUnavailable: This SGLang is not known.
    """
    if recipe not in (None, "bf16", "nvfp4", "mxfp8"):
        raise ValueError(f"recipe is {recipe!r}, allowed are None, 'bf16', 'nvfp4' and 'mxfp8'")
    require_sglang()
    make = functools.partial(dispatcher_class, recipe=recipe, low_precision_combine=low_precision_combine)
    replace_name(MODULE, "FlashinferDispatcher", make, engine="SGLang")


def install_planner() -> None:
    """Puts putget's planner where SGLang's ``rebalance_experts`` was, which ``--enable-eplb`` calls; without hooks.

    Before or after SGLang's modules are imported, in every process that uses them.

    Raises:
        BackendUnavailable: This SGLang is not known.
    """
    require_sglang()
    replace_name(sglang_planner.MODULE, sglang_planner.NAME, sglang_planner.planner, engine="SGLang")
