"""vLLM: ``--all2all-backend flashinfer_nvlink_one_sided`` on putget.

Installing putget beside vLLM is the whole switch: vLLM finds the entry point in the group ``vllm.general_plugins``, and
putget's modular prepare-and-finalize stands where FlashInfer's one-sided one was. (``VLLM_PLUGINS`` restricts which
plug-ins vLLM loads.) ``install()`` does the same by hand.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from putget import BackendUnavailable
from putget.adapters.engines import replace_name, require_arguments, require_names, require_version
from putget.adapters.vllm_prepare_finalize import PrepareFinalizeRounds

MODULE = "vllm.model_executor.layers.fused_moe.prepare_finalize.flashinfer_nvlink_one_sided"
_NAME = "FlashInferNVLinkOneSidedPrepareAndFinalize"
_KERNEL = "vllm.model_executor.layers.fused_moe.modular_kernel"
_NEEDED = ("FusedMoEActivationFormat", "FusedMoEPrepareAndFinalizeModular")


def require_vllm() -> str:
    """The version of vLLM that is installed.

    Raises:
        BackendUnavailable: There is none, or one that putget does not know; the message names what is supported.
    """
    return require_version("vLLM", ["vllm"], "0.33", "0.34")


def prepare_finalize_class(original: Any, *, low_precision_combine: bool = False) -> type:
    """A prepare-and-finalize on putget with vLLM's base class and the arguments of its one-sided one.

    Args:
        original: vLLM's FlashInferNVLinkOneSidedPrepareAndFinalize.
        low_precision_combine: As for ``install``.

    Raises:
        BackendUnavailable: This vLLM has other names or arguments than putget knows.
    """
    kernel = importlib.import_module(_KERNEL)
    require_names("vLLM", kernel, _NEEDED)
    namespace = {
        "engine_module": kernel,
        "low_precision_combine": low_precision_combine,
        "__doc__": PrepareFinalizeRounds.__doc__,
    }
    bases = (PrepareFinalizeRounds, kernel.FusedMoEPrepareAndFinalizeModular)
    kind = type("PutgetPrepareAndFinalize", bases, namespace)
    require_arguments("vLLM", original, kind)
    return kind


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


def plugin() -> None:
    """The entry point.

    A vLLM that is not known keeps its own all-to-all: that is logged and nothing is raised, because vLLM calls the
    plug-ins of everything that is installed, whether the model needs them or not.
    """
    try:
        install()
    except BackendUnavailable as error:
        logging.getLogger("putget").error("flashinfer_nvlink_one_sided stays vLLM's own: %s", error)
