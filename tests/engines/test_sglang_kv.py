"""KV caches between SGLang's servers with putget's backend: its own managers and queues, and whole servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import needs_transfer, only_with_engines, run
from tests.engines.test_sglang import ENVIRONMENT

pytestmark = [*only_with_engines, needs_transfer]

CASES = (
    "chunks_arrive",
    "a_latent_cache",
    "a_prefix_that_is_there_is_not_moved",
    "heads_of_two_ranks_meet_in_one",
    "heads_of_one_rank_go_to_two",
    "states_move_once",
    "an_abort_of_the_decode_server_gives_pages_back",
    "an_abort_of_the_prefill_server_is_told",
    "an_abort_may_come_before_its_request",
    "another_model_is_refused",
    "a_role_may_change",
    "memory_may_be_released_and_come_back",
    "a_late_write_never_meets_another_owner",
    "mistakes_are_named",
    "windows_in_a_pool_of_their_own_are_refused",
    "the_entry_point_tells_its_name",
    "other_backends_are_as_they_were",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one run: importing SGLang takes longer than they do."""
    folder = tmp_path_factory.mktemp("sglang_kv")
    (folder / "log").write_text(run("sglang", "-m", "tests.engines.kv_sglang", folder, **ENVIRONMENT))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_with_its_managers(case: str, folder: Path) -> None:
    found = json.loads((folder / "cases.json").read_text())
    assert found[case] == "ok", found[case]
    assert sorted(found) == sorted(CASES)


def test_text_is_that_of_one_server(folder: Path) -> None:
    found = json.loads((folder / "served.json").read_text())
    assert len({tuple(tokens) for tokens in found["alone"]}) == 8
    for when in ("apart", "after an abort", "after a stop", "after a switch", "after a death"):
        assert found[when] == found["alone"], when
    assert found["watched"] == found["alone"][3:4]


def test_text_is_the_same_behind_its_router(folder: Path) -> None:
    found = json.loads((folder / "served.json").read_text())
    if found["routed"] is None:
        pytest.skip("sglang_router is not installed")
    assert found["routed"] == found["alone"]


def test_a_layer_has_left_before_the_next_is_computed(folder: Path) -> None:
    """The first of two layers has landed when the second begins. It has 1 MiB, a portion of its own."""
    assert json.loads((folder / "layers.json").read_text()) == [0, 1]


def test_what_fails_is_said(folder: Path) -> None:
    found = json.loads((folder / "served.json").read_text())
    assert "Aborted by AbortReq" in found["aborted"]["message"]
    assert found["stopped"]["type"] == found["killed"]["type"] == "abort"
    assert found["killed"]["seconds"] < 60  # not SGLang's waiting timeout, which is five minutes
