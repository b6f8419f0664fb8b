"""A server of vLLM whose weights change while it answers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines.run import needs_transfer, only_with_engines, run_cases
from tests.engines.test_vllm import ENVIRONMENT
from tests.engines.weights_answers import check_answers

pytestmark = [*only_with_engines, needs_transfer]


def test_a_server_answers_while_versions_of_its_weights_arrive(tmp_path: Path) -> None:
    outcome = run_cases("vllm", tmp_path, ("weights.8",), ENVIRONMENT)["weights.8"]
    told = json.loads(next(path for path in outcome.files if path.name == "weights.8").read_text())
    check_answers(told)
    assert all("a trainer rank is lost" in text for text in told["lost"])
    assert "of 10 layers that vLLM repacks, and in 9 other tensors (swap)" in outcome.log
    assert outcome.carried(8, 2)
