"""Several models in vLLM, token for token against one process; see tests/engines/models_vllm.py. A soak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import only_with_engines, run
from tests.engines.test_vllm import ENVIRONMENT, NUM_REQUESTS

pytestmark = [*only_with_engines, pytest.mark.soak]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    log = run("vllm", "-m", "tests.engines.models_vllm", folder, PUTGET_ENGINES="1", **ENVIRONMENT)
    (folder / "log").write_text(log)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "num_experts"), [("Qwen3Moe.8", 8), ("Qwen3Moe.60", 60), ("Glm4Moe", 8), ("GptOss", 8)]
)
def test_tokens_are_those_of_one_process(model: str, num_experts: int, dtype: str, folder: Path) -> None:
    alone = json.loads((folder / f"{model}.{dtype}.1.0").read_text())
    both = [json.loads((folder / f"{model}.{dtype}.2.{rank}").read_text()) for rank in range(2)]
    assert {**both[0], **both[1]} == alone
    assert len(alone) == NUM_REQUESTS
    assert all(both)
    part = (folder / "log").read_text().split(f"=== {model} {dtype} 2\n")[1].split("\n=== ")[0]
    assert part.count(f"carries dispatch and combine of the mixture-of-experts layers: {num_experts} experts") == 2
