"""Rounds across domains over verbs, a process a rank: `transfer/vm/rounds.sh` runs them over soft-RoCE devices."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import putget
from tests.harness import Rank
from tests.harness.cases import Case
from tests.harness.compare import Outcome, check_case, play_on
from tests.harness.domains import in_domains, outlast, ragged, ragged_case
from tests.harness.run import kept_ranks, on_network

pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")

DEVICES = [name for name in os.environ.get("PUTGET_TEST_VERBS", "").split(",") if name]
WORLDS = {"2x1": (2, 1), "2x2": (4, 2)}
SLOW_S = 200.0  # an emulated processor is

pytestmark = pytest.mark.skipif(
    not DEVICES, reason="PUTGET_TEST_VERBS names no devices: transfer/vm/rounds.sh has some"
)


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> tuple[int, int]:
    return WORLDS[request.param]


def over_verbs(rank: Rank, domain_size: int, body: Any, *args: Any) -> Any:
    """A body: runs another one over the first device, which reaches itself."""
    return on_network(rank, putget.Network("verbs", domain_size=domain_size, nics=(DEVICES[0],)), body, *args)


def on_processes(world: tuple[int, int], body: Any, *args: Any) -> list[Any]:
    ep_size, domain_size = world
    found = kept_ranks(ep_size).call(over_verbs, domain_size, body, *args, timeout=2 * SLOW_S)
    return [found[rank] for rank in range(ep_size)]


def play_slowly(rank: Rank, case: Case) -> list[Outcome]:
    """A body: the rounds of a case, with deadlines for a slow processor."""
    with rank.all_to_all(**case.options(), timeout_s=SLOW_S, warmup_timeout_s=SLOW_S) as a2a:
        return play_on(a2a, rank, case)


def test_ragged_rounds_have_the_bits_of_the_oracle(world: tuple[int, int]) -> None:
    case = ragged_case(*world, 20)
    check_case(case, on_processes(world, play_slowly, case))


def test_messages_of_several_chunks(world: tuple[int, int]) -> None:
    ep_size, domain_size = world
    rows = ((512,), torch.bfloat16)
    many: dict[str, Any] = {"payloads": (rows,), "output": rows, "max_tokens_per_rank": 300, "top_k": 3}
    case = in_domains(Case(ep_size, ragged(ep_size, 4, 2, 300), num_experts=2 * ep_size, **many), domain_size)
    check_case(case, on_processes(world, play_slowly, case))


@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_a_silent_rank_is_named(world: tuple[int, int], step: str) -> None:
    gone = world[0] - 1
    assert on_processes(world, outlast, gone, step, 5) == [f"{step} ({gone},)"] * gone + [None]
