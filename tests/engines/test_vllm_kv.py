"""KV caches between vLLM's servers with putget's connector: its own scheduler, and whole servers behind the router."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.kv_vllm_stages import STAGES, Asked, ends_of, has_first_token, notes_in, stages_of
from tests.engines.run import needs_transfer, only_with_engines, run
from tests.engines.test_vllm import ENVIRONMENT

pytestmark = [*only_with_engines, needs_transfer]

CASES = (
    "either_order",
    "with_the_runner_of_cpus",
    "with_sliding_windows",
    "numbers_of_ranks_may_differ",
    "a_prefix_that_is_there_is_not_moved",
    "a_preempted_prefill_goes_on",
    "a_preempted_decode_is_computed_again",
    "a_refused_step_leaves_when_it_is_computed",
    "layers_of_a_captured_graph_are_reported",
    "a_stream_goes_to_the_next_prefill_server",
    "aborts_give_blocks_back",
    "an_abort_before_the_question_is_told",
    "a_failure_fails_the_request",
    "a_failure_is_computed_again",
    "an_expired_lease_is_refused",
    "a_lease_is_renewed_while_a_request_queues",
    "another_model_is_refused",
    "mistakes_are_named",
    "the_entry_point_tells_its_name",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases and servers in one run: importing vLLM takes longer than most of them."""
    folder = tmp_path_factory.mktemp("vllm_kv")
    (folder / "log").write_text(run("vllm", "-m", "tests.engines.kv_vllm", folder, **ENVIRONMENT))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_inside_its_scheduler(case: str, folder: Path) -> None:
    found = json.loads((folder / "cases.json").read_text())
    assert found[case] == "ok", found[case]
    assert sorted(found) == sorted(CASES)


def test_text_is_that_of_one_server_in_either_order(folder: Path) -> None:
    found = json.loads((folder / "small.json").read_text())
    assert found["decode first"] == found["prefill first"] == found["decode"]
    assert len({tuple(tokens) for tokens in found["decode"]}) == 6
    assert found["arrived"] == 12


@pytest.mark.parametrize("order", ["decode", "prefill"])
def test_stages_of_a_handover_follow_one_another(order: str, folder: Path) -> None:
    found, notes = json.loads((folder / "small.json").read_text()), notes_in(folder)
    streamed = [Asked(**one) for one in found[f"streamed {order} first"]]
    assert [one.tokens for one in streamed] == found["decode"][: len(streamed)]
    # With decode first, the answer may be over before the prefill server's own token is.
    timed = [one for one in streamed if order == "prefill" or has_first_token(notes, one)]
    for asked in timed:
        start, ends = ends_of(notes, asked)
        assert list(ends) == list(STAGES)
        assert ends["client"] == max(start, *ends.values())
        if order == "prefill":
            assert start < ends["question"] <= ends["arm"]
        # Stages are the whole of it: nothing is counted twice or left out.
        assert sum(stages_of(start, ends).values()) == pytest.approx(1e3 * (asked.times[1] - start))
