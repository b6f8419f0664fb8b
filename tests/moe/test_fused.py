"""fused_layer: the bits of ExpertParallelMoE from the same routes and weights, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import putget
from putget.moe import ExpertParallelMoE, fused_layer, layer_payloads
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense
from tests.moe.layers import make_layer

# Different numbers of tokens on every rank, none on some.
ROUNDS = ((3, 0), (8, 5), (0, 0), (1, 1))
KINDS: dict[str, tuple[Dense, torch.dtype]] = {
    "bf16": (Dense(top_k=3), torch.bfloat16),
    "gelu": (Dense(gate="gelu"), torch.bfloat16),
    "fp8": (Dense(fp8=True, hidden=256), torch.float8_e4m3fn),
    "fp8 of bf16 rows": (Dense(fp8=True, hidden=256), torch.bfloat16),
}


def open_a2a(rank: Rank, dense: Dense, row_dtype: torch.dtype) -> putget.AllToAll:
    return putget.AllToAll(
        rank.comm,
        num_experts=dense.num_experts,
        top_k=dense.top_k,
        max_tokens_per_rank=8,
        payloads=layer_payloads(dense.hidden, row_dtype),
        output=putget.Payload((dense.hidden,), torch.bfloat16),
        device=rank.device,
        timeout_s=20.0,
        warmup_timeout_s=20.0,
    )


def weights_of(layer: ExpertParallelMoE) -> dict[str, Any]:
    """The arguments of fused_layer that are an engine's."""
    experts: Any = layer.experts
    weights = {"gate_up": experts.gate_up, "down": experts.down, "gate": experts.gate}
    if experts.gate_up.dtype == torch.float8_e4m3fn:
        weights |= {"gate_up_scales": experts.gate_up_scales, "down_scales": experts.down_scales}
    return weights


def play(rank: Rank, dense: Dense, row_dtype: torch.dtype) -> None:
    """A body: each round by both ways."""
    with make_layer(rank, dense, row_dtype=row_dtype) as layer, open_a2a(rank, dense, row_dtype) as a2a:
        weights, memory = weights_of(layer), a2a.expert_major_memory()
        for index, tokens in enumerate(ROUNDS):
            x = dense.tokens(rank.rank, tokens[rank.rank], index).to(rank.device)
            valid = torch.tensor([len(x) - index % 2], dtype=torch.int32, device=rank.device)
            ids, by, _ = layer.route(x)
            want = layer(x, num_valid_tokens=valid)
            out = torch.empty_like(x)
            got = fused_layer(a2a, x, ids, by, **weights, out=out, num_valid_tokens=valid, memory=memory)
            assert got.data_ptr() == out.data_ptr()
            assert torch.equal(got, want), (rank.rank, index)
            addend = torch.ones_like(x)
            added = fused_layer(a2a, x, ids.long(), by, **weights, addend=addend, busiest_tokens=8)
            plain = fused_layer(a2a, x, ids, by, **weights)
            assert torch.allclose(added.float(), plain.float() + 1, rtol=2**-7, atol=2**-7)
        a2a.check()


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_layer(kind: str) -> None:
    run_ranks(2, play, *KINDS[kind])


def wrong(rank: Rank) -> None:
    """A body: every mistake is a ValueError that names it, and the next call is right."""
    dense, row_dtype = KINDS["fp8"]
    bf16 = Dense(hidden=256)
    with (
        make_layer(rank, dense, row_dtype=row_dtype) as layer,
        make_layer(rank, bf16) as plain,
        open_a2a(rank, dense, row_dtype) as a2a,
        open_a2a(rank, bf16, torch.bfloat16) as flat,
    ):
        x = dense.tokens(rank.rank, 4).to(rank.device)
        ids, by, _ = layer.route(x)
        good = {"x": x, "topk_ids": ids, "topk_weights": by, **weights_of(layer)}
        other = a2a.expert_major_memory(alignment=4)
        fused_layer(a2a, **good)
        rows = torch.zeros(5, 256, dtype=torch.bfloat16, device=rank.device)
        changes: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("x has shape", lambda: {"x": x[:, :128].contiguous()}),
            ("x has dtype", lambda: {"x": x.float()}),
            ("x is a list", lambda: {"x": [1.0]}),
            ("topk_weights has shape", lambda: {"topk_ids": ids[:3]}),
            ("gate_up has shape", lambda: {"gate_up": good["gate_up"][:1]}),
            ("gate_up has dtype float32", lambda: {"gate_up": good["gate_up"].float()}),
            ("down has dtype", lambda: {"down": good["down"].bfloat16()}),
            ("down has shape", lambda: {"down": good["down"][0]}),
            ("gate_up_scales is a NoneType", lambda: {"gate_up_scales": None}),
            ("down_scales has shape", lambda: {"down_scales": good["down_scales"][:, :1]}),
            ("gate is 'relu'", lambda: {"gate": "relu"}),
            ("addend has shape", lambda: {"addend": x[:2]}),
            ("out has dtype", lambda: {"out": x.float()}),
            ("memory is made for alignment 4", lambda: {"memory": other}),
            ("busiest_tokens is 9", lambda: {"busiest_tokens": 9}),
            ("out overlaps addend", lambda: {"out": rows[:4], "addend": rows[1:]}),
            ("addend lies in the workspace", lambda: {"addend": a2a.combine_input.flat[:4]}),
            (r"gate is \['silu'\]", lambda: {"gate": ["silu"]}),
        ]
        for message, change in changes:
            with pytest.raises(ValueError, match=message):
                fused_layer(a2a, **{**good, **change()})
        with pytest.raises(ValueError, match="expected float8_e4m3fn weights"):
            fused_layer(a2a, **{**good, **weights_of(plain), "gate_up_scales": None, "down_scales": None})
        with pytest.raises(ValueError, match="gate_up_scales is given"):
            fused_layer(flat, **{**good, **weights_of(plain)})
        got: Tensor = fused_layer(a2a, **good)
        assert torch.equal(got, layer(x))


def test_refuses_before_anything_happens() -> None:
    run_ranks(2, wrong)


def odd_rows(rank: Rank) -> None:
    """A body: an AllToAll of other payloads."""
    row = putget.Payload((256,), torch.bfloat16)
    with putget.AllToAll(
        rank.comm,
        num_experts=8,
        top_k=2,
        max_tokens_per_rank=8,
        payloads=[row, row],
        output=row,
        device=rank.device,
    ) as a2a:
        zeros = torch.zeros(0, 256, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"a2a has payloads .* expected those of layer_payloads\(256, row_dtype\)"):
            fused_layer(a2a, zeros, torch.zeros(0, 2).int(), torch.zeros(0, 2), zeros, zeros)


def odd_output(rank: Rank) -> None:
    """A body: an AllToAll whose combine returns float32."""
    with putget.AllToAll(
        rank.comm,
        num_experts=8,
        top_k=2,
        max_tokens_per_rank=8,
        payloads=layer_payloads(256),
        output=putget.Payload((256,), torch.float32),
        device=rank.device,
    ) as a2a:
        zeros = torch.zeros(0, 256, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"a2a has output .*float32"):
            fused_layer(a2a, zeros, torch.zeros(0, 2).int(), torch.zeros(0, 2), zeros, zeros)


@pytest.mark.parametrize("body", [odd_rows, odd_output])
def test_another_all_to_all_is_refused(body: Callable[[Rank], None]) -> None:
    run_ranks(1, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12,), "hidden_size is 12, BF16 rows need a multiple of 8"),
        ((192, torch.float8_e4m3fn), "hidden_size is 192"),
        ((256, torch.float16), "row_dtype is torch.float16"),
        ((0,), "hidden_size is 0"),
    ],
)
def test_payloads_that_cannot_be(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_payloads(*arguments)
