"""Arguments of DeepEP's calls: wrong input is named, ids out of range count for nothing, lost rows are told."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from putget.adapters import deep_ep
from tests.adapters.deep_ep.test_buffer import RAGGED, arrivals, buffer_of, routes
from tests.adapters.layer import Layer, same_bits
from tests.harness import Rank, run_ranks


def refuse(rank: Rank) -> list[str]:
    """A body: what is not supported or wrong; the messages."""
    layer = replace(RAGGED, num_tokens=(2, 2), num_experts=4, top_k=2)
    buffer = buffer_of(rank, layer)
    ids, weights = routes(layer, rank.rank)
    x = layer.hidden(rank.rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 4)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    messages = []

    def expect(call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(ValueError) as caught:
            call(*args, **options)
        messages.append(str(caught.value))

    expect(buffer.get_dispatch_layout, ids, 5)
    expect(buffer.get_dispatch_layout, ids[0], 4)
    expect(buffer.dispatch, x[0], topk_idx=ids, topk_weights=weights, **layout)
    expect(
        buffer.dispatch, x, topk_idx=ids, topk_weights=weights, **{**layout, "is_token_in_rank": in_rank[:, :1].clone()}
    )
    expect(buffer.dispatch, x, topk_idx=ids, topk_weights=weights, num_worst_tokens=-1, **layout)
    expect(buffer.dispatch, x, topk_idx=ids, topk_weights=weights, expert_alignment=0, **layout)
    expect(buffer.combine, x, None)
    expect(buffer.dispatch, x, topk_idx=ids, **layout)
    expect(buffer.dispatch, x, num_tokens_per_rdma_rank=per_rank, topk_idx=ids, topk_weights=weights, **layout)
    expect(buffer.dispatch, x[:1], topk_idx=ids, topk_weights=weights, **layout)
    recv, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout)
    expect(buffer.combine, recv, handle, topk_weights=torch.zeros(len(recv) + 1, 2))
    expect(buffer.combine, recv, handle, bias=(x, x, x))
    expect(buffer.combine, recv, handle, bias=x[:1])
    expect(buffer.combine, torch.cat([recv, recv[:1]]), handle)
    expect(buffer.combine, recv.float(), handle)
    buffer.combine(recv, handle)
    expect(buffer.dispatch, x, handle=handle, topk_idx=ids)
    expect(buffer.low_latency_dispatch, x, ids, 1, 4)
    expect(buffer.low_latency_dispatch, x, ids.float(), 8, 4)
    expect(buffer.low_latency_dispatch, x.float(), ids, 8, 4)
    expect(buffer.low_latency_dispatch, x[:1], ids, 8, 4)
    expect(buffer.low_latency_combine, x, ids, weights, handle)
    expect(buffer.low_latency_dispatch, x, ids, 8, 4, use_ue8m0=True)
    expect(buffer.low_latency_dispatch, x, ids, 8, 4, round_scale=True, use_ue8m0=True)
    expect(buffer.low_latency_dispatch, x[:, :100].contiguous(), ids, 8, 4)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, 4, use_fp8=False)
    expect(buffer.low_latency_combine, rows, ids, weights, handle, use_logfmt=True)
    expect(buffer.low_latency_combine, rows, ids[:1], weights, handle)
    expect(buffer.low_latency_combine, rows[:, :4], ids, weights, handle)
    buffer.low_latency_combine(rows, ids, weights, handle)
    expect(deep_ep.Buffer, rank.comm, enable_shrink=True)
    buffer.destroy()
    buffer.destroy()
    return messages


def test_what_is_not_supported_is_named() -> None:
    named = [
        "num_experts is 5, expected a multiple of the 2 ranks",
        "topk_idx is [2] torch.int64, expected [num_tokens, top_k] torch.int64",
        "x is [256] torch.bfloat16, expected [num_tokens, hidden], or FP8 rows and their scales",
        "is_token_in_rank is [2, 1] torch.bool, expected [2, 2] torch.bool",
        "num_worst_tokens is -1, expected an int of at least 0",
        "expert_alignment is 0, expected an int of at least 1",
        "handle is a NoneType, expected what dispatch returned",
        "with topk_idx and topk_weights or without both, or with the handle of one",
        "num_tokens_per_rdma_rank is a tensor, supported is None",
        "x has shape [1, 256], expected 2 rows",
        "top_k] torch.float32",
        "bias has 3 tensors, supported are up to two",
        "bias is [1, 256] torch.bfloat16, expected contiguous [2, 256] torch.bfloat16",
        "a row for each that dispatch gave",
        "x has dtype torch.float32, supported is torch.bfloat16",
        "topk_idx is a tensor, supported is None",
        "topk_idx has 2 tokens, num_max_dispatch_tokens_per_rank is 1",
        "topk_idx is [2, 2] torch.float32, expected",
        "x has dtype torch.float32, supported is torch.bfloat16",
        "x has 1 tokens, topk_idx has 2",
        "handle is a Handle, expected what low_latency_dispatch returned",
        "use_ue8m0 is True, round_scale is False: expected both",
        "x has rows of 256, FP8 needs a multiple of 512",
        "x has rows of 100, FP8 needs a multiple of 128",
        "use_logfmt is True, supported is False",
        "topk_idx has shape [1, 2], the dispatch had [2, 2]",
        "x is [2, 4, 256] torch.bfloat16, expected [2, 16, 256]",
        "enable_shrink is True, supported is False",
    ]
    for messages in run_ranks(2, refuse):
        assert len(messages) == len(named)
        for message, part in zip(messages, named, strict=True):
            assert part in message


def odd_tensors(rank: Rank) -> list[str]:
    """A body: weights of another kind or width, and tensors elsewhere, in normal rounds of both kinds of buffers."""
    layer = replace(RAGGED, num_tokens=(2, 2), num_experts=4, top_k=2)
    x, (ids, weights) = layer.hidden(rank.rank), routes(layer, rank.rank)
    buffer = buffer_of(rank, layer)
    elastic = deep_ep.ElasticBuffer(
        rank.comm, num_max_tokens_per_rank=4, device=rank.device, num_gpu_timeout_secs=20, num_cpu_timeout_secs=20
    )
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 4)
    layout = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    said = []
    for odd in (weights.bfloat16(), weights.double(), weights[:, :1], torch.cat([weights, weights], 1), [1.0]):
        with pytest.raises(ValueError, match="topk_weights is") as caught:
            buffer.dispatch(x, topk_idx=ids, topk_weights=odd, **layout)  # type: ignore[arg-type]
        with pytest.raises(ValueError) as other:
            elastic.dispatch(x, ids, odd, num_experts=4)  # type: ignore[arg-type]
        assert str(other.value) == str(caught.value)
        said.append(str(caught.value))
    counted = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="cumulative_local_expert_recv_stats"):
        elastic.dispatch(x, ids, weights, counted, num_experts=4)
    rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout)
    arrived, _, _, other_handle, _ = elastic.dispatch(x, ids, weights, num_experts=4)
    for name, call in (
        ("topk_idx", lambda: buffer.dispatch(x, topk_idx=ids.to("meta"), topk_weights=weights, **layout)),
        ("x", lambda: buffer.combine(rows.to("meta"), handle)),
        ("topk_weights", lambda: buffer.combine(rows, handle, topk_weights=torch.ones(len(rows), 2, device="meta"))),
        ("topk_idx", lambda: elastic.dispatch(x, ids.to("meta"), weights, num_experts=4)),
        ("x", lambda: elastic.combine(arrived.to("meta"), other_handle)),
    ):
        with pytest.raises(ValueError, match=f"{name} is on meta, this buffer is on cpu"):
            call()
    assert len(buffer.combine(rows, handle)[0]) == len(elastic.combine(arrived, other_handle)[0]) == 2
    buffer.destroy()
    elastic.destroy()
    return said


def test_tensors_that_kernels_cannot_take_are_refused() -> None:
    for said in run_ranks(2, odd_tensors):
        assert said[0] == "topk_weights is [2, 2] torch.bfloat16, expected [2, 2] torch.float32"
        assert said[2] == "topk_weights is [2, 1] torch.float32, expected [2, 2] torch.float32"


def differ(rank: Rank) -> list[str]:
    """A body: each rank has another capacity, top_k, hidden and number of tokens in turn."""
    said = []
    buffer = deep_ep.Buffer(rank.comm, device=rank.device, timeout_s=20, warmup_timeout_s=20)
    for tokens, top_k, hidden, experts in ((8, 2, 128, 4), (16, 1, 128, 4), (16, 2, 256, 4), (16, 2, 128, 8)):
        mine = (16, 2, 128, 4) if rank.rank else (tokens, top_k, hidden, experts)
        x, ids = torch.ones(1, mine[2], dtype=torch.bfloat16), torch.zeros(1, mine[1], dtype=torch.int64)
        with pytest.raises(ValueError, match="differs between ranks") as caught:
            buffer.low_latency_dispatch(x, ids, mine[0], mine[3], use_fp8=False)
        said.append(str(caught.value))
    x, ids = torch.ones(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)
    layout = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    with pytest.raises(ValueError, match="differs between ranks") as caught:
        buffer.dispatch(x, topk_idx=ids, topk_weights=torch.ones(1, 1), max_tokens_per_rank=8 + rank.rank, **layout)
    return [*said, str(caught.value)]


def test_arguments_that_differ_are_named() -> None:
    for said in run_ranks(2, differ):
        assert said == [
            "num_max_dispatch_tokens_per_rank differs between ranks: rank 0 has 8, rank 1 has 16",
            "the number of columns of topk_idx differs between ranks: rank 0 has 1, rank 1 has 2",
            "the length of rows of x differs between ranks: rank 0 has 256, rank 1 has 128",
            "num_experts differs between ranks: rank 0 has 8, rank 1 has 4",
            "max_tokens_per_rank differs between ranks: rank 0 has 8, rank 1 has 9",
        ]


def worst_is_too_small(rank: Rank, layer: Layer) -> tuple[int, str]:
    """A body: more rows come than num_worst_tokens; what is left of them, and who says so. Then enough."""
    buffer = buffer_of(rank, layer)
    ids, weights = (tensor.to(rank.device) for tensor in routes(layer, rank.rank))
    x = layer.hidden(rank.rank).to(rank.device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, layer.num_experts)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    text = ""
    for worst in (1, 16):
        rows, *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_worst_tokens=worst, **layout)
        assert rows.shape[0] == worst
        buffer.combine(rows, handle)
        if worst == 1:
            with pytest.raises(putget.ProtocolMisuse) as caught:
                buffer.check()
            text = str(caught.value)
        buffer.check()
    left_out = len(arrivals(layer, rank.rank)) - 1
    buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_worst_tokens=1, **layout)
    with pytest.raises(putget.ProtocolMisuse, match=f"{left_out} rows were left out"):
        buffer.destroy()
    buffer.destroy()
    return left_out, text


def test_rows_beyond_the_worst_case_are_reported() -> None:
    layer = replace(RAGGED, num_tokens=(4, 4), num_experts=4, top_k=2, no_expert=0.0)
    for left_out, text in run_ranks(2, worst_is_too_small, layer):
        assert left_out > 0
        assert text == f"dispatch: {left_out} rows were left out, num_worst_tokens was too small for what came"


def unknown_ids(rank: Rank) -> None:
    """A body: ids that no expert has count as -1, in normal layouts and in low-latency rounds."""
    layer = replace(RAGGED, num_tokens=(2, 2), num_experts=4, top_k=2)
    buffer = buffer_of(rank, layer)
    ids = torch.tensor([[0, 99], [-7, 3]])
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 4)
    assert per_rank.tolist() == [1, 1]
    assert per_expert.tolist() == [1, 0, 0, 1]
    assert in_rank.tolist() == [[True, False], [False, True]]
    x = layer.hidden(rank.rank)
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, 4, use_fp8=False)
    assert counts.tolist() == ([2, 0] if rank.rank == 0 else [0, 2])
    combined, _, _ = buffer.low_latency_combine(rows, ids, torch.ones(2, 2), handle)
    assert torch.equal(combined, x)
    buffer.destroy()


def test_ids_out_of_range_are_no_experts() -> None:
    run_ranks(2, unknown_ids)


def strided_scales(rank: Rank) -> None:
    """A body: scales with the columns one after the other, as DeepGEMM keeps them, first and cached."""
    layer = replace(RAGGED, num_tokens=(3, 2), num_experts=4, top_k=2, recipe="fp8", no_expert=0.0)
    buffer = buffer_of(rank, layer)
    ids, weights = layer.routes(rank.rank)
    values, scales = layer.rows(rank.rank)
    columns_first = scales.T.contiguous().T
    assert not columns_first.is_contiguous()
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids.long(), 4)
    first, _, _, _, handle, _ = buffer.dispatch(
        (values, columns_first),
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids.long(),
        topk_weights=weights,
    )
    again, *_ = buffer.dispatch((values, columns_first), handle=handle)
    rows = arrivals(layer, rank.rank)
    assert rows
    for got in (first, again):
        for index in (0, 1):
            assert same_bits(got[index], torch.stack([layer.rows(src)[index][token] for src, token in rows]))
    buffer.destroy()


def test_scales_may_be_strided() -> None:
    run_ranks(2, strided_scales)


def test_what_deep_ep_builds_for_sm90_is_there() -> None:
    assert deep_ep.Buffer.is_sm90_compiled() is True


# As DeepEP's documentation and its published Buffer have them, in this order.
ARGUMENTS = {
    "__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm",
    "get_dispatch_layout": "topk_idx num_experts previous_event async_finish allocate_on_comm_stream",
    "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert topk_idx "
    "topk_weights expert_alignment num_worst_tokens config previous_event async_finish allocate_on_comm_stream",
    "combine": "x handle topk_weights bias config previous_event async_finish allocate_on_comm_stream",
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale use_ue8m0 async_finish "
    "return_recv_hook",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt zero_copy async_finish return_recv_hook out "
    "combine_wait_recv_cost_stats",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_deep_ep(name: str) -> None:
    ours = [argument for argument in inspect.signature(getattr(deep_ep.Buffer, name)).parameters if argument != "self"]
    theirs = ARGUMENTS[name].split()
    assert ours[: len(theirs)] == theirs


def test_sizes_and_configurations_can_be_passed_on() -> None:
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 8 * 128 * 8 * 2 * 2 * 7168
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.get_combine_config(8).num_sms == 24
    deep_ep.Buffer.set_num_sms(20)
