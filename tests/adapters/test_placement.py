"""The placement of experts is asked: every adapter with numbers of experts that do not divide by the ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from putget import Payload
from putget.adapters import deep_ep, flashinfer, placement, rounds, shared
from putget.adapters.tensorrt_llm import FourPayloadAllToAll
from tests.adapters.flashinfer import test_moe_ep
from tests.adapters.layer import Layer, same_bits
from tests.adapters.sglang import test_sglang
from tests.adapters.sglang.engine import VERSIONS
from tests.adapters.sglang.engine import load as load_sglang
from tests.adapters.tensorrt_llm import test_tensorrt_llm
from tests.adapters.upstream import upstream
from tests.adapters.vllm import test_vllm
from tests.adapters.vllm.engine import load as load_vllm
from tests.harness import Rank, RankError, fresh_ranks, run_ranks

SIZES = [(10, 3), (60, 8), (256, 72), (8, 4), (3, 5), (1, 1)]


def target_of_flashinfer(expert: int, num_experts: int, ep_size: int) -> int:
    """The rule of FlashInfer's kernels: the first ranks have one expert more."""
    each, more = num_experts // ep_size, num_experts % ep_size
    bigger = more * (each + 1)
    return expert // (each + 1) if expert < bigger else more + (expert - bigger) // each


def map_of_vllm(ep_size: int, ep_rank: int, num_experts: int, strategy: str) -> torch.Tensor:
    """The result of vLLM's determine_expert_map."""
    each, more = num_experts // ep_size, num_experts % ep_size
    mine = each + 1 if ep_rank < more else each
    first = ep_rank * each + min(ep_rank, more)
    experts = range(first, first + mine) if strategy == "linear" else range(ep_rank, num_experts, ep_size)
    found = torch.full((num_experts,), -1, dtype=torch.int32)
    found[list(experts)] = torch.arange(mine, dtype=torch.int32)
    return found


@pytest.mark.parametrize(("num_experts", "ep_size"), SIZES)
def test_linear_is_flashinfer_s_rule(num_experts: int, ep_size: int) -> None:
    table = placement.linear(num_experts, ep_size)
    assert table == tuple(target_of_flashinfer(expert, num_experts, ep_size) for expert in range(num_experts))


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(("num_experts", "ep_size"), SIZES)
def test_every_rank_learns_the_same_table_from_its_expert_map(num_experts: int, ep_size: int, strategy: str) -> None:
    maps = [map_of_vllm(ep_size, rank, num_experts, strategy) for rank in range(ep_size)]
    expected = tuple(next(rank for rank in range(ep_size) if maps[rank][e] >= 0) for e in range(num_experts))
    assert {placement.of_expert_map(maps[rank], rank, ep_size) for rank in range(ep_size)} == {expected}


def test_a_placement_that_cannot_be_learnt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 0 of 2 the experts \[0, 3\] of 4; supported are the linear"):
        placement.of_expert_map(torch.tensor([0, -1, -1, 1]), 0, 2)
    for num_experts, ep_size in SIZES[:3]:
        with pytest.raises(ValueError, match=f"num_experts is {num_experts}, expected a multiple of the {ep_size}"):
            placement.even(num_experts, ep_size, engine="SGLang")
    with pytest.raises(ValueError, match="num_local_experts is 3, 8 experts on 4 ranks are 2 each"):
        placement.even(8, 4, engine="SGLang", num_local_experts=3)
    with pytest.raises(ValueError, match="has 2 entries, expected 3"):
        placement.given([0, 1], 3, 2)
    with pytest.raises(ValueError, match="holds 2, allowed are ranks from 0 to 1"):
        placement.given(torch.tensor([0, 2]), 2, 2)
    assert placement.given(torch.tensor([1, 0]), 2, 2) == (1, 0)


def uneven(num_experts: int, ep_size: int, table: Any = placement.linear) -> Layer:
    """A layer with one rank without a token."""
    tokens = tuple((5, 0, 8)[rank % 3] for rank in range(ep_size))
    return Layer(num_tokens=tokens, num_experts=num_experts, no_expert=0.0, owners=table(num_experts, ep_size))


UNEVEN = [uneven(10, 3), uneven(60, 8)]


def through_flashinfer(rank: Rank, layer: Layer) -> torch.Tensor:
    """A body: FlashInfer's class with its own arguments."""
    mapping = SimpleNamespace(moe_ep_size=rank.size, moe_ep_rank=rank.rank)
    made = flashinfer.MoeAlltoAll(
        mapping, 8, layer.top_k, layer.num_experts, hidden_size=layer.hidden_size, comm=rank.comm, device="cpu"
    )
    ids, weights = layer.routes(rank.rank)
    x, seen, scores = made.dispatch(ids, [layer.hidden(rank.rank), ids, weights], 8, -1, 1)
    combined = made.combine(layer.experts((x,), seen, scores, rank.rank), 8)
    shared.close_shared(rank.comm)
    return combined


@pytest.mark.parametrize("layer", UNEVEN, ids=["10 on 3", "60 on 8"])
def test_uneven_flashinfer(layer: Layer) -> None:
    for rank, combined in enumerate(run_ranks(layer.ep_size, through_flashinfer, layer)):
        assert same_bits(combined, layer.expected(rank)), rank


@pytest.mark.parametrize("layer", UNEVEN, ids=["10 on 3", "60 on 8"])
def test_moe_ep_refuses(layer: Layer) -> None:
    root = upstream("flashinfer")
    with fresh_ranks(layer.ep_size) as ranks, pytest.raises(RankError, match=f"num_experts .{layer.num_experts}. div"):
        ranks.call(test_moe_ep.play, root, [layer])


def through_vllm(rank: Rank, root: Any, layers: list[Layer]) -> list[torch.Tensor]:
    """A body: vLLM's kernel, which has the expert map of its layer; and one that has none."""
    engine = load_vllm(root, layers[0])
    test_vllm.vllm.install()
    results = [test_vllm.run_kernel(engine, rank, layer, engine.make(layer)) for layer in layers]
    layer, plain = layers[0], SimpleNamespace(quant_dtype=None)
    arguments = (layer.hidden(rank.rank), *reversed(layer.routes(rank.rank)), layer.num_experts)
    with pytest.raises(ValueError, match=r"expert_map is None with . expert-parallel ranks: which rank owns"):
        engine.make(layer).prepare(*arguments, None, False, plain)
    return results


@pytest.mark.parametrize(("num_experts", "ep_size"), SIZES[:2])
def test_vllm_linear_and_round_robin(num_experts: int, ep_size: int) -> None:
    root = upstream("vllm")
    layers = [uneven(num_experts, ep_size), uneven(num_experts, ep_size, placement.round_robin)]
    with fresh_ranks(ep_size) as ranks:
        for rank, results in ranks.call(through_vllm, root, layers).items():
            for layer, rows in zip(layers, results, strict=True):
                assert same_bits(rows, layer.expected(rank)), (rank, layer.owners)


def four_payload(rank: Rank, layer: Layer) -> torch.Tensor:
    """A body: TensorRT-LLM's form is told the table; without it, it refuses."""
    with pytest.raises(ValueError, match=f"num_experts is {layer.num_experts}, expected a multiple of the {rank.size}"):
        test_tensorrt_llm.four_payload(rank, layer)
    made: FourPayloadAllToAll = test_tensorrt_llm.four_payload(rank, layer, expert_to_rank=layer.owners)
    ids, weights = layer.routes(rank.rank)
    x, _, seen, scores = made.dispatch(layer.hidden(rank.rank), None, ids, weights)
    combined = made.combine(layer.experts((x,), seen, scores, rank.rank))
    shared.close_shared(rank.comm)
    return combined


@pytest.mark.parametrize("layer", UNEVEN, ids=["10 on 3", "60 on 8"])
def test_uneven_tensorrt_llm(layer: Layer) -> None:
    for rank, combined in enumerate(run_ranks(layer.ep_size, four_payload, layer)):
        assert same_bits(combined, layer.expected(rank)), rank


def sglang_refuses(rank: Rank, root: Any, layer: Layer) -> None:
    """A body: SGLang has equal numbers of physical experts on all ranks."""
    engine = load_sglang(root, VERSIONS[1])
    kind = test_sglang.sglang.dispatcher_class(engine.module().FlashinferDispatcher)
    with pytest.raises(ValueError, match=f"num_experts is {layer.num_experts}, expected a multiple of the {rank.size}"):
        engine.dispatcher(rank, layer, kind)
    group = torch.distributed.group.WORLD
    with pytest.raises(ValueError, match=f"num_local_experts is 9, {8 * rank.size} experts on {rank.size} ranks"):
        kind(group, 2, num_experts=8 * rank.size, num_local_experts=9, hidden_size=layer.hidden_size)


@pytest.mark.parametrize("layer", UNEVEN, ids=["10 on 3", "60 on 8"])
def test_sglang_refuses(layer: Layer) -> None:
    root = upstream(VERSIONS[1])
    with fresh_ranks(layer.ep_size) as ranks:
        ranks.call(sglang_refuses, root, layer)


def deep_ep_refuses(rank: Rank, layer: Layer) -> None:
    """A body: DeepEP has equal numbers of experts on all ranks."""
    buffer = deep_ep.Buffer(rank.comm, device="cpu")
    ids = layer.routes(rank.rank)[0].long()
    named = f"num_experts is {layer.num_experts}, expected a multiple of the {rank.size}"
    with pytest.raises(ValueError, match=named):
        buffer.get_dispatch_layout(ids, layer.num_experts)
    with pytest.raises(ValueError, match=named):
        buffer.low_latency_dispatch(layer.hidden(rank.rank), ids, 8, layer.num_experts)
    buffer.destroy()


@pytest.mark.parametrize("layer", UNEVEN, ids=["10 on 3", "60 on 8"])
def test_deep_ep_refuses(layer: Layer) -> None:
    run_ranks(layer.ep_size, deep_ep_refuses, layer)


def without_a_table(rank: Rank) -> None:
    """A body: rounds whose engine has not said who owns what."""
    layer = replace(UNEVEN[0], num_tokens=(1,), owners=(0,) * 10)
    row = Payload((layer.hidden_size,), torch.bfloat16)
    num_bytes = shared.engine_workspace_bytes(ep_size=1, max_tokens_per_rank=8, dispatch_bytes=512, output=row)
    made = rounds.Rounds(
        shared.shared_workspace(rank.comm, num_bytes, rank.device),
        num_experts=10,
        top_k=3,
        max_tokens_per_rank=8,
        output=row,
        expert_to_rank=None,
    )
    with pytest.raises(ValueError, match="expert_to_rank is not known"):
        made.dispatch(*layer.routes(0), [layer.hidden(0)], names=["x"])
    shared.close_shared(rank.comm)


def test_rounds_without_a_table_refuse() -> None:
    run_ranks(1, without_a_table)
