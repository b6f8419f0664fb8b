"""A worker dies, or stands still for ever, while thirty streams run; see tests/engines/deaths.py. Soaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import needs_transfer, only_with_engines, run
from tests.engines.test_sglang import ENVIRONMENT as SGLANG
from tests.engines.test_vllm import ENVIRONMENT as VLLM

pytestmark = [*only_with_engines, needs_transfer, pytest.mark.soak]
DEADLINE_S = 10
# SGLang looks at its processes for a minute before it ends them, unless it is told not to.
AT_ONCE = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_client_hears_of_it_and_nothing_stays(engine: str, how: str, tmp_path: Path) -> None:
    environment = {**(VLLM if engine == "vllm" else {**SGLANG, **AT_ONCE}), "PUTGET_ENGINE_TIMEOUT_S": str(DEADLINE_S)}
    log = run(engine, "-m", "tests.engines.deaths", engine, tmp_path, how, PUTGET_ENGINES="1", **environment)
    told = json.loads(log.splitlines()[-1])
    print(told)
    assert told["whole before"] >= 30
    assert {"first client", "last client", "unhealthy", "gone"} <= told.keys(), told
    assert told["left"] == 0
    if how == "stop":
        assert f"within {DEADLINE_S} s" in log
        assert told["first client"] < 3 * DEADLINE_S, told
