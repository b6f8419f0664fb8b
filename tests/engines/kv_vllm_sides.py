"""vLLM's own scheduler, cache manager and connector hooks around a runner that only fills pages.

A page's content follows from the tokens before it, so a wrong, missing or foreign page is found when a step reads it.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from putget_transfer.adapters.vllm import NAME

BLOCK, BLOCKS, HEADS, HEAD_SIZE = 32, 64, 4, 8
WAIT_S = 60.0


def attention(name: str) -> str:
    return f"model.layers.{name}.self_attn.attn"


def cache_of(window: int | None, layers: Iterable[str] = "01", heads: int = HEADS) -> KVCacheConfig:
    """Two layers in one group, or one layer in each of two groups; of a pipeline's stage its layers."""
    common = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": torch.float32}
    full = FullAttentionSpec(**common)
    groups = [KVCacheGroupSpec([attention(layer) for layer in layers], full)]
    if window is not None:
        sliding = SlidingWindowSpec(**common, sliding_window=window)
        groups = [KVCacheGroupSpec([attention("0")], full), KVCacheGroupSpec([attention("1")], sliding)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def config_of(model: Path, role: str | None, policy: str, options: dict[str, Any]) -> VllmConfig:
    transfer = None
    if role is not None:
        transfer = KVTransferConfig(
            kv_connector=NAME,
            kv_role=role,
            kv_connector_module_path="putget_transfer.adapters.vllm",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"address": "127.0.0.1", "segment_tokens": 32, "confirm_s": 2.0, **options},
        )
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 22,
        enable_prefix_caching=True,
        async_scheduling=False,
        kv_transfer_config=transfer,
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


def value(tokens: list[int], layer: int, heads: range) -> torch.Tensor:
    """The content of a layer's cache for the last of these tokens: a number for each head."""
    return torch.tensor([[zlib.crc32(bytes(tokens)) % 400_000 * 32.0 + layer * HEADS + head] for head in heads])


class Rank:
    """One of a server's workers: a stage's layers, and a tensor-parallel rank's heads."""

    def __init__(self, config: VllmConfig, window: int | None, stage: tuple[int, int], tensor: tuple[int, int]) -> None:
        (at, stages), (rank, ranks) = stage, tensor
        self.config = copy.copy(config)
        self.config.parallel_config = copy.copy(config.parallel_config)
        self.config.parallel_config.rank = at * ranks + rank
        self.heads = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        cache = cache_of(window, "01" if stages == 1 else str(at), len(self.heads))
        self.groups = [group.layer_names for group in cache.kv_cache_groups]
        names = sorted(name for layers in self.groups for name in layers)
        self.memory = {name: torch.full([BLOCKS, len(self.heads), BLOCK, 2 * HEAD_SIZE], -1.0) for name in names}
        self.worker: Any = None
        self.hooks: ActiveKVConnector | None = None
        if config.kv_transfer_config is not None:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
            kv_transfer_state.ensure_kv_transfer_initialized.__globals__["_sync_engine_id_across_tp"] = lambda _: None
            kv_transfer_state.ensure_kv_transfer_initialized(self.config, cache)
            self.worker = kv_transfer_state._KV_CONNECTOR_AGENT
            self.hooks = ActiveKVConnector(self.config, self.memory)


class Side:
    """One server."""

    def __init__(
        self,
        model: Path,
        role: str | None,
        *,
        policy: str = "fail",
        window: int | None = None,
        runner: int = 2,
        tensor: int = 1,
        stages: int = 1,
        **options: Any,
    ) -> None:
        self.config = config_of(model, role, policy, options)
        parallel = self.config.parallel_config
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = tensor, stages
        parallel.world_size = tensor * stages
        cache = cache_of(window)
        self.window = window
        with set_current_vllm_config(self.config):
            self.scheduler = Scheduler(self.config, cache, StructuredOutputManager(self.config), BLOCK)
        self.runner = runner
        places = [(stage, rank) for stage in range(stages) for rank in range(tensor)]
        self.ranks = [Rank(self.config, window, (stage, stages), (rank, tensor)) for stage, rank in places]
        self.worker = self.ranks[0].worker
        self.gather = KVOutputAggregator(len(self.ranks))
        if role is not None:
            told = {place: rank.worker.get_handshake_metadata() for place, rank in zip(places, self.ranks, strict=True)}
            if told[(0, 0)] is not None:
                self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(told)
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)
        self.tokens: dict[str, list[int]] = {}
        self.told: dict[str, dict[str, Any]] = {}
        self.ends: dict[str, str] = {}
        self.first_read: dict[str, int] = {}
        self.free = self.free_blocks()

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, prompt: list[int], new_tokens: int, **params: Any) -> None:
        extra = {"kv_transfer_params": params} if params else None
        wanted = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0, extra_args=extra)
        self.tokens[name] = []
        self.scheduler.add_request(Request(name, list(prompt), wanted, None, block_hasher=self.hasher))

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One pass of vLLM's engine core."""
        output = self.scheduler.schedule()
        results = []
        for rank in self.ranks:
            kv_transfer_state._KV_CONNECTOR_AGENT = rank.worker
            with set_current_vllm_config(rank.config):
                results.append(self.run(output, rank))
        result = self.gather.aggregate(results)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                if one.kv_transfer_params is not None:
                    self.told[one.request_id] = one.kv_transfer_params
                if one.finish_reason is not None:
                    self.ends[one.request_id] = str(one.finish_reason)

    def run(self, output: Any, rank: Rank) -> ModelRunnerOutput:
        if rank.hooks is None:
            return self.forward(output, rank)
        if self.runner == 1:
            # The CPU's runner.
            rank.worker.handle_preemptions(output.kv_connector_metadata)
            if not output.total_num_scheduled_tokens:
                # vLLM has one object for all steps without work, and what is gathered is written into a rank's.
                return copy.copy(KVConnectorModelRunnerMixin.kv_connector_no_forward(output, rank.config))
            with (
                set_forward_context(None, rank.config),
                KVConnectorModelRunnerMixin._get_kv_connector_output(output) as kv_output,
            ):
                result = self.forward(output, rank)
            result.kv_connector_output = kv_output
            return result
        if not output.total_num_scheduled_tokens:
            return copy.copy(rank.hooks.no_forward(output))
        rank.hooks.pre_forward(output)
        result = self.forward(output, rank)
        rank.hooks.finish_forward()
        result.kv_connector_output = rank.hooks.post_forward(output.finished_req_ids)
        return result

    def places(self, request_id: str, first: int, last: int, group: int) -> Iterable[tuple[int, int, int]]:
        blocks = self.scheduler.kv_cache_manager.get_block_ids(request_id)[group]
        return [(position, blocks[position // BLOCK], position % BLOCK) for position in range(first, last)]

    def forward(self, output: Any, rank: Rank) -> ModelRunnerOutput:
        """Read what is said to be computed, and compute the rest, layer by layer."""
        starts = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for group, layers in enumerate(rank.groups):
            for name in layers:
                for request_id, count in output.num_scheduled_tokens.items():
                    self.compute(rank, request_id, starts[request_id], count, (group, name))
                if rank.worker is not None and rank.worker.has_connector_metadata():
                    rank.worker.wait_for_layer_load(name)
                    rank.worker.save_kv_layer(name, rank.memory[name], None)
        ids = list(output.num_scheduled_tokens)
        for request_id in ids:
            self.first_read.setdefault(request_id, starts[request_id])
        sampled = []
        for request_id in ids:
            tokens = self.scheduler.requests[request_id]._all_token_ids
            whole = starts[request_id] + output.num_scheduled_tokens[request_id] >= len(tokens)
            sampled.append([zlib.crc32(bytes(tokens)) % 100] if whole else [])
        return ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, sampled)

    def compute(self, rank: Rank, request_id: str, start: int, count: int, place: tuple[int, str]) -> None:
        group, name = place
        layer, memory = int(name.split(".")[2]), rank.memory[name]
        tokens = list(self.scheduler.requests[request_id]._all_token_ids)
        first = 0 if self.window is None or group == 0 else max(0, start - self.window + 1)
        for position, block, slot in self.places(request_id, first, start, group):
            found, expected = memory[block, :, slot], value(tokens[: position + 1], layer, rank.heads)
            assert bool((found == expected).all()), (request_id, name, position, block, found[:, 0], expected)
        for position, block, slot in self.places(request_id, start, start + count, group):
            memory[block, :, slot] = value(tokens[: position + 1], layer, rank.heads)

    def is_idle(self) -> bool:
        return not self.scheduler.has_requests()

    def close(self) -> None:
        for rank in self.ranks:
            if rank.worker is not None:
                rank.worker.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None


def step_until(sides: Iterable[Side], what: Callable[[], bool]) -> None:
    """Let servers go on until something holds."""
    end = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end, "it does not come to hold"
        for side in sides:
            if not side.is_idle():
                side.step()


def step_until_idle(*sides: Side) -> None:
    """Let servers go on until all is over; then each block is free again."""
    step_until(sides, lambda: all(side.is_idle() for side in sides))
    for side in sides:
        assert side.free_blocks() == side.free, (side.free_blocks(), side.free)
