"""ElasticBuffer with DeepEP 2.1's signatures: both layouts, with and without the host's knowledge, handles again."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from putget.adapters.deep_ep.elastic import ElasticBuffer, EPHandle
from putget.adapters.deep_ep.expanded import column_major
from tests.adapters.conftest import Place
from tests.adapters.deep_ep.fp8 import to_fp8
from tests.adapters.deep_ep.test_buffer import arrivals, dequantised, experts_per_rank, picked, routes
from tests.adapters.layer import Layer, same_bits
from tests.harness import Rank, run_ranks

RAGGED = Layer(num_tokens=(3, 0, 8, 1))
ALIGNMENT = 4


def elastic(rank: Rank, layer: Layer) -> ElasticBuffer:
    return ElasticBuffer(
        rank.comm,
        num_max_tokens_per_rank=layer.max_tokens_per_rank,
        device=rank.device,
        num_gpu_timeout_secs=20,
        num_cpu_timeout_secs=20,
    )


def check_numbers(handle: EPHandle, layer: Layer, rank: int, local: torch.Tensor) -> None:
    """A handle's account of the rows that came."""
    rows = arrivals(layer, rank)
    sources = [src * layer.max_tokens_per_rank + token for src, token in rows]
    assert handle.recv_src_metadata[: len(rows), 0].tolist() == sources
    ends = [sum(src <= last for src, _ in rows) for last in range(layer.ep_size)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends
    counts = [int((local == expert).sum()) for expert in range(experts_per_rank(layer))]
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    aligned = [-(-count // ALIGNMENT) * ALIGNMENT for count in counts]
    begins = [sum(aligned[:expert]) for expert in range(len(aligned))]
    last = counts if handle.do_expand else aligned
    assert handle.psum_num_recv_tokens_per_expert.tolist() == [a + b for a, b in zip(begins, last, strict=True)]
    assert handle.num_recv_tokens_per_expert_list in (aligned, [])
    if handle.do_expand:
        slots = handle.recv_src_metadata[: len(rows), 2:].cpu()
        for expert, begin in enumerate(begins):
            assert slots[local == expert].tolist() == list(range(begin, begin + counts[expert]))
        assert (slots[local < 0] == -1).all()


def rounds(rank: Rank, layer: Layer, do_expand: bool, use_fp8: bool, do_cpu_sync: bool) -> None:
    """A body: a dispatch, the same again with its handle, and combines with biases and weights."""
    buffer = elastic(rank, layer)
    ids, weights = (tensor.to(rank.device) for tensor in routes(layer, rank.rank))
    hidden = layer.hidden(rank.rank).to(rank.device)
    x: Any = to_fp8(hidden) if use_fp8 else hidden
    stats = torch.zeros(experts_per_rank(layer), dtype=torch.int32, device=rank.device)
    options = {"do_zero_padding": do_expand, "use_tma_aligned_col_major_sf": do_expand}
    got, got_ids, got_weights, handle, event = buffer.dispatch(
        x,
        ids,
        weights,
        cumulative_local_expert_recv_stats=stats,
        num_experts=layer.num_experts,
        expert_alignment=ALIGNMENT,
        do_cpu_sync=do_cpu_sync,
        do_expand=do_expand,
        async_with_compute_stream=True,
        **options,
    )
    event.current_stream_wait()
    rows = arrivals(layer, rank.rank)
    first = rank.rank * experts_per_rank(layer)
    local = picked(layer, rows, lambda src: routes(layer, src)[0], ids.cpu()) - first
    local = local.masked_fill((local < 0) | (local >= experts_per_rank(layer)), -1)
    check_numbers(handle, layer, rank.rank, local)
    assert torch.equal(stats, handle.num_unaligned_recv_tokens_per_expert)
    sent = picked(layer, rows, layer.hidden, layer.hidden(rank.rank)).to(rank.device)
    if use_fp8:
        sent = dequantised(to_fp8(sent)).to(torch.bfloat16) if len(rows) else sent
    values = dequantised(got).to(torch.bfloat16)
    shares = picked(layer, rows, lambda src: routes(layer, src)[1], weights.cpu()).masked_fill(local < 0, 0.0)
    if do_expand:
        assert got_ids is None
        slots = handle.recv_src_metadata[: len(rows), 2:].long()
        for row, slot, share in zip(sent, slots, shares, strict=True):
            for place, one in zip(slot[slot >= 0].tolist(), share[slot.cpu() >= 0].tolist(), strict=True):
                assert same_bits(values[place], row)
                assert got_weights[place].item() == one
        empty = torch.ones(len(values), dtype=torch.bool)
        empty[slots[slots >= 0].cpu()] = False
        assert not values[empty.to(rank.device)].any()
    else:
        assert same_bits(values[: len(rows)], sent)
        assert torch.equal(got_ids[: len(rows)].cpu(), local)
        assert (got_ids[len(rows) :] == -1).all()
        assert torch.equal(got_weights[: len(rows)].cpu(), shares)
    again, *_, same, _ = buffer.dispatch(x, topk_weights=weights, handle=handle, **options)
    assert same is handle
    assert same_bits(dequantised(again)[: len(rows)].cpu(), dequantised(got)[: len(rows)].cpu())

    experts_each = (ids >= 0).sum(1, keepdim=True)
    given = values if do_expand else (values.float() * (handle.local >= 0).sum(1, keepdim=True)).bfloat16()
    own = dequantised(x).bfloat16().float() * experts_each
    half, two = (torch.full_like(hidden, value) for value in (0.5, -2.0))
    for bias, added in ((None, 0.0), (half, 0.5), ((half, two), -1.5)):
        combined, summed, _ = buffer.combine(given, handle, topk_weights=got_weights, bias=bias)
        torch.testing.assert_close(combined.float(), own + added, rtol=2**-6, atol=2**-5)
        assert torch.equal(summed, torch.where(ids >= 0, weights, 0.0))
    buffer.barrier(with_cpu_sync=True)
    buffer.destroy()


@pytest.mark.parametrize(
    ("do_expand", "use_fp8", "do_cpu_sync"),
    [(False, True, True), (False, False, False), (True, False, True), (True, True, False)],
)
def test_rounds(do_expand: bool, use_fp8: bool, do_cpu_sync: bool, place: Place) -> None:
    place.run(rounds, place.fit(RAGGED), do_expand, use_fp8, do_cpu_sync)


def refuse(rank: Rank) -> None:
    """A body: what is wrong is named."""
    layer = replace(RAGGED, num_tokens=(2, 2))
    buffer = elastic(rank, layer)
    ids, weights = routes(layer, rank.rank)
    x = layer.hidden(rank.rank)
    with pytest.raises(ValueError, match="num_experts is 5, expected a multiple of the 2 ranks"):
        buffer.dispatch(x, ids, weights, num_experts=5)
    with pytest.raises(ValueError, match="num_max_tokens_per_rank is 0"):
        buffer.dispatch(x, ids, weights, num_experts=8, num_max_tokens_per_rank=0)
    with pytest.raises(ValueError, match="allocate_on_comm_stream is False"):
        buffer.dispatch(x, ids, weights, num_experts=8, previous_event=buffer.capture())
    *_, handle, _ = buffer.dispatch(x, ids, weights, num_experts=8)
    with pytest.raises(ValueError, match="expert_alignment is 2, the handle has 1"):
        buffer.dispatch(x, handle=handle, expert_alignment=2)
    with pytest.raises(ValueError, match="topk_idx is a tensor, supported is None"):
        buffer.dispatch(x, ids, handle=handle)
    with pytest.raises(ValueError, match="a row for each that dispatch gave"):
        buffer.combine(torch.cat([x] * 5), handle)
    with pytest.raises(ValueError, match="num_cpu_bytes is 1, supported is 0"):
        ElasticBuffer(rank.comm, num_cpu_bytes=1)
    buffer.destroy()


def test_wrong_calls_name_what_is_wrong() -> None:
    run_ranks(2, refuse)


def test_arguments_are_those_of_deep_ep() -> None:
    theirs = {
        "__init__": "group num_bytes num_cpu_bytes num_max_tokens_per_rank hidden num_topk use_fp8_dispatch "
        "deterministic allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute sl_idx num_allocated_qps "
        "num_cpu_timeout_secs num_gpu_timeout_secs explicitly_destroy",
        "dispatch": "x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts num_max_tokens_per_rank "
        "expert_alignment num_sms num_qps previous_event previous_event_before_epilogue async_with_compute_stream "
        "allocate_on_comm_stream handle do_handle_copy do_cpu_sync do_expand do_zero_padding "
        "use_tma_aligned_col_major_sf",
        "combine": "x handle topk_weights bias num_sms num_qps previous_event previous_event_before_epilogue "
        "async_with_compute_stream allocate_on_comm_stream",
    }
    for name, arguments in theirs.items():
        ours = list(inspect.signature(getattr(ElasticBuffer, name)).parameters)[1:]
        assert ours[: len(arguments.split())] == arguments.split()


def test_columns_of_scales_are_aligned() -> None:
    scales = torch.arange(10, dtype=torch.float32).view(5, 2)
    found = column_major(scales)
    assert torch.equal(found, scales)
    assert found.stride() == (1, 8)
