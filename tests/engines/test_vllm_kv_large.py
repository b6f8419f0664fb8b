"""Whole servers of vLLM with putget's connector: under faults, and with unlike numbers of ranks. Soaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import Outcome, needs_transfer, only_with_engines, run
from tests.engines.test_vllm import ENVIRONMENT

pytestmark = [*only_with_engines, needs_transfer, pytest.mark.soak]


def test_text_stays_right_while_servers_die_and_stand_still(tmp_path: Path) -> None:
    """Thirty streamed requests: some are cancelled, a prefill server is killed, the decode server is stopped."""
    log = run("vllm", "-m", "tests.engines.kv_vllm_large", tmp_path, "large", PUTGET_ENGINES="1", **ENVIRONMENT)
    (tmp_path / "log").write_text(log)
    found = json.loads((tmp_path / "large.json").read_text())
    whole = [number for number, tokens in enumerate(found["routed"]) if len(tokens) == 6]
    assert len(whole) == 26
    for routed, alone in zip(found["routed"], found["alone"], strict=True):
        assert routed == alone[: len(routed)]
    assert len({tuple(tokens) for tokens in found["alone"]}) == 30
    assert found["ends"]["arrived"] > 0
    assert all(one["right"] for one in found["after"]), found["after"]
    assert found["after"][-1] == {"right": True, "arrived": 6, "failed": 0}, found["after"]
    assert found["busy"] == []
    assert Outcome([], log).carried(8, 2)


def test_ranks_of_both_sides_may_differ(tmp_path: Path) -> None:
    """Six prompts from one rank to two of tensor parallelism and back, and from a pipeline of two."""
    log = run("vllm", "-m", "tests.engines.kv_vllm_large", tmp_path, "widths", PUTGET_ENGINES="1", **ENVIRONMENT)
    (tmp_path / "log").write_text(log)
    found = json.loads((tmp_path / "widths.json").read_text())
    assert len({tuple(tokens) for tokens in found["alone"]}) == 6
    assert found["one to two"] == found["two to one"] == found["a pipeline of two to one"] == found["alone"]
    # Each decode rank has received each prompt.
    assert found["arrived"] == {"one to two": 12, "two to one": 6, "a pipeline of two to one": 6}
