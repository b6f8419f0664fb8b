"""A server of SGLang whose weights change while it answers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines.run import needs_transfer, only_with_engines, run
from tests.engines.test_sglang import ENVIRONMENT
from tests.engines.weights_answers import check_answers

pytestmark = [*only_with_engines, needs_transfer]


def test_a_server_answers_while_versions_of_its_weights_arrive(tmp_path: Path) -> None:
    log = run("sglang", "-m", "tests.engines.weights_sglang", tmp_path, PUTGET_ENGINES="1", **ENVIRONMENT)
    check_answers(json.loads((tmp_path / "weights.8").read_text()))
    assert log.count("putget: versions land in second copies of") == 2
