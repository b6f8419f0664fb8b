"""Two-batch overlap: SGLang splits a forward into two batches, and one computes while rows of the other travel.

Each batch has rounds of its own. What SGLang tells of all ranks' tokens, it tells of the whole forward: the batches
know no counts. So putget looks at the forward when SGLang splits it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from putget.adapters.engines import require_names, when_imported

MODULE = "sglang.srt.batch_overlap.two_batch_overlap"
_UTILS = "sglang.srt.layers.moe.utils"
_PREPARER, _SPLIT = "TboForwardBatchPreparer", "prepare_raw"

_most_tokens: int | None = None


def num_batches() -> int:
    """How many batches of one forward have rounds that overlap: 2 with ``--enable-two-batch-overlap``, else 1."""
    utils = importlib.import_module(_UTILS)
    return 2 if hasattr(utils, "is_tbo_enabled") and utils.is_tbo_enabled() else 1


def most_tokens() -> int | None:
    """The most tokens that any rank has in one batch of the forward that was split last; None: not known."""
    return _most_tokens


def watch_splits() -> None:
    """Looks at each forward that SGLang splits, once its module is imported. Idempotent.

    Raises:
        BackendUnavailable: This SGLang splits forwards elsewhere.
    """
    when_imported(MODULE, _watch)


def _watch(module: ModuleType) -> None:
    require_names("SGLang", module, [_PREPARER])
    preparer = getattr(module, _PREPARER)
    require_names("SGLang", preparer, [_SPLIT])
    original = getattr(preparer, _SPLIT)
    if getattr(original, "__module__", "") == __name__:
        return

    def prepare_raw(cls: Any, batch: Any, *args: Any, **options: Any) -> Any:
        global _most_tokens
        _most_tokens = _most_of(batch)
        return original(batch, *args, **options)

    prepare_raw.__module__ = __name__
    setattr(preparer, _SPLIT, classmethod(prepare_raw))


def _most_of(batch: Any) -> int | None:
    """The most tokens of a rank in one of the two batches, from the counts of the whole."""
    counts = batch.global_num_tokens_padded_cpu
    if counts is None:
        counts = batch.global_num_tokens_cpu
    if counts is None:
        return None
    most: int = max(counts)
    mode = batch.global_forward_mode
    if mode is None or not mode.is_decode():
        return most  # prompts are cut anywhere
    # A rank's own requests are halved, and what pads them to the others' number is in the second batch.
    fewest: int = min(batch.original_global_num_tokens_cpu or counts)
    return most - fewest // 2
