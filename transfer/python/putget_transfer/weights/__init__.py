"""Weights from sharded trainers into running rollout engines, on the transfer engine.

Method: section 5 of "RDMA Point-to-Point Communication for LLM Systems". The planner and the write stage are the Rust
crate `putget_transfer_weights`. torch is imported when it is used.
"""

import putget_transfer._native  # noqa: F401 - makes the compiled part below known
from putget_transfer.weights._controller import Controller
from putget_transfer.weights._describe import describe
from putget_transfer.weights._model import Layout, Param, Shard, Slot, Slots, UpdateFailed, merge
from putget_transfer.weights._native import Schedule, Task
from putget_transfer.weights._plan import plan
from putget_transfer.weights._quantise import quantise
from putget_transfer.weights._record import Entry, checkpoint, record
from putget_transfer.weights._report import Report
from putget_transfer.weights._rollout import Rollout
from putget_transfer.weights._trainer import Trainer

__all__ = [
    "Controller",
    "Entry",
    "Layout",
    "Param",
    "Report",
    "Rollout",
    "Schedule",
    "Shard",
    "Slot",
    "Slots",
    "Task",
    "Trainer",
    "UpdateFailed",
    "checkpoint",
    "describe",
    "merge",
    "plan",
    "quantise",
    "record",
]
