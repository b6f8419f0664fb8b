"""The class that vLLM makes, once in its scheduler and once in each worker."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from putget_transfer.adapters.options import Options
from putget_transfer.adapters.vllm.metadata import Handshake, Metadata
from putget_transfer.adapters.vllm.scheduler import Scheduler
from putget_transfer.adapters.vllm.stats import Prometheus, Stats
from putget_transfer.adapters.vllm.worker import Worker


class PutgetConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Moves the KV caches of prompts from prefill servers to decode servers, layer by layer.

    `save_kv_layer` only says that a layer is computed: by one store, or by one kernel that graphs may capture. Its
    pages leave without Python.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Make one half.

        Raises:
            ValueError: An option is not known, or context parallelism is on.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, name) > 1:
                raise ValueError(f"PutgetConnector: {name} {getattr(parallel, name)} came; 1 is supported")
        self.scheduler = Scheduler(kv_cache_config, options) if role == KVConnectorRole.SCHEDULER else None
        self.worker: Worker | None = None
        if role == KVConnectorRole.WORKER:
            rank = parallel.rank % parallel.tensor_parallel_size
            self.worker = Worker(vllm_config, kv_cache_config, options, rank)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False: registered memory must not be unmapped."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return an order of dimensions in which a head's tokens of a page lie together."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Return True: a request's own blocks are moved in every group."""
        return True

    # The workers' half.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe the cache and begin to listen."""
        assert self.worker is not None
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        """Return this rank for decode servers."""
        assert self.worker is not None
        return self.worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait until nothing is read from blocks that were taken away."""
        assert self.worker is not None
        self.worker.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step: its layers may leave as soon as they are computed."""
        super().bind_connector_metadata(connector_metadata)
        assert self.worker is not None
        self.worker.begin(connector_metadata)

    def has_connector_metadata(self) -> bool:
        """Return True also while a graph is captured: then its layers report whichever step replays it."""
        return super().has_connector_metadata() or (self.worker is not None and self.worker.reports())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Ask prefill servers for prompts, and hand prefills over. It waits for nothing."""
        assert self.worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        self.worker.start(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: a request runs when all of its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Say that a layer is computed."""
        assert self.worker is not None
        self.worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """Say that all layers are computed. Blocks stay until they have left."""
        assert self.worker is not None
        self.worker.step_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return which requests are over. Failed ones are named as such, whatever the number of groups."""
        assert self.worker is not None
        return self.worker.results()

    def get_kv_connector_stats(self) -> Stats | None:
        """Return the counts since the last call."""
        return self.worker.stats.take() if self.worker is not None else None

    def shutdown(self) -> None:
        """End the engine."""
        if self.worker is not None:
            self.worker.close()

    # The scheduler's half.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Keep the ranks of this server for the answers to routers."""
        assert self.scheduler is not None
        self.scheduler.handshake(metadata)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups: a request's own blocks are moved."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def on_new_request(self, request: Any) -> None:
        """Note what another server has to do with it."""
        assert self.scheduler is not None
        self.scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many of its tokens come from another server."""
        assert self.scheduler is not None
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Ask for it, now that it has blocks."""
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Return what the workers have to know for a step."""
        assert self.scheduler is not None
        return self.scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Note which requests wait no longer."""
        assert self.scheduler is not None
        self.scheduler.received(set(connector_output.finished_recving or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether its blocks must stay, and what the router is told."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for all groups."""
        assert self.scheduler is not None
        return self.scheduler.finished(request, block_ids)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Return counts as they came from a worker."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Prometheus:
        """Return the counts for Prometheus."""
        return Prometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)
