"""A server of vLLM whose weights change while it answers. One of three runs waited for an answer for 120 s, and nobody
knows yet why: so it is a soak, and not part of `make test-engines`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import needs_transfer, only_with_engines, run_cases
from tests.engines.test_vllm import ENVIRONMENT

pytestmark = only_with_engines


@needs_transfer
@pytest.mark.soak
def test_a_server_answers_while_versions_of_its_weights_arrive(tmp_path: Path) -> None:
    outcome = run_cases("vllm", tmp_path, ("weights.8",), ENVIRONMENT)["weights.8"]
    told = json.loads(next(path for path in outcome.files if path.name == "weights.8").read_text())
    texts = told["texts"]
    versions = ["default", "1", "2", "4", "5", "6"]
    assert len({str(text) for text in texts.values()}) == len(texts) == len(versions)
    whole = [answer for answer in told["answers"] if len(answer["spans"]) == 1]
    for version in versions:
        found = [answer for answer in whole if answer["spans"][0][0] == version]
        assert len(found) >= 2
        assert all(answer["tokens"] == texts[version][answer["prompt"]] for answer in found)
    # An answer that was under way keeps its first tokens.
    for answer in told["answers"]:
        version, _, end = answer["spans"][0]
        assert answer["tokens"][:end] == texts[version][answer["prompt"]][:end]
    assert all("a trainer rank is lost" in text for text in told["lost"])
    assert "of 10 layers that vLLM repacks, and in 9 other tensors (swap)" in outcome.log
    assert outcome.carried(8, 2)
