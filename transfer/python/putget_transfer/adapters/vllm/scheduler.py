"""The half of the connector that lives in vLLM's scheduler: which tokens and blocks, never their bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import RequestStatus

from putget_transfer.adapters.options import Options
from putget_transfer.adapters.vllm.metadata import Ask, Blocks, Handshake, Metadata, Work, remote_of, text_of

logger = init_logger(__name__)

RENEWALS = 5
"""How often a lease is renewed while it lasts."""


@dataclass
class _Prefill:
    """A request that another server decodes."""

    request: Any
    name: str
    tokens: int
    begun: bool = False


def computes_last_token(kv_cache_config: Any) -> bool:
    """Whether the decode server computes a prompt's last token, and the prefill server leaves it out.

    A decode server computes a prompt's last token again for its logits. A window's oldest token that this needs is
    outside of the window once the prefill server has computed the last token, too.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
    return any(not isinstance(spec, (FullAttentionSpec, UniformTypeKVCacheSpecs)) for spec in specs)


class Scheduler:
    """The questions that the scheduler asks the connector."""

    def __init__(self, kv_cache_config: Any, options: Options) -> None:
        self.config, self.options = kv_cache_config, options
        self.backoff = 1 if computes_last_token(kv_cache_config) else 0
        self.sources: list[str] = []
        self.prefills: dict[str, _Prefill] = {}
        self.waiting: dict[str, Any] = {}
        """Requests with a remote prefill that have not asked yet."""
        self.names: dict[str, str] = {}
        """Names that are taken, by request."""
        self.asked: set[str] = set()
        self.next = Metadata()
        self.renewed_at = 0.0

    def handshake(self, metadata: dict[tuple[int, int], Handshake]) -> None:
        """Keep the ranks of this server, by pipeline stage and tensor-parallel rank."""
        self.sources = [text_of(metadata[rank].source) for rank in sorted(metadata)]

    def prompt_tokens(self, request: Any) -> int:
        """Return how many tokens of a prompt move."""
        return max(int(request.num_prompt_tokens) - self.backoff, 0)

    def new_request(self, request: Any) -> None:
        """Note what another server has to do with a request."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            name = params.setdefault("transfer_id", request.request_id)
            wrong = "is no request's name" if not isinstance(name, str) or not name else ""
            if wrong or name in self.names.values():
                wrong = wrong or "is another request's"
                logger.warning("%s: transfer_id %r %s; it is not handed over", request.request_id, name, wrong)
                params["do_remote_decode"] = False
                return
            self.truncate(request)
            self.names[request.request_id] = name
            self.prefills[request.request_id] = _Prefill(request, name, int(request.num_prompt_tokens))
            return
        try:
            remote = remote_of(params)
        except ValueError as error:
            logger.warning("%s: %s. It is computed here", request.request_id, error)
            params["do_remote_prefill"] = False
            return
        if remote is None:
            return
        if remote.name in self.names.values():
            # One of several completions of a prompt is handed over.
            params["do_remote_prefill"] = False
            return
        self.names[request.request_id] = remote.name
        self.waiting[request.request_id] = remote

    def truncate(self, request: Any) -> None:
        """Leave out the token that the decode server computes."""
        if not self.backoff or request.num_prompt_tokens <= self.backoff or request.prompt_token_ids is None:
            return
        del request.prompt_token_ids[-self.backoff :]
        del request._all_token_ids[-self.backoff :]
        request.num_prompt_tokens -= self.backoff
        request.max_tokens = 1

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Return how many tokens come from another server behind those that are here."""
        if request.request_id not in self.waiting:
            return 0, False
        count = self.prompt_tokens(request) - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Ask for a request, now that it has blocks."""
        remote = self.waiting.pop(request.request_id, None)
        if remote is None:
            return
        request.kv_transfer_params["do_remote_prefill"] = False
        tokens = self.prompt_tokens(request)
        chosen = self.config.select_transfer_block_ids(blocks.get_block_ids()) if external else ()
        ask = Ask(request.request_id, remote.name, remote.sources, tokens, tokens - external, chosen, external > 0)
        self.next.asks.append(ask)
        if external:
            self.asked.add(request.request_id)

    def received(self, request_ids: set[str]) -> None:
        """Note that requests wait no longer."""
        self.asked -= request_ids

    def build(self, output: Any) -> Metadata:
        """Return what the workers have to know for a step."""
        metadata, self.next = self.next, Metadata()
        for request_id in output.preempted_req_ids or ():
            prefill = self.prefills.get(request_id)
            if prefill is not None and prefill.begun:
                metadata.preempted.append(prefill.name)
        for data in output.scheduled_new_reqs:
            self.compute(metadata, output, data.req_id, data.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.compute(metadata, output, request_id, computed)
        now = time.monotonic()
        if self.waiting and now >= self.renewed_at:
            self.renewed_at = now + self.options.lease_s / RENEWALS
            metadata.renewed = [(remote.name, remote.sources) for remote in self.waiting.values()]
        return metadata

    def compute(self, metadata: Metadata, output: Any, request_id: str, computed: int) -> None:
        """Add what a step computes of a request that is handed over."""
        prefill = self.prefills.get(request_id)
        if prefill is None or (prefill.begun and computed >= prefill.tokens):
            return
        tokens = min(computed + output.num_scheduled_tokens[request_id], prefill.tokens)
        blocks = output.kv_connector_block_state.get_block_ids(request_id)
        prefill.begun = True
        metadata.work.append(Work(prefill.name, tokens, self.config.select_transfer_block_ids(blocks)))

    def finished(self, request: Any, blocks: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a request's blocks must stay, and what the router is told."""
        request_id, params = request.request_id, request.kv_transfer_params
        remote = self.waiting.pop(request_id, None)
        if remote is not None:
            # It is given up before it has asked: its pages are free.
            tokens = self.prompt_tokens(request)
            self.next.asks.append(Ask(request_id, remote.name, remote.sources, tokens, tokens, (), False))
        if request_id in self.asked:
            self.next.cancelled.append(request_id)
        prefill = self.prefills.pop(request_id, None)
        self.names.pop(request_id, None)
        if prefill is None:
            describe = bool(params) and params.get("putget_describe")
            return False, {"putget_sources": self.sources} if describe else None
        held = prefill.begun and any(blocks)
        done = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not done or request.num_computed_tokens < prefill.tokens:
            self.next.aborted.append((request_id if held else None, prefill.name))
            return held, None
        self.next.finished.append((request_id, prefill.name))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": prefill.name,
            "putget_sources": self.sources,
        }
