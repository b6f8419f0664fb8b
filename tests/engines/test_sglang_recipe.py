"""All of putget in SGLang's servers at once; see tests/engines/recipe_sglang.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import Outcome, needs_transfer, only_with_engines, run
from tests.engines.test_sglang import ENVIRONMENT

pytestmark = [*only_with_engines, needs_transfer]


@pytest.mark.parametrize("requests", [12, pytest.param(60, marks=pytest.mark.soak)])
def test_text_is_that_of_one_server(requests: int, tmp_path: Path) -> None:
    log = run("sglang", "-m", "tests.engines.recipe_sglang", tmp_path, requests, PUTGET_ENGINES="1", **ENVIRONMENT)
    (tmp_path / "log").write_text(log)
    found = json.loads((tmp_path / "recipe.json").read_text())
    assert len({tuple(tokens) for tokens in found["alone"]}) > 0.9 * requests
    assert {len(tokens) for tokens in found["alone"]} == {24}
    assert found["routed"] == found["alone"]
    # With everything that the recipe names: rounds, rank by rank; moves; several tokens an event.
    assert found["workers"] == 2
    assert Outcome([], log).carried(10, 2)
    assert log.count("[EPLBManager] rebalance end") > 4
    assert log.count("moves experts between 2 ranks") == 2
    assert max(found["events"]) <= 8
