"""The step of a Balancer as a captured graph has it: kernels find what the host has posted since."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import putget
from putget.balancer import BalancedLayer, Balancer, ExpertBlobs, Placement, ReplicaChoice
from tests.balancer.online import options_of

EXPERTS, SLOTS = 4, 6


def replayed(iterate: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """One iteration: on a GPU captured, and replayed at each call."""
    if device.type == "cpu":
        return iterate
    iterate()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate()
    return graph.replay


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def test_a_captured_step_finds_batches_and_gathers_loads(device: str) -> None:
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    (comm,) = putget.Communicator.local(1)
    first = Placement.of([0, 1, 2, 3, 0, 1], EXPERTS)
    choose = ReplicaChoice(first, ep_size=1, device=place)
    load = torch.zeros(EXPERTS, dtype=torch.int32, device=place)
    layer = BalancedLayer(
        ExpertBlobs({"w": torch.zeros(SLOTS, 4, device=place)}), load, choose.tables, choose.tables_of
    )
    row = putget.Payload((4,), torch.float32)
    sizes: dict[str, Any] = {"num_experts": SLOTS, "top_k": 1, "max_tokens_per_rank": 4, "payloads": [row]}
    ids = torch.zeros(1, 1, dtype=torch.int32, device=place)
    weights, x = torch.ones(1, 1, device=place), torch.ones(1, 4, device=place)
    ones = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=place)
    with contextlib.ExitStack() as stack:
        a2a = stack.enter_context(putget.AllToAll(comm, output=row, num_stats=5, device=place, **sizes))
        options: dict[str, Any] = {"num_stats": 5, "interval": 3, "device": place, "in_thread": False}
        balancer = stack.enter_context(Balancer(comm, [layer], first, **options_of(**options)))

        def iterate() -> None:
            load.add_(ones)
            received = a2a.dispatch(ids, weights, x, stats=balancer.stats)
            assert received.stats is not None
            balancer.hear(received.stats)
            a2a.release()
            balancer.step()

        run = replayed(iterate, place)
        for _ in range(20):
            run()
            synchronise(place)
            balancer.poll()
        assert balancer.windows >= 3
        share = balancer._history.load / balancer._history.load.sum()
        assert share[0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
        second = Placement.of([3, 2, 1, 0, 3, 2], EXPERTS)
        assert balancer._landing.post([], {0: choose.tables_of(second)})
        assert torch.equal(choose.tables.cpu(), choose.tables_of(first))
        for _ in range(4):
            run()
        synchronise(place)
        assert torch.equal(choose.tables.cpu(), choose.tables_of(second))
    comm.close()
