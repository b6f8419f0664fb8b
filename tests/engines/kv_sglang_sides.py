"""A prefill or a decode rank of SGLang without a model: SGLang's pools, metadata, manager, senders and receivers.

A page's content follows from the request and its place, so a wrong, missing or foreign page is found.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    MetadataBuffers,
    TransferBackend,
    append_state_component,
    get_kv_class,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_disagg, get_parallel, get_server_args, get_serving

from putget_transfer.adapters.sglang import NAME

PAGE, PAGES, LAYERS, HEADS, HEAD_DIM, ROWS = 4, 32, 2, 4, 8, 8
WAIT_S = 60.0
POISON = -7.0


def kind(which: str) -> Any:
    return get_kv_class(TransferBackend(NAME), getattr(KVClassType, which))


def address() -> str:
    return f"{get_serving().host}:{get_disagg().disaggregation_bootstrap_port}"


def wait(what: Callable[[], bool], step: Callable[[], object] = lambda: None) -> None:
    """Wait until something holds."""
    end = time.monotonic() + WAIT_S
    while not what():
        step()
        if time.monotonic() > end:
            raise AssertionError(f"it does not come to pass in {WAIT_S} s")
        time.sleep(0.002)


def content(room: int, place: int, shape: Sequence[int]) -> torch.Tensor:
    """The bytes of a request's page at a place."""
    generator = torch.Generator().manual_seed(room * 1000 + place)
    return torch.rand(tuple(shape), generator=generator)


class Side:
    """One rank in one role."""

    def __init__(self, role: str, *, latent: bool = False, tp: tuple[int, int] = (0, 1), states: bool = False) -> None:
        self.mode, self.latent, self.tp = DisaggregationMode(role), latent, tp
        common = {"size": PAGE * (PAGES - 1), "page_size": PAGE, "dtype": torch.float32, "layer_num": LAYERS}
        common |= {"device": "cpu", "enable_memory_saver": False}
        if latent:
            self.pool: Any = MLATokenToKVPool(kv_lora_rank=16, qk_rope_head_dim=8, **common)
            self.buffers = list(self.pool.kv_buffer)
        else:
            self.pool = MHATokenToKVPool(head_num=HEADS // tp[1], head_dim=HEAD_DIM, **common)
            self.buffers = [*self.pool.k_buffer, *self.pool.v_buffer]
        for buffer in self.buffers:
            buffer.fill_(POISON)
        self.states = [torch.full((ROWS, 6), POISON) for _ in range(2)] if states else []
        self.metadata = MetadataBuffers(ROWS, 16, torch.float32, 16)
        self.manager: Any = None
        self.start(role)

    def args(self) -> KVArgs:
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = self.tp[0], 0, None, 0
        args.rust_http_port, args.ib_device, args.kv_layout, args.kv_cache_dtype_str = None, None, None, "float32"
        args.prefill_start_layer, args.num_draft_entries, args.kv_layer_ids = 0, 0, []
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        args.page_size, args.is_hybrid_mla_backend, args.mla_compression_ratios = PAGE, False, None
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.metadata.get_buf_infos()
        for name in ("types", "data_ptrs", "data_lens", "item_lens", "dim_per_tensor", "conv_shard_groups"):
            setattr(args, f"state_{name}", [])
        args.state_slice_outer_counts, args.state_layer_ids, args.swa_kv_cache_layout = [], [], None
        if self.states:
            infos = zip(*((one.data_ptr(), one.nbytes, one[0].nbytes) for one in self.states), strict=True)
            append_state_component(args, StateType.MAMBA, *map(list, infos), layer_ids=[5, 5])
        return args

    @contextlib.contextmanager
    def ranks(self) -> Iterator[None]:
        """Have SGLang take this process for the rank."""
        rank, ranks = self.tp
        widths = {"tp_size": ranks, "attn_tp_size": ranks, "moe_tp_size": ranks}
        with get_parallel().override(tp_rank=rank, attn_tp_rank=rank, pp_group=None, **widths):
            yield

    def start(self, role: str) -> None:
        self.mode = DisaggregationMode(role)
        with self.ranks():
            self.manager = kind("MANAGER")(self.args(), self.mode, get_server_args(), self.latent)

    def close(self) -> None:
        self.manager.teardown()

    def rows(self, page: int) -> slice:
        return slice(page * PAGE, (page + 1) * PAGE)

    def whole(self, room: int, place: int, layer: int) -> torch.Tensor:
        """A page's content of all ranks' heads, and this rank's part of it."""
        buffer = self.buffers[layer]
        if self.latent:
            return content(room, place * 100 + layer, (PAGE, *buffer.shape[1:]))
        all_heads = content(room, place * 100 + layer, (PAGE, HEADS, *buffer.shape[2:]))
        own = HEADS // self.tp[1]
        return all_heads[:, self.tp[0] * own : (self.tp[0] + 1) * own]

    def fill(self, room: int, first: int, pages: Sequence[int]) -> None:
        """Compute a request's pages from a place on."""
        for place, page in enumerate(pages, first):
            for layer, buffer in enumerate(self.buffers):
                buffer[self.rows(page)] = self.whole(room, place, layer)

    def check(self, room: int, first: int, pages: Sequence[int]) -> None:
        """Check that a request's pages are there, and that no other page was written to."""
        for layer, buffer in enumerate(self.buffers):
            expected = torch.full_like(buffer, POISON)
            for place, page in enumerate(pages, first):
                expected[self.rows(page)] = self.whole(room, place, layer)
            assert torch.equal(buffer, expected), f"buffer {layer}: {(buffer != expected).nonzero()[:4].tolist()}"

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.fill_(POISON)

    # Prefill.

    def sender(self, room: int) -> Any:
        return kind("SENDER")(self.manager, address(), room)

    def begin(self, sender: Any, num_pages: int, row: int) -> int:
        """Wait for the decode ranks; return what they have of the prompt."""
        wait(lambda: sender.poll() == KVPoll.WaitingForInput)
        prefix = int(sender.pop_decode_prefix_len())
        sender.init(num_pages - prefix // PAGE, row)
        return prefix

    def compute(self, sender: Any, pages: Sequence[int], first: int, states: Sequence[int] | None = None) -> None:
        """Compute a chunk, and let it leave. The last one comes with the metadata."""
        self.fill(sender.bootstrap_room, first, pages)
        if sender.curr_idx + len(pages) == sender.num_kv_indices:
            self.metadata.bootstrap_room[sender.aux_index, 0] = sender.bootstrap_room
            self.metadata.output_ids[sender.aux_index, 0] = sender.bootstrap_room + 1
        given = None if states is None else [np.array(states, dtype=np.int32)]
        sender.send(np.array(pages, dtype=np.int32), given)

    # Decode.

    def receiver(self, room: int) -> Any:
        receiver = kind("RECEIVER")(self.manager, address(), room)
        assert self.manager.try_ensure_parallel_info(address())
        receiver.init(0)
        assert receiver.poll() == KVPoll.WaitingForInput, self.manager.failure_records
        return receiver

    def ask(self, receiver: Any, pages: Sequence[int], row: int, prefix: int = 0, states: Any = None) -> None:
        given = None if states is None else [np.array(states, dtype=np.int32)]
        receiver.send_metadata(np.array(pages, dtype=np.int32), row, given, prefix)

    def token(self, row: int) -> int:
        return int(self.metadata.output_ids[row, 0])


def reason_of(one: Any) -> str:
    """Why a sender or a receiver has failed."""
    try:
        one.failure_exception()
    except Exception as error:
        return str(error)
    raise AssertionError("it has not failed")
