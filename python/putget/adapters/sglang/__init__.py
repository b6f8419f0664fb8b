"""SGLang: ``--moe-a2a-backend putget``, and ``--enable-eplb`` planned by putget, with ``PUTGET_ENGINES=1``.

SGLang finds the entry point in the group ``sglang.srt.plugins``. (``SGLANG_PLUGINS`` restricts which plug-ins it
loads.) Without the variable it changes nothing; with it, SGLang knows one more all-to-all backend, ``putget``, putget's
planner stands where SGLang's ``rebalance_experts`` was, and putget moves the experts. All other names keep their
meaning.

``install()`` puts putget's dispatcher under the name ``flashinfer`` instead, by hand. Versions without plug-ins need
these lines at the top of the launch script, which SGLang's worker processes run too:

    from putget.adapters import sglang
    sglang.install()
    sglang.install_planner()
    sglang.install_mover()

To keep SGLang's own dispatcher and change only what is under it, call ``putget.adapters.flashinfer.install()`` instead.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

from putget import BackendUnavailable, config
from putget.adapters.engines import replace_name, require_arguments, require_names, require_version, when_imported
from putget.adapters.sglang import backend, mover, planner
from putget.adapters.sglang.dispatcher import MODULE, DispatcherRounds

_NEEDED = ("BaseDispatcher", "FlashinferDispatchOutput", "FlashinferDispatcher", "StandardTopKOutput")


def require_sglang() -> str:
    """The version of SGLang that is installed.

    Raises:
        BackendUnavailable: There is none, or one that putget does not know; the message names what is supported.
    """
    return require_version("SGLang", ["sglang"], "0.5.9", "1", proven_before="0.5.24")


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
    """The entry point: with ``PUTGET_ENGINES=1`` SGLang knows the backend ``putget``; putget plans, and moves experts.

    Without the variable it does nothing. A planner or a mover that is not known stays SGLang's own: that is logged, and
    the backend is there all the same.

    Raises:
        BackendUnavailable: This SGLang is not known; SGLang reports it, and does not know the backend.
    """
    if not config.carries_engines():
        return
    require_sglang()
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    try:
        own = importlib.import_module(planner.MODULE)
        require_names("SGLang", own, [planner.NAME])
        planned = planner.planner(getattr(own, planner.NAME))
    except (BackendUnavailable, ImportError) as error:
        logging.getLogger("sglang.putget").error("the planner of expert placement stays SGLang's own: %s", error)
    else:
        target = f"{planner.MODULE}.{planner.NAME}"
        hooks.HookRegistry.register(target, planned, hooks.HookType.REPLACE)
    when_imported(mover.MODULE, _mover_or_log)
    backend.put_in_place()


def _mover_or_log(_: ModuleType) -> None:
    try:
        install_mover()
    except BackendUnavailable as error:
        logging.getLogger("sglang.putget").error("experts are moved by SGLang itself: %s", error)


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
    replace_name(planner.MODULE, planner.NAME, planner.planner, engine="SGLang")


def install_mover() -> None:
    """Has experts of ``--enable-eplb`` move through putget, without hooks, in every process that uses SGLang's modules.

    Raises:
        BackendUnavailable: This SGLang is not known.
    """
    require_sglang()
    replace_name(mover.MODULE, mover.NAME, mover.mover, engine="SGLang")
