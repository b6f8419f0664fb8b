"""Buffer with DeepEP's signatures: layouts, normal and low-latency rounds, events, hooks, two rounds under way."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from putget.adapters import deep_ep
from tests.adapters.conftest import Place
from tests.adapters.deep_ep.fp8 import to_fp8
from tests.adapters.layer import Layer, same_bits
from tests.harness import Rank, run_ranks

RAGGED = Layer(num_tokens=(3, 0, 8, 1))


def buffer_of(rank: Rank, layer: Layer) -> deep_ep.Buffer:
    return deep_ep.Buffer(
        rank.comm, max_tokens_per_rank=layer.max_tokens_per_rank, device=rank.device, timeout_s=20, warmup_timeout_s=20
    )


def experts_per_rank(layer: Layer) -> int:
    """Experts of a rank."""
    return layer.num_experts // layer.ep_size


def routes(layer: Layer, src: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = layer.routes(src)
    return ids.long(), weights


def arrivals(layer: Layer, dst: int) -> list[tuple[int, int]]:
    """(source, token) of the rows that a rank gets, in DeepEP's order."""
    found = []
    for src in range(layer.ep_size):
        ids, _ = routes(layer, src)
        found += [(src, token) for token in range(len(ids)) if (ids[token] // experts_per_rank(layer) == dst).any()]
    return found


def picked(layer: Layer, rows: list[tuple[int, int]], of: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.stack([of(src)[token] for src, token in rows]) if rows else like[:0]


def normal(rank: Rank, layer: Layer, worst: int) -> None:
    """A body: layout, dispatch, cached dispatch, combine; everything against what the seeds say."""
    buffer = buffer_of(rank, layer)
    ids, weights = (tensor.to(rank.device) for tensor in routes(layer, rank.rank))
    payloads = tuple(tensor.to(rank.device) for tensor in layer.rows(rank.rank))
    x: Any = payloads if layer.recipe == "fp8" else payloads[0]
    previous = deep_ep.Buffer.capture() if rank.device.type == "cuda" else deep_ep.EventOverlap()
    per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(
        ids, layer.num_experts, previous_event=previous, async_finish=True
    )
    event.current_stream_wait()
    assert per_rdma is None
    expected_in = torch.stack(
        [(ids // experts_per_rank(layer) == dst).any(1) & True for dst in range(layer.ep_size)], 1
    )
    assert torch.equal(in_rank, expected_in)
    assert torch.equal(per_rank, expected_in.sum(0).int())
    assert per_expert.tolist() == [int((ids == expert).sum()) for expert in range(layer.num_experts)]

    got, got_ids, got_weights, counts, handle, event = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
        expert_alignment=4,
        num_worst_tokens=worst,
        config=deep_ep.Buffer.get_dispatch_config(layer.ep_size),
        async_finish=True,
    )
    with event:
        pass
    rows = arrivals(layer, rank.rank)
    parts = got if isinstance(got, tuple) else (got,)
    for index, part in enumerate(parts):
        assert len(part) == (worst or len(rows))
        expected = picked(layer, rows, lambda src, index=index: layer.rows(src)[index], part.cpu())
        assert same_bits(part[: len(rows)].cpu(), expected)
    sent_ids = picked(layer, rows, lambda src: routes(layer, src)[0], ids.cpu())
    local = sent_ids - rank.rank * experts_per_rank(layer)
    mine = (local >= 0) & (local < experts_per_rank(layer))
    assert torch.equal(got_ids[: len(rows)].cpu(), local.masked_fill(~mine, -1))
    assert (got_ids[len(rows) :] == -1).all()
    sent_weights = picked(layer, rows, lambda src: routes(layer, src)[1], weights.cpu())
    assert torch.equal(got_weights[: len(rows)].cpu(), sent_weights.masked_fill(~mine, 0.0))
    exact = [int((local == expert).sum()) for expert in range(experts_per_rank(layer))]
    assert counts == ([] if worst else [-(-count // 4) * 4 for count in exact])

    again, *nothing, event = buffer.dispatch(x, handle=handle)
    assert nothing == [None, None, None, None]
    for first, second in zip(parts, again if isinstance(again, tuple) else (again,), strict=True):
        assert same_bits(first[: len(rows)].cpu(), second[: len(rows)].cpu())

    # Each rank gives rank + 1 times the row: the sum over a token's ranks is the row times a small whole number.
    hidden = picked(layer, rows, layer.hidden, layer.hidden(rank.rank)).to(rank.device)
    output = torch.full((worst or len(rows), layer.hidden_size), float("nan"), device=rank.device).bfloat16()
    output[: len(rows)] = hidden * (rank.rank + 1)
    bias = torch.full((len(ids), layer.hidden_size), 0.5, device=rank.device).bfloat16()
    combined, no_weights, _ = buffer.combine(output, handle, bias=bias, config=buffer.get_combine_config(4))
    assert no_weights is None
    own = layer.hidden(rank.rank).float()
    total = sum((own * (dst + 1)).bfloat16().float() * in_rank[:, dst : dst + 1].cpu() for dst in range(layer.ep_size))
    torch.testing.assert_close(combined.cpu().float(), total + 0.5, rtol=2**-7, atol=2**-7)
    buffer.destroy()


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize("worst", [0, 4 * 8])
def test_normal_rounds(recipe: str, worst: int, place: Place) -> None:
    layer = place.fit(replace(RAGGED, recipe=recipe, hidden_size=256))
    place.run(normal, layer, worst)
    place.run(normal, place.fit(replace(layer, num_tokens=(0, 0, 0, 0))), worst)


def in_order(rank: Rank, layer: Layer) -> None:
    """A body: calls that wait for an event alone, and an engine that waits for theirs: overwritten inputs, and work
    on the current stream that does not hold them up."""
    buffer = buffer_of(rank, layer)
    on_gpu = rank.device.type == "cuda"
    assert (buffer.get_comm_stream() is not None) == on_gpu
    ids, weights = (tensor.to(rank.device) for tensor in routes(layer, rank.rank))
    hidden = layer.hidden(rank.rank).to(rank.device)
    expected = [hidden_of(layer, rank.rank, turn) for turn in range(4)]
    own = [layer.hidden(rank.rank).float() * (turn + 1) for turn in range(4)]
    worst = layer.max_tokens_per_rank * layer.ep_size
    for turn in range(4):
        x = (hidden.float() * (turn + 1)).bfloat16()
        given = deep_ep.Buffer.capture()
        busy = torch.cuda.Event() if on_gpu else None
        if busy is not None and turn:  # the first round sets up memory, which waits for the device
            torch.cuda._sleep(400_000_000)
            busy.record()
        order = {"previous_event": given, "async_finish": True, "allocate_on_comm_stream": turn % 2 == 0}
        per_rank, _, per_expert, in_rank, laid_out = buffer.get_dispatch_layout(ids, layer.num_experts, **order)
        order["previous_event"] = laid_out
        got, _, _, _, handle, arrived = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=worst,
            **order,
        )
        if busy is not None and turn:
            arrived.event.synchronize()
            assert not busy.query(), "dispatch waited for the current stream"
        arrived.current_stream_wait()
        assert same_bits(got[: len(expected[turn])].cpu(), expected[turn])
        output = (got.float() * 2).bfloat16()
        ready = deep_ep.Buffer.capture()
        combined, _, done = buffer.combine(output, handle, previous_event=ready, async_finish=True)
        del output, got, x  # their memory is handed out again: not before the call is done
        scratch = [
            torch.full((worst, layer.hidden_size), float("nan"), device=rank.device).bfloat16() for _ in range(4)
        ]
        done.current_stream_wait()
        ranks_each = in_rank.sum(1, keepdim=True).cpu()
        total = own[turn].bfloat16().float() * 2 * ranks_each
        torch.testing.assert_close(combined.cpu().float(), total, rtol=2**-7, atol=2**-7)
        del scratch
    with pytest.raises(ValueError, match="allocate_on_comm_stream is True with previous_event None"):
        buffer.get_dispatch_layout(ids, layer.num_experts, allocate_on_comm_stream=True)
    with pytest.raises(ValueError, match="return_recv_hook and async_finish are both True"):
        buffer.low_latency_dispatch(hidden, ids, 8, layer.num_experts, async_finish=True, return_recv_hook=True)
    buffer.destroy()


def hidden_of(layer: Layer, dst: int, turn: int) -> torch.Tensor:
    """The rows that a rank gets in a turn."""
    rows = arrivals(layer, dst)
    return picked(layer, rows, lambda src: (layer.hidden(src).float() * (turn + 1)).bfloat16(), layer.hidden(dst))


def test_events_order_calls(place: Place) -> None:
    place.run(in_order, place.fit(RAGGED))


def dequantised(rows: Any) -> torch.Tensor:
    return rows[0].float() * rows[1].repeat_interleave(128, -1) if isinstance(rows, tuple) else rows.float()


def low_latency(rank: Rank, layer: Layer, use_fp8: bool) -> None:
    """A body: rows by expert, counts, and combine with weights; with a hook, with zero copy, and as it comes."""
    buffer = buffer_of(rank, layer)
    ids, weights = (tensor.to(rank.device) for tensor in routes(layer, rank.rank))
    hidden = layer.hidden(rank.rank).to(rank.device)
    stats = torch.zeros(experts_per_rank(layer), dtype=torch.int32, device=rank.device)
    capacity = layer.max_tokens_per_rank * layer.ep_size
    for turn in range(3):
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            hidden,
            ids,
            layer.max_tokens_per_rank,
            layer.num_experts,
            cumulative_local_expert_recv_stats=stats,
            use_fp8=use_fp8,
            async_finish=turn == 0,
            return_recv_hook=turn == 1,
        )
        hook()
        event.current_stream_wait()
        values = dequantised(rows)
        assert tuple(values.shape) == (experts_per_rank(layer), capacity, layer.hidden_size)
        if use_fp8:
            assert rows[1].stride(1) == 1  # column-major, as grouped products want it
        output = torch.full_like(values, float("nan"))
        for local in range(experts_per_rank(layer)):
            expert = rank.rank * experts_per_rank(layer) + local
            expected = []
            for src in range(layer.ep_size):
                row = layer.hidden(src)
                sent = dequantised(to_fp8(row) if use_fp8 else row)
                chosen = (routes(layer, src)[0] == expert).any(1)
                expected += list(sent[chosen])
            assert counts[local] == len(expected)
            for row, value in enumerate(expected):
                assert torch.equal(values[local, row].cpu(), value)
            output[local, : len(expected)] = values[local, : len(expected)] * (expert + 1)
        out = torch.empty_like(hidden) if turn == 1 else None
        source = output.bfloat16()
        if turn == 2:
            buffer.get_next_low_latency_combine_buffer(handle).copy_(source)
            source = torch.zeros_like(source)
        combined, event, hook = buffer.low_latency_combine(
            source, ids, weights, handle, zero_copy=turn == 2, return_recv_hook=turn == 1, out=out
        )
        hook()
        event.current_stream_wait()
        assert out is None or combined.data_ptr() == out.data_ptr()
        own = dequantised(to_fp8(hidden.cpu()) if use_fp8 else hidden).to(rank.device)
        rows_k = (own[:, None] * (ids[:, :, None] + 1)).bfloat16().float()
        total = (rows_k * torch.where(ids >= 0, weights, 0.0)[:, :, None]).sum(1)
        torch.testing.assert_close(combined.float(), total, rtol=2**-7, atol=2**-7)
    assert stats.tolist() == (3 * counts).tolist()
    buffer.destroy()


@pytest.mark.parametrize("use_fp8", [True, False])
def test_low_latency_rounds(use_fp8: bool, place: Place) -> None:
    place.run(low_latency, place.fit(RAGGED), use_fp8)
    place.run(low_latency, place.fit(replace(RAGGED, num_tokens=(0, 8, 0, 0), no_expert=0.8)), use_fp8)


def full_of_repeats(rank: Rank, device_ids: torch.Tensor) -> None:
    """A body: every rank is full of tokens that name experts several times, of which some are all alike."""
    tokens, top_k, num_experts, hidden = 6, 4, 2 * rank.size, 128
    buffer = deep_ep.Buffer(rank.comm, device=rank.device, timeout_s=20, warmup_timeout_s=20)
    generator = torch.Generator().manual_seed(rank.rank)
    ids = device_ids.to(rank.device)
    weights = 2.0 ** -torch.randint(0, 5, (tokens, top_k), generator=generator).to(rank.device)
    x = torch.randint(-8, 9, (tokens, hidden), generator=generator).bfloat16().to(rank.device)
    handles = []
    for turn in range(4):
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, tokens, num_experts, use_fp8=False, return_recv_hook=turn % 2 == 1
        )
        hook()
        experts = torch.arange(2, device=rank.device) + 2 * rank.rank
        has = (ids[:, :, None] == experts).any(1).sum(0)  # of a rank; all have the same ids
        assert counts.tolist() == (rank.size * has).tolist()
        handles.append((rows * (experts + 1)[:, None, None], handle))
    wanted = (x.float()[:, None] * torch.where(ids >= 0, weights * (ids + 1), 0.0)[..., None]).sum(1)
    # The first two have no round any more: their combine begins one.
    for turn, (output, handle) in enumerate(handles):
        combined, _, hook = buffer.low_latency_combine(output, ids, weights, handle, return_recv_hook=turn % 2 == 1)
        hook()
        assert torch.equal(combined, wanted.bfloat16())
    buffer.destroy()


@pytest.mark.parametrize(
    "ids", [torch.zeros(6, 4, dtype=torch.int64), torch.tensor([[0, 1, 0, -1], [3, 3, 3, 0], [-1, -1, 2, 2]] * 2)]
)
def test_a_token_may_name_an_expert_twice(ids: torch.Tensor, place: Place) -> None:
    """As in normal rounds: its row goes there once, with the weights of both."""
    place.run(full_of_repeats, ids)


def again_and_again(rank: Rank, layer: Layer, with_ids: bool) -> None:
    """A body: one handle is combined, sent again and combined, with weights and two biases; what the handle says."""
    buffer = buffer_of(rank, layer)
    ids, weights = (tensor.to(rank.device) for tensor in routes(layer, rank.rank))
    hidden = layer.hidden(rank.rank).to(rank.device)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, layer.num_experts)
    given = {"topk_idx": ids, "topk_weights": weights} if with_ids else {}
    got, got_ids, got_weights, counts, handle, _ = buffer.dispatch(
        hidden, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, max_tokens_per_rank=9, **given
    )
    rows = arrivals(layer, rank.rank)
    assert same_bits(got.cpu(), picked(layer, rows, layer.hidden, got.cpu()))
    assert (got_ids is None) == (got_weights is None) == (not with_ids)
    first = rank.rank * experts_per_rank(layer)
    every = torch.cat([routes(layer, src)[0] for src in range(layer.ep_size)])
    assert counts == [int((every == first + local).sum()) for local in range(experts_per_rank(layer))]
    ends = torch.tensor([sum(src <= last for src, _ in rows) for last in range(layer.ep_size)], dtype=torch.int32)
    assert torch.equal(handle[0][:, rank.rank].cpu(), ends)
    assert torch.equal(handle[4], in_rank)
    with pytest.raises(ValueError, match=r"handle\[1\] is asked for"):
        handle[1]
    ranks_each = in_rank.sum(1, keepdim=True).float()
    biases = tuple(torch.full_like(hidden, value) for value in (0.5, -2.0))
    for turn in range(3):
        x = (got.float() * 2**turn).bfloat16()
        shares = torch.full((len(rows), layer.top_k), 0.25, device=rank.device)
        combined, summed, _ = buffer.combine(x, handle, topk_weights=shares, bias=biases if turn == 1 else None)
        total = hidden.float() * 2**turn * ranks_each - (1.5 if turn == 1 else 0.0)
        torch.testing.assert_close(combined.float(), total, rtol=2**-7, atol=2**-7)
        assert torch.equal(summed, (0.25 * ranks_each).expand(-1, layer.top_k))
        if turn == 0:
            again, *_ = buffer.dispatch((hidden.float() * 3).bfloat16(), handle=handle)
            assert same_bits(again.cpu(), (picked(layer, rows, layer.hidden, got.cpu()).float() * 3).bfloat16())
    buffer.destroy()


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_handle_outlives_its_round(with_ids: bool, place: Place) -> None:
    place.run(again_and_again, place.fit(RAGGED), with_ids)


def rounded(rank: Rank, layer: Layer) -> None:
    """A body: scales that are powers of two, as float32 and as exponents; what a low-latency handle says."""
    buffer = buffer_of(rank, layer)
    ids, weights = (tensor.to(rank.device) for tensor in routes(layer, rank.rank))
    hidden = layer.hidden(rank.rank).to(rank.device)
    num_local, size = experts_per_rank(layer), layer.ep_size
    found = {}
    for use_ue8m0 in (False, True):
        (values, scales), counts, handle, *_ = buffer.low_latency_dispatch(
            hidden, ids, layer.max_tokens_per_rank, layer.num_experts, round_scale=True, use_ue8m0=use_ue8m0
        )
        assert scales.stride(1) == 1
        if use_ue8m0:
            assert scales.shape[2] == layer.hidden_size // 512
            scales = (scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)
        found[use_ue8m0] = (values, scales.contiguous())
        for local in range(num_local):
            expert = rank.rank * num_local + local
            place = 0
            for src in range(size):
                tokens = [token for token, row in enumerate(routes(layer, src)[0].tolist()) if expert in row]
                begin, count = divmod(int(handle[1][local, src]), 2**32)
                assert (begin, count) == (place, len(tokens))
                assert handle[0][local, place : place + count].tolist() == tokens
                for row, token in enumerate(tokens):
                    x = layer.hidden(src)[token].to(rank.device)
                    limit = (x.float().view(-1, 128).abs().amax(1).clamp(min=1e-4) / 448).cpu()
                    scale = scales[local, place + row].cpu()
                    assert torch.equal(scale, 2.0 ** scale.log2().round())
                    assert ((scale >= limit) & (scale < 2 * limit)).all()
                    back = values[local, place + row].float().view(-1, 128).cpu() * scale[:, None]
                    torch.testing.assert_close(back.flatten(), x.float().cpu(), rtol=2**-3, atol=2**-3)
                place += count
            assert place == counts[local]
        assert [handle[index] for index in (2, 3, 4)] == [8, layer.hidden_size, layer.num_experts]
        rows = values.float() * scales.repeat_interleave(128, -1)
        for turn in range(3):  # one handle, three times: the second and third by another round, the third with a hook
            combined, _, hook = buffer.low_latency_combine(
                rows.bfloat16(), ids, weights, handle, return_recv_hook=turn == 2
            )
            hook()
            total = hidden.float() * torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
            torch.testing.assert_close(combined.float(), total, rtol=2**-3, atol=2**-2)
    for local in range(num_local):
        for part in range(2):
            valid = [parts[part][local, : counts[local]].contiguous() for parts in found.values()]
            assert same_bits(*valid)
    with pytest.raises(ValueError, match="use_ue8m0 is True, round_scale is False"):
        buffer.low_latency_dispatch(hidden, ids, 8, layer.num_experts, use_ue8m0=True)
    buffer.destroy()


def test_scales_that_are_powers_of_two(place: Place) -> None:
    place.run(rounded, place.fit(replace(RAGGED, hidden_size=1024)))


def two_under_way(rank: Rank) -> None:
    """A body: two micro-batches interleave; a third dispatch ends the oldest, whose combine begins another round."""
    layers = [replace(RAGGED, num_tokens=(3, 1), num_experts=4, top_k=2, seed=seed) for seed in range(3)]
    buffer = buffer_of(rank, layers[0])

    def begin(layer: Layer) -> Any:
        ids, _ = routes(layer, rank.rank)
        return buffer.low_latency_dispatch(layer.hidden(rank.rank), ids, 8, 4, use_fp8=False)

    def end(layer: Layer, begun: Any) -> torch.Tensor:
        ids, weights = routes(layer, rank.rank)
        return buffer.low_latency_combine(begun[0], ids, torch.ones_like(weights), begun[2])[0]

    first, second = begin(layers[0]), begin(layers[1])
    for layer, begun in ((layers[0], first), (layers[1], second)):
        ids, _ = routes(layer, rank.rank)
        expected = (layer.hidden(rank.rank).float() * (ids >= 0).sum(1, keepdim=True)).bfloat16()
        assert torch.equal(end(layer, begun), expected)
    begun = [begin(layer) for layer in layers]
    for index in (0, 1, 2, 2, 0):
        ids, _ = routes(layers[index], rank.rank)
        expected = (layers[index].hidden(rank.rank).float() * (ids >= 0).sum(1, keepdim=True)).bfloat16()
        assert torch.equal(end(layers[index], begun[index]), expected)
    buffer.destroy()


def hooks(rank: Rank) -> None:
    """A body: nothing is waited for before the hook, which works once; a round without its hook is finished for it."""
    layers = [replace(RAGGED, num_tokens=(3, 1), num_experts=4, top_k=2, seed=seed) for seed in range(4)]
    buffer = buffer_of(rank, layers[0])

    def begin(layer: Layer) -> Any:
        ids, _ = routes(layer, rank.rank)
        return buffer.low_latency_dispatch(layer.hidden(rank.rank), ids, 8, 4, use_fp8=False, return_recv_hook=True)

    warm_up = begin(layers[0])  # the first round sets memory up, which is collective
    warm_up[4]()
    ids, weights = routes(layers[0], rank.rank)
    buffer.low_latency_combine(warm_up[0], ids, weights, warm_up[2])
    started = time.monotonic()
    if rank.rank == 1:  # which begins half a second after the other one has begun
        rank.comm.compare("begun", {}, 20.0)
        time.sleep(0.5)
    begun = begin(layers[1])
    if rank.rank == 0:
        rank.comm.compare("begun", {}, 20.0)
    begun[1].fill_(-7)
    ids, weights = routes(layers[1], rank.rank)
    with pytest.raises(putget.ProtocolMisuse, match="the hook of this handle's dispatch has not been called"):
        buffer.low_latency_combine(begun[0], ids, weights, begun[2])
    assert (begun[1] == -7).all()
    begun[4]()
    assert time.monotonic() - started >= 0.5
    assert (begun[1] >= 0).all()
    begun[4]()
    combined, _, hook = buffer.low_latency_combine(
        begun[0], ids, torch.ones_like(weights), begun[2], return_recv_hook=True
    )
    hook()
    expected = (layers[1].hidden(rank.rank).float() * (ids >= 0).sum(1, keepdim=True)).bfloat16()
    assert torch.equal(combined, expected)
    hook()
    for layer in layers[1:]:
        last = begin(layer)  # of three the first is given up, with its hook not called
    last[4]()
    buffer.destroy()


def test_hooks_wait_and_calls_do_not() -> None:
    run_ranks(2, hooks)


def test_two_rounds_can_be_under_way() -> None:
    run_ranks(2, two_under_way)
