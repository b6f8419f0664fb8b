"""How far the pages of a prefill step have come when its next layer begins, seen inside of SGLang's scheduler."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

HEAD_DIM = 2048
"""With four heads, the keys and values of a chunk of 16 tokens have 1 MiB a layer: a portion of their own."""
WATCHED = 901
"""The room whose layers are watched."""
WAIT_S = 60.0


def landed(prefiller: Any) -> int:
    """The requests whose first portion has landed: the first layer of their first chunk."""
    lines = [line for line in prefiller.metrics_text().splitlines() if "_count" in line and "first_page" in line]
    return sum(int(line.split()[-1]) for line in lines)


def watch(out: Path) -> None:
    """Have the second layer of the watched room's first chunk begin when the first one has landed; note whether it has.

    Without layer-wise sending, the layer waits for nothing that comes: it goes on after `WAIT_S`, and the note says so.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.scheduler import Scheduler

    own_batch, own_forward = Scheduler.run_batch, RadixAttention.forward
    seen: list[int] = []
    step: dict[str, Any] = {"prefiller": None}

    def run_batch(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        if not seen and any(req.bootstrap_room == WATCHED for req in batch.reqs):
            step["prefiller"] = self.disagg_prefill_bootstrap_queue.kv_manager.sending.prefiller
            step["before"] = landed(step["prefiller"])
        try:
            return own_batch(self, batch, *args, **options)
        finally:
            if step["prefiller"] is not None:
                out.write_text(json.dumps(seen))
            step["prefiller"] = None

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        if step["prefiller"] is not None:
            end = time.monotonic() + WAIT_S
            while landed(step["prefiller"]) - step["before"] < self.layer_id and time.monotonic() < end:
                time.sleep(0.001)
            seen.append(landed(step["prefiller"]) - step["before"])
        return own_forward(self, *args, **options)

    Scheduler.run_batch, RadixAttention.forward = run_batch, forward
