"""Rounds across virtual domains on GPUs: a round in a CUDA graph, many layers in one, and rows that wait on the GPU.

tests/alltoall/test_domains.py and test_domains_active.py play the same cases on the CPU and on emulated ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from tests.gpu.graphs import GraphRound
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import Outcome, check_case, play
from tests.harness.domains import Masks, check_masks, come_and_go, in_domains, only, outlast, ragged

STAGINGS = pytest.mark.parametrize("staging", ["host", "device"])
WORLDS = [(4, 2), (8, 4), (8, 2), (2, 1)]
NAMES = ["2x2", "2x4", "4x2", "2x1"]
BATCH = 16
LAYERS = 60


def case_of(ep_size: int, domain_size: int, count: int) -> Case:
    rounds = tuple(Round(40 + index, (BATCH,) * ep_size, no_expert=0.1) for index in range(count))
    return Case(
        ep_size,
        rounds,
        num_experts=3 * ep_size + 1,
        top_k=4,
        max_tokens_per_rank=BATCH,
        payloads=(((128,), torch.float8_e4m3fn), ((3,), torch.float32), ((5,), torch.uint8)),
        output=((72,), torch.bfloat16),
        domain_of=network(domain_size).domain_of(ep_size),
    )


def network(domain_size: int, staging: str = "host") -> putget.Network:
    return putget.Network("sim", domain_size=domain_size, staging=staging)


def in_turn(rank: Rank, body: Any) -> None:
    """Captures of emulated ranks come one after the other: they share one allocator."""
    for turn in range(rank.size):
        rank.meet()
        if turn == rank.rank:
            body()
    rank.meet()


def replay(rank: Rank, case: Case) -> list[Outcome]:
    """A body: one round in a graph, replayed with the data of all rounds."""
    with rank.all_to_all(**case.options()) as a2a:
        graph = GraphRound(rank, a2a, case, BATCH)
        rank.meet()
        graph.record()
        in_turn(rank, graph.capture)
        outcomes = graph.outcomes(case)
        rank.meet()  # memory that goes may wait for all kernels, and a network that copies by CUDA with it
        return outcomes


@STAGINGS
@pytest.mark.parametrize(("ep_size", "domain_size"), WORLDS, ids=NAMES)
def test_a_round_in_a_graph_has_the_bits_of_the_oracle(ep_size: int, domain_size: int, staging: str) -> None:
    case = case_of(ep_size, domain_size, 12)
    seen = run_ranks(ep_size, replay, case, mode="thread", device="cuda", network=network(domain_size, staging))
    check_case(case, seen)


def replay_layers(rank: Rank, case: Case) -> list[Outcome]:
    """A body: as many rounds as a model has layers, in one graph; what the last layer left, for each replay."""
    with rank.all_to_all(**case.options()) as a2a:
        graph = GraphRound(rank, a2a, case, BATCH)

        def layers() -> None:
            for _ in range(LAYERS):
                graph.record()

        rank.meet()
        layers()
        in_turn(rank, lambda: graph.capture(layers))
        outcomes = graph.outcomes(case)
        rank.meet()
        a2a.check()
        return outcomes


@STAGINGS
@pytest.mark.parametrize(("ep_size", "domain_size"), [(8, 4), (8, 2)], ids=["2x4", "4x2"])
def test_a_graph_of_many_layers(ep_size: int, domain_size: int, staging: str) -> None:
    """The same data in each layer: the last one has to show what the first one did."""
    case = case_of(ep_size, domain_size, 3)
    joined = network(domain_size, staging)
    check_case(case, run_ranks(ep_size, replay_layers, case, device="cuda", mode="thread", timeout=150, network=joined))


def replay_under(rank: Rank, case: Case, masks: Masks) -> list[Any]:
    """A body: a round in a graph of before, replayed with the data of all rounds under each mask."""
    with rank.all_to_all(**case.options()) as a2a:
        graph = GraphRound(rank, a2a, case, BATCH)
        rank.meet()
        graph.record()
        in_turn(rank, graph.capture)

        def under_it(me: Rank, mask: tuple[bool, ...]) -> list[Outcome]:
            outcomes = graph.outcomes(replace(case, active=mask), me)
            a2a.check()
            return outcomes

        return masks.play(rank, a2a, under_it)


# A rank, an agent, a domain, and all but one.
LEFT = [only(4, 0, 1, 2, 3), only(4, 0, 1, 2), only(4, 1, 3), only(4, 0, 1), only(4, 2), only(4, 0, 1, 2, 3)]


@STAGINGS
def test_graphs_go_on_with_other_active_ranks(staging: str) -> None:
    case, masks = case_of(4, 2, 4), Masks(*LEFT)
    found = run_ranks(4, replay_under, case, masks, mode="thread", device="cuda", network=network(2, staging))
    check_masks(case, masks, found)


# --- rows that wait on the GPU; on host memory in tests/alltoall/test_domains.py


@pytest.mark.parametrize("wire", [None, torch.float8_e4m3fn], ids=["same", "quantised"])
@pytest.mark.parametrize(("ep_size", "domain_size"), WORLDS, ids=NAMES)
def test_rounds_of_rows_on_the_gpu(ep_size: int, domain_size: int, wire: torch.dtype | None) -> None:
    rows = ((272,), torch.bfloat16)
    many: dict[str, Any] = {"num_experts": 2 * ep_size + 1, "top_k": 5, "max_tokens_per_rank": 150, "num_stats": 3}
    case = Case(
        ep_size, ragged(ep_size, 20, 4, 150), payloads=(rows, ((3,), torch.uint8)), output=rows, wire=wire, **many
    )
    case = in_domains(case, domain_size)
    joined = network(domain_size, "device")
    check_case(case, run_ranks(ep_size, play, case, mode="thread", device="cuda", timeout=150, network=joined))


def test_active_ranks_come_and_go_where_rows_wait_on_the_gpu() -> None:
    case = in_domains(Case(4, ragged(4, 8, 4, 9), num_experts=8, top_k=4, max_tokens_per_rank=9), 2)
    masks = Masks(*LEFT)
    found = run_ranks(4, come_and_go, case, masks, mode="thread", device="cuda", network=network(2, "device"))
    check_masks(case, masks, found)


@pytest.mark.timed
@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_a_silent_rank_is_named_where_rows_wait_on_the_gpu(step: str) -> None:
    joined = network(2, "device")
    raised = run_ranks(4, outlast, 3, step, 5, mode="thread", device="cuda", timeout=90, network=joined)
    assert raised == [f"{step} (3,)"] * 3 + [None]
