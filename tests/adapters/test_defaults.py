"""Nothing depends on torch's defaults: engines set the dtype, the device, grad mode and inference mode of a process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from putget import AllToAll, Payload, reference
from putget.adapters import shared
from putget.adapters.deep_ep import Buffer
from tests.adapters.layer import Layer, same_bits
from tests.adapters.tensorrt_llm.test_tensorrt_llm import four_payload
from tests.harness import Rank, run_ranks

LAYER = Layer(num_tokens=(3, 0, 8), num_experts=6, top_k=2)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "as torch has them": contextlib.nullcontext,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "a device without memory": lambda: torch.device("meta"),
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": lambda: deterministic(),
}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def core(rank: Rank, defaults: str) -> list[torch.Tensor]:
    """A body: set-up, whole rounds, halves, rows by expert, FP8 back and a change of ranks under these defaults."""
    rows, routes = LAYER.rows(rank.rank), LAYER.routes(rank.rank)
    row = Payload((LAYER.hidden_size,), torch.bfloat16)
    addend = torch.zeros(len(rows[0]), LAYER.hidden_size, dtype=torch.bfloat16)
    owners = LAYER.table.tolist()
    comm = rank.comm
    results = []

    with DEFAULTS[defaults]():
        for table, dtype in ((None, None), (owners, torch.float8_e4m3fn)):
            a2a = AllToAll(
                comm,
                num_experts=LAYER.num_experts,
                top_k=LAYER.top_k,
                max_tokens_per_rank=LAYER.max_tokens_per_rank,
                payloads=[row],
                output=row,
                device="cpu",
                expert_to_rank=table,
                combine_dtype=dtype,
                timeout_s=20,
                warmup_timeout_s=20,
            )
            for halves in (False, True):
                if halves:
                    a2a.dispatch_start(*routes, *rows)
                    flat = a2a.dispatch_finish().flat
                else:
                    flat = a2a.dispatch(*routes, *rows).flat
                received = (flat.payloads, flat.topk_ids, flat.topk_weights)
                with torch.device("cpu"), default_dtype(torch.float32):
                    outputs = LAYER.experts(*received, rank.rank)
                if halves:
                    a2a.combine_start(outputs)
                    results.append(a2a.combine_finish(addend=addend))
                else:
                    results.append(a2a.combine(outputs))
            received_all = a2a.dispatch(*routes, *rows)
            layout = received_all.expert_major()
            assert layout.num_rows.device.type == "cpu"
            a2a.release()
            a2a.set_active_ranks([True] * rank.size)
            a2a.close()
    return results


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_rounds(defaults: str) -> None:
    for rank, results in enumerate(run_ranks(3, core, defaults)):
        plain, fp8 = LAYER.expected(rank), LAYER.expected(rank, torch.float8_e4m3fn)
        assert [same_bits(*pair) for pair in zip(results, (plain, plain, fp8, fp8), strict=True)] == [True] * 4


def adapters(rank: Rank, defaults: str) -> list[torch.Tensor]:
    """A body: DeepEP's calls, normal and low latency, and a dispatch without weights, under these defaults."""
    ids, weights = LAYER.routes(rank.rank)
    hidden = LAYER.hidden(rank.rank)
    comm = rank.comm
    with DEFAULTS[defaults]():
        buffer = Buffer(comm, max_tokens_per_rank=8, device="cpu", timeout_s=20, warmup_timeout_s=20)
        long = ids.long()
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(long, LAYER.num_experts)
        rows, local, scores, _, handle, _ = buffer.dispatch(
            hidden,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=long,
            topk_weights=weights,
        )
        assert local is not None
        assert scores is not None
        assert scores.dtype == torch.float32
        assert handle is not None
        normal = buffer.combine(rows, handle)[0]
        packed, _, low, _, _ = buffer.low_latency_dispatch(hidden, long, 8, LAYER.num_experts, use_fp8=True)
        assert packed[1].dtype == torch.float32
        packed, _, low, _, _ = buffer.low_latency_dispatch(hidden, long, 8, LAYER.num_experts, use_fp8=False)
        fast = buffer.low_latency_combine(packed, long, weights, low)[0]
        buffer.destroy()
        a2a = four_payload(rank, LAYER)
        x, _, seen, _ = a2a.dispatch(hidden, None, ids, None)
        with torch.device("cpu"), default_dtype(torch.float32):
            outputs = LAYER.experts((x,), seen, torch.ones(seen.shape), rank.rank)
        four = a2a.combine(outputs)
        shared.close_shared(comm)
    return [normal, fast, four]


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_adapters(defaults: str) -> None:
    plain = run_ranks(3, adapters, "as torch has them")
    for rank, results in enumerate(run_ranks(3, adapters, defaults)):
        ids, weights = LAYER.routes(rank)
        owners = torch.where(ids >= 0, LAYER.table[ids.clamp(0).long()], -1)
        ranks_hit = sum((owners == owner).any(1).float() for owner in range(3))
        hidden = LAYER.hidden(rank).float()
        torch.testing.assert_close(results[0].float(), hidden * ranks_hit[:, None], rtol=0.02, atol=0.02)
        total = torch.where(ids >= 0, weights, 0.0).sum(1)
        torch.testing.assert_close(results[1].float(), hidden * total[:, None], rtol=0.02, atol=0.02)
        for found, expected in zip(results, plain[rank], strict=True):
            assert same_bits(found, expected)


def oracle(rank: Rank, defaults: str) -> list[torch.Tensor]:
    """A body: the reference itself."""
    sent = [reference.Sent(*LAYER.routes(src), LAYER.rows(src)) for src in range(3)]
    with DEFAULTS[defaults]():
        table = reference.default_expert_to_rank(6, 3)
        _, arrived = reference.dispatch(sent, table, max_rows=8)
        return [table, *(part.topk_weights for part in arrived)]


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_reference(defaults: str) -> None:
    (plain,), (found,) = run_ranks(1, oracle, "as torch has them"), run_ranks(1, oracle, defaults)
    assert [same_bits(*pair) for pair in zip(found, plain, strict=True)] == [True] * len(plain)
