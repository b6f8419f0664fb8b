"""Dispatch and combine as torch operators: a compiled layer equals the uncompiled one, in one graph, on every rank."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import putget
from putget import ops
from tests.harness import Rank, run_ranks

HIDDEN, EXPERTS, TOP_K, CAPACITY = 16, 6, 2, 8

# Tokens of each of two ranks; compilers treat 0 and 1 apart from other numbers.
SIZES = ((3, 5), (0, 4), (8, 8), (1, 0), (0, 0), (6, 2))


class Layer(nn.Module):
    """Router, dispatch, this rank's experts, combine and a shared expert."""

    def __init__(self, traced: ops.Traced, rank: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.traced = traced
        self.first = rank * EXPERTS // 2
        self.router = nn.Parameter(torch.randn(HIDDEN, EXPERTS, generator=generator), requires_grad=False)
        experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / 4
        self.experts = nn.Parameter(experts[self.first : self.first + EXPERTS // 2], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.softmax(x.float() @ self.router, dim=-1).topk(TOP_K)
        rows = self.traced.dispatch(ids, weights, x)
        hidden = rows.payloads[0].float()
        total = torch.zeros_like(hidden)
        for local in range(self.experts.shape[0]):
            share = torch.where(rows.topk_ids == self.first + local, rows.topk_weights, 0.0).sum(1, keepdim=True)
            total = total + (hidden @ self.experts[local]) * share
        return self.traced.combine(total.to(x.dtype), x.shape[0], addend=x * 2)


def all_to_all(comm: putget.Communicator, **options: Any) -> putget.AllToAll:
    row = putget.Payload((HIDDEN,), torch.bfloat16)
    defaults = {"num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": CAPACITY, "timeout_s": 60.0}
    return putget.AllToAll(comm, payloads=[row], output=row, **{"device": "cpu", **defaults, **options})


def inputs(rank: int, round_index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * round_index + rank)
    return torch.randn(SIZES[round_index][rank], HIDDEN, generator=generator).bfloat16()


def without_operators(a2a: putget.AllToAll, layer: Layer, x: Tensor) -> Tensor:
    """The layer on AllToAll itself."""

    class Direct:
        def dispatch(self, ids: Tensor, weights: Tensor, rows: Tensor) -> Any:
            return a2a.dispatch(ids, weights, rows).flat

        def combine(self, rows: Tensor, num_tokens: int, addend: Tensor) -> Tensor:
            return a2a.combine(rows, addend=addend)

    traced, layer.traced = layer.traced, Direct()  # type: ignore[assignment]
    try:
        return layer(x)  # type: ignore[no-any-return]
    finally:
        layer.traced = traced


def compiled(rank: Rank, backend: str) -> None:
    """A body: two layers on one workspace, in one graph without a break, with other sizes in every round."""
    torch._dynamo.reset()
    first = all_to_all(rank.comm, device=rank.device)
    objects = [first, all_to_all(rank.comm, device=rank.device, workspace=first.workspace)]
    layers = [Layer(ops.Traced(a2a), rank.rank, seed).to(rank.device) for seed, a2a in enumerate(objects)]

    def model(x: Tensor) -> Tensor:
        return layers[1](layers[0](x)) * 3

    fast = torch.compile(model, fullgraph=True, backend=backend)
    for index in range(len(SIZES)):
        x = inputs(rank.rank, index).to(rank.device)
        expected = x
        for a2a, layer in zip(objects, layers, strict=True):
            expected = without_operators(a2a, layer, expected)
        assert torch.equal(model(x), expected * 3)
        exact = 0.0 if backend != "inductor" else 0.05  # which leaves out roundings to bfloat16
        torch.testing.assert_close(fast(x), expected * 3, rtol=exact, atol=exact)
    for a2a in reversed(objects):
        a2a.close()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_equal_uncompiled_ones(backend: str) -> None:
    run_ranks(2, compiled, backend, timeout=150)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_on_gpus(backend: str) -> None:
    run_ranks(2, compiled, backend, device="cuda", timeout=200)


def unused(rank: Rank) -> None:
    """A body: rank 1 uses nothing of what comes back, and takes part all the same."""
    torch._dynamo.reset()
    a2a = all_to_all(rank.comm, timeout_s=20.0)
    traced = ops.Traced(a2a)

    def model(ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        rows = traced.dispatch(ids, weights, x)
        combined = traced.combine(rows.payloads[0], x.shape[0])
        return combined if rank.rank == 0 else ids.sum()

    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.full((3, TOP_K), 5, dtype=torch.int32)
    x = torch.ones(3, HIDDEN).bfloat16()
    for _ in range(2):
        result = fast(ids, torch.ones(3, TOP_K), x)
    assert rank.rank == 1 or torch.equal(result, x)
    a2a.close()


def test_a_compiler_leaves_no_operator_out() -> None:
    run_ranks(2, unused, timeout=120)


def alone(**options: Any) -> tuple[putget.AllToAll, ops.Traced]:
    (comm,) = putget.Communicator.local(1)
    a2a = all_to_all(comm)
    return a2a, ops.Traced(a2a, **options)


def test_inductor() -> None:
    a2a, traced = alone()
    layer = Layer(traced, 0, 1)
    layer.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / 4, requires_grad=False)
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        fast = torch.compile(layer, fullgraph=True, dynamic=True)
        for num_tokens in (5, 8, 0):
            x = torch.randn(num_tokens, HIDDEN).bfloat16()
            torch.testing.assert_close(fast(x), layer(x), rtol=0.02, atol=0.02)
    a2a.close()


def test_operators_are_what_their_schemas_say() -> None:
    a2a, traced = alone(max_rows=5)
    ids = torch.tensor([[0, 1], [2, -1], [5, 4]])
    weights, x = torch.rand(3, TOP_K), torch.randn(3, HIDDEN).bfloat16()
    common = (traced._key, traced._state)
    arguments = (*common, ids, weights, [x], traced.ep_size, traced.max_rows, torch.tensor([2], dtype=torch.int32))
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.putget.dispatch, arguments, test_utils=tests)
    for like, which in ((x, 0), (ids, -1), (weights, -2)):
        torch.library.opcheck(torch.ops.putget.received, (*common, like, which, 5), test_utils=tests)
    rows = traced.dispatch(ids, weights, x)
    assert rows.payloads[0].shape == (5, HIDDEN)
    assert rows.topk_ids.tolist() == [[0, 1], [2, -1], [5, 4], [-1, -1], [-1, -1]]
    assert torch.equal(rows.topk_weights[:3], weights)
    assert rows.num_tokens.tolist() == [3]
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (traced._state, rows.payloads[0], x)]
        shape = torch.ops.putget.combine(traced._key, fake[0], fake[1], 3, fake[2])
    assert shape.shape == (3, HIDDEN)
    assert shape.dtype == torch.bfloat16
    assert torch.equal(traced.combine(rows.payloads[0], 3), x)
    a2a.close()


def test_received_rows_are_copies() -> None:
    a2a, traced = alone()
    ids, weights = torch.zeros(2, TOP_K, dtype=torch.int32), torch.ones(2, TOP_K)
    first = traced.dispatch(ids, weights, torch.ones(2, HIDDEN).bfloat16())
    traced.combine(first.payloads[0], 2)
    traced.dispatch(ids, weights, torch.zeros(2, HIDDEN).bfloat16())
    assert (first.payloads[0][:2] == 1).all()
    a2a.close()


def test_wrong_calls_name_what_is_wrong() -> None:
    a2a, traced = alone()
    with pytest.raises(ValueError, match="a2a is 3, expected a putget\\.AllToAll"):
        ops.Traced(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_rows is 9, allowed are ints from 1 to 8"):
        ops.Traced(a2a, max_rows=9)
    x = torch.zeros(2, HIDDEN).bfloat16()
    ids, weights = torch.zeros(2, TOP_K, dtype=torch.int32), torch.ones(2, TOP_K)
    with pytest.raises(putget.ProtocolMisuse, match="no dispatch came before it"):
        torch.ops.putget.received(traced._key, traced._state, x, 0, CAPACITY)
    rows = traced.dispatch(ids, weights, x)
    with pytest.raises(ValueError, match="num_tokens is 3, the last dispatch had 2 tokens"):
        traced.combine(rows.payloads[0], 3)
    with pytest.raises(ValueError, match="payloads: 2 came, expected 1"):
        traced.dispatch(ids, weights, x, x)
    a2a.close()
    del a2a
    gc.collect()
    with pytest.raises(putget.ProtocolMisuse, match="the AllToAll of this operator is gone"):
        traced.dispatch(ids, weights, x)
