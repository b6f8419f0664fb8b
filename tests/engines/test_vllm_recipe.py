"""All of putget in vLLM's servers at once; see tests/engines/recipe_vllm.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import Outcome, needs_transfer, only_with_engines, run
from tests.engines.test_vllm import ENVIRONMENT

pytestmark = [*only_with_engines, needs_transfer]


@pytest.mark.parametrize("requests", [12, pytest.param(60, marks=pytest.mark.soak)])
def test_text_is_that_of_one_server(requests: int, tmp_path: Path) -> None:
    log = run("vllm", "-m", "tests.engines.recipe_vllm", tmp_path, requests, PUTGET_ENGINES="1", **ENVIRONMENT)
    (tmp_path / "log").write_text(log)
    found = json.loads((tmp_path / "recipe.json").read_text())
    assert len({tuple(tokens) for tokens in found["alone"]}) > 0.9 * requests
    assert {len(tokens) for tokens in found["alone"]} == {24}
    assert found["routed"] == found["alone"]
    # With everything that the recipe names: rounds, rank by rank; moves; drafts that were right; pages that travelled.
    assert found["workers"] == 2
    assert Outcome([], log).carried(10, 2)
    assert log.count("Rearranged experts") > 4
    assert "moves experts between 2 ranks" in log
    assert found["drafts"]["accepted"] > 0
    assert found["ends"]["arrived"] > 0
