"""Layer-wise sending: which layers of a prefill step are computed, from hooks around SGLang's own calls.

`Scheduler.run_batch` brackets a step, and `RadixAttention.forward` ends a layer's attention. Pages of a layer leave
then, without Python, while the next layers are computed. `Sending.add` comes afterwards, as it does without hooks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.common import kv_to_page_indices

from putget_transfer.adapters.sglang.sender import PutgetKVSender
from putget_transfer.adapters.sglang.sending import Sending


class Step:
    """A prefill step under way: what it computes, and how far it has come."""

    def __init__(self, scheduler: Any, batch: Any, manager: Any) -> None:
        self.scheduler, self.batch, self.manager = scheduler, batch, manager
        self.sending: Sending = manager.sending
        self.begun: bool | None = None
        """None: no layer of it has been computed."""

    def pages_of(self, req: Any) -> Sequence[int]:
        """Return a request's pages behind those of the decode server, up to the end of this step."""
        scheduler, tokens = self.scheduler, len(req.origin_input_ids)
        pool, page = scheduler.token_to_kv_pool_allocator, scheduler.token_to_kv_pool_allocator.page_size
        end = min(req.extend_end, tokens)
        if end < tokens:
            # The last page is not full before the next step.
            end -= end % page
        first = req.disagg_decode_prefix_len
        rows = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, first : max(first, end)]
        pages: Sequence[int] = kv_to_page_indices(pool.translate_kv_indices_for_transfer(rows), page)
        return pages

    def begin(self) -> None:
        """Say what the step computes, before its first layer."""
        # SGLang's health checks have senders that send nothing, and any room.
        mine = [
            req
            for req in self.batch.reqs
            if not req.pending_bootstrap and isinstance(req.disagg_kv_sender, PutgetKVSender)
        ]
        self.begun = self.sending.begin([(req.bootstrap_room, self.pages_of(req)) for req in mine])

    def layer_done(self, layer: int) -> None:
        """Say that a layer of the step is computed. Draft layers are not known by number: they end with the step."""
        if self.begun and layer <= self.manager.last_layer:
            self.sending.prefiller.layer_done(layer)

    def end(self) -> None:
        """Say that all layers are computed."""
        if self.begun:
            self.sending.all_done()


_step: Step | None = None


def install() -> None:
    """Put the hooks in place, once in a process that computes prompts."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    for target, hook in HOOKS.items():
        if target not in hooks.HookRegistry._patched:
            hooks.HookRegistry.register(target, hook, hooks.HookType.AROUND)
    hooks.HookRegistry.apply_hooks()


def step_of(scheduler: Any, batch: Any) -> Step | None:
    """Return a batch's step, if its pages leave by layer: on a CPU, where a call returns when it has computed.

    If two batches take turns, a layer has two calls. Their pages leave by chunk.
    """
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    manager = getattr(queue, "kv_manager", None)
    mode = batch.forward_mode
    whole = mode.is_extend() and not mode.is_split_prefill() and batch.tbo_split_seq_index is None
    return Step(scheduler, batch, manager) if whole and hasattr(manager, "last_layer") else None


def around_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **options: Any) -> Any:
    """Bracket `Scheduler.run_batch`."""
    global _step
    outer, _step = _step, step_of(scheduler, batch)
    try:
        result = original(scheduler, batch, *args, **options)
        if _step is not None:
            _step.end()
        return result
    finally:
        _step = outer


def around_attention(original: Callable[..., Any], layer: Any, *args: Any, **options: Any) -> Any:
    """Bracket `RadixAttention.forward`: its keys and values are in their pages when it returns."""
    if _step is None:
        return original(layer, *args, **options)
    if _step.begun is None:
        _step.begin()
    result = original(layer, *args, **options)
    _step.layer_done(layer.layer_id)
    return result


HOOKS = {
    "sglang.srt.managers.scheduler.Scheduler.run_batch": around_batch,
    "sglang.srt.layers.radix_attention.RadixAttention.forward": around_attention,
}
