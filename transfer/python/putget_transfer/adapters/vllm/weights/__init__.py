"""vLLM's weight-transfer API on `putget_transfer.weights`: backend "putget" of both of its factories.

Written for vLLM 0.33. In vLLM's processes the entry point `vllm.general_plugins` registers the worker's half; a trainer
imports `TrainerInit` from here, which registers both. Nothing of vLLM is imported before.
"""

from typing import Any

BACKEND = "putget"
WORKER = f"{__name__}.worker"
TRAINER = f"{__name__}.trainer"

__all__ = ["BACKEND", "TrainerInit", "register"]


def register() -> None:
    """Tell both of vLLM's factories the backend's name. A second call has no effect."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WORKER, "PutgetWeightTransferEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, TRAINER, "PutgetTrainerWeightTransferEngine")


def __getattr__(name: str) -> Any:
    if name != "TrainerInit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from putget_transfer.adapters.vllm.weights.trainer import TrainerInit

    register()
    return TrainerInit
