"""verl's checkpoint engine `putget`, on `putget_transfer.weights`: verl imports this package and finds it registered.

Written for verl 0.9: `checkpoint_engine.custom_backend_module=putget_transfer.adapters.verl`.
"""

from __future__ import annotations

from verl.checkpoint_engine.base import CheckpointEngineRegistry

from putget_transfer.adapters.verl.engine import NAME, PutgetCheckpointEngine

__all__ = ["NAME", "PutgetCheckpointEngine"]

CheckpointEngineRegistry.register(NAME)(PutgetCheckpointEngine)
