"""Adapters whose ranks are on several hosts: the same rows, and the bits that the oracle has for these domains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import putget
from putget.adapters import shared, vllm
from putget.balancer import ExpertBlobs, ExpertExchange, Landing
from putget.group import meeting
from tests.adapters.deep_ep import test_buffer as test_deep_ep
from tests.adapters.flashinfer import test_moe_alltoall as test_flashinfer
from tests.adapters.layer import Layer, same_bits
from tests.adapters.sglang import test_backend as test_sglang_backend
from tests.adapters.sglang import test_sglang
from tests.adapters.tensorrt_llm import test_tensorrt_llm
from tests.adapters.upstream import require_entry_point, upstream
from tests.adapters.vllm import engine as vllm_engine
from tests.adapters.vllm import test_vllm
from tests.harness import Rank, RankError, fresh_ranks
from tests.harness.processes import RankProcesses

pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")

RAGGED = Layer(num_tokens=(3, 0, 8, 1))
LAYERS = [replace(RAGGED, recipe=recipe, seed=seed) for seed, recipe in enumerate(("bf16", "fp8"))]
DOMAIN_OF = (0, 0, 1, 1)


@pytest.fixture
def four() -> Iterator[RankProcesses]:
    with fresh_ranks(4) as ranks:
        yield ranks


def on_two_hosts(rank: Rank, body: Callable[..., Any], *args: Any) -> Any:
    """A body: another one, as if every two ranks had a host of their own."""
    meeting.host_identity = lambda: f"host {rank.rank // 2}"
    comm = shared.communicator_of()
    assert comm.domains == ((0, 1), (2, 3))
    found = body(Rank(rank.rank, rank.size, rank.device, _comm=comm), *args)
    shared.close_shared()
    return found


@pytest.mark.parametrize("worst", [0, 16])
def test_normal_rounds_of_deep_ep(four: RankProcesses, worst: int) -> None:
    four.call(on_two_hosts, test_deep_ep.normal, RAGGED, worst, timeout=90)


def test_low_latency_rounds_of_deep_ep(four: RankProcesses) -> None:
    four.call(on_two_hosts, test_deep_ep.low_latency, RAGGED, True, timeout=90)


@pytest.mark.parametrize("module", [test_flashinfer, test_tensorrt_llm])
def test_layers_of_engines(four: RankProcesses, module: Any) -> None:
    """All layers twice, each time in another way; FlashInfer's by source too."""
    for rank, combined in four.call(on_two_hosts, module.play, LAYERS, timeout=90).items():
        assert len(combined) == 2 * len(LAYERS)
        for index, one in enumerate(combined):
            layer = LAYERS[index // 2 if module is test_flashinfer else index % len(LAYERS)]
            assert same_bits(one, layer.expected(rank, domain_of=DOMAIN_OF)), (rank, index)


@pytest.mark.parametrize("version", test_sglang.VERSIONS)
def test_dispatcher_of_sglang(four: RankProcesses, version: str) -> None:
    root = upstream(version)
    for rank, combined in four.call(on_two_hosts, test_sglang.plugged_in, root, version, timeout=90).items():
        for layer, rows in zip(test_sglang.LAYERS, combined, strict=True):
            assert same_bits(rows, layer.expected(rank, domain_of=DOMAIN_OF)), (rank, layer)


def test_backend_of_sglang(four: RankProcesses) -> None:
    root = upstream(test_sglang.VERSIONS[1])
    require_entry_point("sglang.srt.plugins")
    for rank, combined in four.call(on_two_hosts, test_sglang_backend.layers_of_the_own_name, root, timeout=90).items():
        for layer, rows in zip(test_sglang_backend.LAYERS, combined, strict=True):
            assert same_bits(rows, layer.expected(rank, domain_of=DOMAIN_OF)), (rank, layer)


def layers_of_vllm(rank: Rank, root: Path) -> list[torch.Tensor]:
    """A body: vLLM's modular kernel."""
    engine = vllm_engine.load(root, test_vllm.LAYERS[0])
    vllm.use()
    made = [engine.make(layer, "allgather_reducescatter") for layer in test_vllm.LAYERS]
    return [test_vllm.run_kernel(engine, rank, layer, one) for layer, one in zip(test_vllm.LAYERS, made, strict=True)]


def test_layers_of_vllm(four: RankProcesses) -> None:
    for rank, combined in four.call(on_two_hosts, layers_of_vllm, upstream("vllm"), timeout=90).items():
        for layer, rows in zip(test_vllm.LAYERS, combined, strict=True):
            assert same_bits(rows, layer.expected(rank, domain_of=DOMAIN_OF)), (rank, layer)


@pytest.mark.parametrize("mover", ["exchange", "landing"])
def test_experts_do_not_move_between_hosts(four: RankProcesses, mover: str) -> None:
    """Engines then move them as they do without putget."""
    with pytest.raises(RankError, match=r"comm has 2 domains; experts move between ranks that map each other's memory"):
        four.call(on_two_hosts, make_mover, mover, timeout=90)


def make_mover(rank: Rank, mover: str) -> None:
    """A body: what moves experts of an engine, or of a `Balancer`."""
    if mover == "exchange":
        ExpertExchange(rank.comm, 64, device="cpu")
    else:
        tensor = torch.zeros(2, 4)
        Landing(rank.comm, [ExpertBlobs({"weight": tensor})], device="cpu")


def test_sums_between_hosts_come_back_quantised(four: RankProcesses) -> None:
    combined = four.call(on_two_hosts, test_tensorrt_llm.low_precision, [RAGGED], timeout=90)
    for rank, (low, plain) in combined.items():
        assert same_bits(plain, RAGGED.expected(rank, domain_of=DOMAIN_OF))
        assert same_bits(low, RAGGED.expected(rank, torch.float8_e4m3fn, domain_of=DOMAIN_OF))
    assert not all(same_bits(low, plain) for low, plain in combined.values())


def lose_two_ranks(rank: Rank) -> Any:
    """A body: the second host stays away after a round; the first one goes on, and makes nothing new."""
    layer = replace(RAGGED, no_expert=0.0)
    a2a = test_tensorrt_llm.four_payload(rank, layer)
    test_tensorrt_llm.run_layer(rank, a2a, layer, False, False)
    if rank.rank >= 2:
        return None
    mask = [True, True, False, False]
    a2a.all_to_all.set_active_ranks(mask)
    a2a.all_to_all.expert_to_rank = [expert % 2 for expert in range(layer.num_experts)]
    x, _, ids, _ = a2a.dispatch(*layer.rows(rank.rank), None, *layer.routes(rank.rank))
    mine = (ids >= 0) & (ids % 2 == rank.rank)
    combined = a2a.combine((x.float() * mine.sum(1, keepdim=True)).bfloat16())
    return bool(torch.equal(combined, (layer.hidden(rank.rank).float() * layer.top_k).bfloat16()))


def test_a_host_that_is_lost(four: RankProcesses) -> None:
    for rank in range(4):
        four.submit(rank, on_two_hosts, lose_two_ranks)
    assert four.results([0, 1], timeout=90) == {0: True, 1: True}


def resumed(rank: Rank) -> list[tuple[bool, ...]]:
    """A body: memory that is given up for a checkpoint, and made again."""
    memory = shared.shared_workspace(rank.comm, 1 << 20, "cpu")
    masks = [memory.active_ranks]
    memory.suspend()
    with pytest.raises(putget.ProtocolMisuse, match="given up for a checkpoint"):
        memory.require_open()
    memory.resume()
    masks.append(memory.active_ranks)
    memory.close()
    with pytest.raises(ValueError, match="the workspace is closed"):
        memory.require_open()
    return masks


def test_memory_that_is_given_up_and_made_again(four: RankProcesses) -> None:
    assert four.call(on_two_hosts, resumed, timeout=90) == dict.fromkeys(range(4), [(True,) * 4] * 2)
