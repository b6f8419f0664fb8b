"""Rounds across domains with a GPU and a process for each rank: bits, graphs, who is named.

Rows wait in host memory for tcp and host, and on the GPU for nvlink.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from tests.gpu.graphs import GraphRound
from tests.gpu.test_domains import BATCH, case_of, replay, replay_layers
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case
from tests.harness.compare import Outcome, check_case, check_round, play
from tests.harness.domains import in_domains, only, outlast, play_many, ragged

pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")

# Ranks and the size of a domain, for as many GPUs as there are.
WORLDS = {"2x1": (2, 1), "4x1": (4, 1), "2x2": (4, 2), "2x4": (8, 4), "4x2": (8, 2)}
WIDE: dict[str, Any] = {"payloads": (((24,), torch.bfloat16), ((3,), torch.uint8)), "output": ((24,), torch.bfloat16)}


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> tuple[int, int]:
    ep_size, domain_size = WORLDS[request.param]
    if torch.cuda.device_count() < ep_size:
        pytest.skip(f"needs {ep_size} GPUs, found {torch.cuda.device_count()}")
    return ep_size, domain_size


@pytest.fixture(params=["tcp", "host", "nvlink"])
def network(request: pytest.FixtureRequest, world: tuple[int, int]) -> putget.Network:
    return putget.Network(request.param, domain_size=world[1])


def on_gpus(network: putget.Network, ep_size: int, body: Any, *args: Any) -> list[Any]:
    return run_ranks(ep_size, body, *args, device="cuda", timeout=150, network=network)


def test_ragged_rounds_have_the_bits_of_the_oracle(world: tuple[int, int], network: putget.Network) -> None:
    ep_size, domain_size = world
    rounds = ragged(ep_size, 40, ep_size + domain_size, 9)
    many: dict[str, Any] = {"num_experts": 2 * ep_size + 1, "top_k": 5, "max_tokens_per_rank": 9, "num_stats": 3}
    case = in_domains(Case(ep_size, rounds, **many, **WIDE), domain_size)
    check_case(case, on_gpus(network, ep_size, play, case))


def test_sentinel_rows_in_a_domain(world: tuple[int, int], network: putget.Network) -> None:
    ep_size, domain_size = world
    case = Case(ep_size, ragged(ep_size, 30, 3, 8), num_experts=ep_size, top_k=4, sentinel_rows=True, **WIDE)
    case = in_domains(case, domain_size)
    check_case(case, on_gpus(network, ep_size, play, case))


def test_sums_of_other_domains_come_quantised(world: tuple[int, int], network: putget.Network) -> None:
    """Rows of a real model, in more than one chunk."""
    ep_size, domain_size = world
    rows = ((7168,), torch.bfloat16)
    many: dict[str, Any] = {
        "num_experts": 2 * ep_size,
        "top_k": 4,
        "max_tokens_per_rank": 200,
        "wire": torch.float8_e4m3fn,
    }
    case = in_domains(Case(ep_size, ragged(ep_size, 6, 1, 200), output=rows, **many), domain_size)
    check_case(case, on_gpus(network, ep_size, play, case))


def test_hundreds_of_rounds_repeat_their_bits(world: tuple[int, int], network: putget.Network) -> None:
    ep_size, domain_size = world
    case = in_domains(Case(ep_size, ragged(ep_size, 20, 5, 4), top_k=3), domain_size)
    assert on_gpus(network, ep_size, play_many, case, 20) == [0] * ep_size


def test_graphs_of_one_round_and_of_many_layers(world: tuple[int, int], network: putget.Network) -> None:
    ep_size, domain_size = world
    case = case_of(ep_size, domain_size, 6)
    check_case(case, on_gpus(network, ep_size, replay, case))
    check_case(case, on_gpus(network, ep_size, replay_layers, case))


def go_on(rank: Rank, case: Case, gone: int) -> list[list[Outcome]]:
    """A body: a graph with all ranks, then without the one that stops; it waits for the others to be done."""
    with rank.all_to_all(**case.options(), timeout_s=5.0) as a2a:
        graph = GraphRound(rank, a2a, case, BATCH)
        graph.load(0)
        graph.record()
        graph.capture()
        outcomes = [graph.outcomes(case)]
        if rank.rank == gone:
            time.sleep(15)
            return outcomes
        graph.replay()
        with pytest.raises(putget.PeerTimeout) as raised:
            a2a.check()
        assert raised.value.missing == (gone,)
        mask = only(rank.size, *(other for other in range(rank.size) if other != gone))
        a2a.set_active_ranks(mask)
        return [*outcomes, graph.outcomes(replace(case, active=mask))]


@pytest.mark.timed
def test_survivors_go_on_and_old_graphs_obey(world: tuple[int, int], network: putget.Network) -> None:
    ep_size, domain_size = world
    case, gone = case_of(ep_size, domain_size, 5), ep_size - 1
    found = on_gpus(network, ep_size, go_on, case, gone)
    check_case(case, [one[0] for one in found])
    rest = replace(case, active=only(ep_size, *range(gone)))
    for index in range(len(case.rounds)):
        check_round(rest, index, {rank: found[rank][1][index] for rank in range(gone)})


@pytest.mark.timed
@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_a_silent_rank_is_named(world: tuple[int, int], network: putget.Network, step: str) -> None:
    ep_size, _ = world
    gone = ep_size - 1
    raised = on_gpus(network, ep_size, outlast, gone, step, 5)
    assert raised == [f"{step} ({gone},)"] * gone + [None]
