"""vLLM itself, token for token against one process. `make test-engines` installs it and runs this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import HAS_TRANSFER, Outcome, needs_transfer, only_with_engines, run_cases
from tests.engines.trace import check_parts

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
TRANSFER = ("hosts.8",) if HAS_TRANSFER else ()
CASES = ("alone.8", "alone.10", "dp2.8", "dp3.10", "tp2dp2.8", "serve.8", "dbo.8", "killed.8", *TRANSFER)
NUM_REQUESTS = 5

pytestmark = only_with_engines


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All cases in one run: importing vLLM takes longer than they do."""
    folder = tmp_path_factory.mktemp("vllm")
    return run_cases("vllm", folder, CASES, ENVIRONMENT)


# Five requests of unequal lengths and unequal numbers a rank, in chunks of 16 tokens and fewer.
@pytest.mark.parametrize(("case", "num_ranks"), [("dp2.8", 2), ("dp3.10", 3), ("tp2dp2.8", 4)])
def test_tokens_are_those_of_one_process(case: str, num_ranks: int, outcomes: dict[str, Outcome]) -> None:
    num_experts = case.split(".")[1]
    outcome, alone = outcomes[case], outcomes[f"alone.{num_experts}"]
    tokens = outcome.tokens()
    assert tokens == {request: alone.tokens()[request][: len(found)] for request, found in tokens.items()}
    assert len(tokens) == NUM_REQUESTS
    assert outcome.carried(int(num_experts), num_ranks)
    assert "putget" not in alone.said()


def test_its_profiler_shows_the_time_of_putget(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["dp2.8"].files[0].parent / "traces"
    check_parts(sorted(folder.glob("dp2.8.*/*.trace.json.gz")), num_ranks=2, num_layers=2)


def test_a_server_answers_requests_that_come_at_once(outcomes: dict[str, Outcome]) -> None:
    outcome, alone = outcomes["serve.8"], outcomes["alone.8"].tokens()
    tokens = outcome.tokens()
    assert len(tokens) == 7
    assert tokens == {request: alone[str(int(request) % NUM_REQUESTS)] for request in tokens}
    assert outcome.carried(8, 2)


def test_its_configuration_takes_dual_batch_overlap(outcomes: dict[str, Outcome]) -> None:
    """tests/adapters runs the overlap itself in vLLM's modular kernel: vLLM has none on a CPU."""
    without, with_putget = outcomes["dbo.8"].log.split("with putget it ")
    assert "without putget it refuses: " in without
    assert "Microbatching currently only supports the deepep_low_latency" in without
    assert with_putget.startswith("takes allgather_reducescatter")


@needs_transfer
def test_ranks_of_two_hosts(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["hosts.8"]
    assert outcome.tokens() == outcomes["alone.8"].tokens()
    assert outcome.carried(8, 2, " in 2 domains")


def test_a_killed_rank_ends_the_others(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["killed.8"]
    told = json.loads(next(Path(path) for path in outcome.files if path.name == "killed.8").read_text())
    assert told["codes"] == [1, 1]
    assert told["seconds"] < 60  # no wait of putget, whose deadline is two minutes, holds them
