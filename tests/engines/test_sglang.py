"""SGLang itself, token for token against one process. `make test-engines` installs it and runs this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import HAS_TRANSFER, Outcome, needs_transfer, only_with_engines, run_cases
from tests.engines.trace import check_parts

ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.engines.sglang_models"}
HOSTS = ("hosts.8",) if HAS_TRANSFER else ()
CASES = ("alone.8", "alone.10", "ep2.8", "ep2.10", "ep4.8", "eplb.8", "overlap.8", "killed.8", *HOSTS)

pytestmark = only_with_engines


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All cases in one run: importing SGLang takes longer than they do."""
    folder = tmp_path_factory.mktemp("sglang")
    return run_cases("sglang", folder, CASES, ENVIRONMENT)


# Five requests of unequal lengths, in chunks of 16 tokens and fewer; then one, so that all ranks but one have none.
@pytest.mark.parametrize(("case", "num_slots", "num_ranks"), [("ep2.8", 8, 2), ("ep2.10", 10, 2), ("ep4.8", 8, 4)])
def test_tokens_are_those_of_one_process(
    case: str, num_slots: int, num_ranks: int, outcomes: dict[str, Outcome]
) -> None:
    outcome, alone = outcomes[case], outcomes[f"alone.{case.split('.')[1]}"]
    assert outcome.tokens() == alone.tokens()
    assert outcome.carried(num_slots, num_ranks)
    assert "putget" not in alone.said()


def test_its_profiler_shows_the_time_of_putget(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["ep2.8"].files[0].parent / "traces" / "ep2.8"
    check_parts(sorted(folder.glob("*.trace.json.gz")), num_ranks=2, num_layers=2)


def test_experts_move_while_requests_run(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["eplb.8"]
    assert outcome.tokens() == outcomes["alone.8"].tokens()
    assert outcome.carried(10, 2)
    assert outcome.log.count("[EPLBManager] rebalance end") >= 4  # two on each rank
    assert outcome.log.count("plans where experts lie: 8 experts in 10 slots on 2 ranks") == 2
    assert outcome.log.count("moves experts between 2 ranks") == 2


def test_two_batches_overlap(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["overlap.8"]
    assert outcome.tokens() == outcomes["alone.8"].tokens()
    assert outcome.carried(8, 2)
    assert outcome.log.count("overlaps the rounds of two batches of a forward") == 2


@needs_transfer
def test_two_nodes(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["hosts.8"]
    assert outcome.tokens() == outcomes["alone.8"].tokens()
    assert outcome.carried(8, 2, " in 2 domains")


def test_a_killed_rank_ends_the_others(outcomes: dict[str, Outcome]) -> None:
    (path,) = outcomes["killed.8"].files
    told = json.loads(Path(path).read_text())
    assert told["ranks"] == 2
    assert told["seconds"] < 60  # no wait of putget, whose deadline is two minutes, holds them
