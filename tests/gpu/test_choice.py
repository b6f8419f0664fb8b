"""The choice of replicas on a GPU: the CPU's slots, eager and in CUDA graphs that obey tables written later."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from putget.balancer import Placement, ReplicaChoice, rebalance
from putget.balancer.choice import CHOICES

# ep_size, slots, experts: of DeepSeek-V3's shape; of many replicas; so many that shared memory has no room for them.
SIZES = {"v3": (8, 288, 256), "many": (32, 96, 64), "large": (64, 1024, 512)}


def placement_of(size: str, seed: int) -> Placement:
    ep_size, slots, experts = SIZES[size]
    load = np.random.default_rng(seed).zipf(1.4, (1, experts)).clip(max=10**6)
    return rebalance(load, slots, 1, 1, ep_size)


def ids_of(seed: int, tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> torch.Tensor:
    """Hot experts, -1 and ids out of range among them."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.3, (tokens, top_k)) - 1, experts + 1)
    ids[rng.random(ids.shape) < 0.05] = -1
    return torch.from_numpy(ids).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", CHOICES)
def test_the_slots_are_the_cpus(how: str, size: str, dtype: torch.dtype) -> None:
    ep_size, _, experts = SIZES[size]
    for rank in (0, ep_size - 1):
        options = {"how": how, "ep_size": ep_size, "ep_rank": rank, "ranks_per_node": max(1, ep_size // 4)}
        placement = placement_of(size, rank)
        host = ReplicaChoice(placement, **options)
        device = ReplicaChoice(placement, device="cuda", **options)
        for tokens, top_k in ((0, 8), (1, 8), (7, 3), (64, 8), (513, 8), (2048, 8), (5, 32)):
            ids = ids_of(tokens, tokens, experts, top_k, dtype)
            for valid in (None, tokens // 2):
                count = None if valid is None else torch.tensor([valid], dtype=torch.int32)
                want = host(ids, seed=tokens, num_valid_tokens=count)
                got = device(ids.cuda(), seed=tokens, num_valid_tokens=None if count is None else count.cuda())
                assert torch.equal(got.cpu(), want), (tokens, top_k, valid)


@pytest.mark.parametrize("how", CHOICES)
def test_a_graph_obeys_tables_and_seeds_that_are_written_later(how: str) -> None:
    ep_size, _, experts = SIZES["v3"]
    options = {"how": how, "ep_size": ep_size, "ep_rank": 3, "ranks_per_node": 4}
    device = ReplicaChoice(placement_of("v3", 0), device="cuda", **options)
    ids = ids_of(0, 96, experts, 8, torch.int32).cuda()
    seed = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(ids)
    device(ids, out=out, seed=seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device(ids, out=out, seed=seed)
    for step in range(1, 5):
        placement = placement_of("v3", step)
        device.set_placement(placement)
        ids.copy_(ids_of(step, 96, experts, 8, torch.int32))
        seed.fill_(step)
        graph.replay()
        assert torch.equal(out.cpu(), ReplicaChoice(placement, **options)(ids.cpu(), seed=step)), step


def test_ids_on_another_device_are_refused() -> None:
    choose = ReplicaChoice(placement_of("v3", 0), ep_size=8, device="cuda")
    with pytest.raises(ValueError, match=r"topk_ids is .* on cpu; it must be .* on cuda:0"):
        choose(torch.zeros(1, 8, dtype=torch.int32))
