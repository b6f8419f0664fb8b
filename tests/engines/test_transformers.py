"""transformers itself, token for token against one process. `make test-engines` installs it and runs this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.run import only_with_engines, run, save_model
from tests.engines.trace import CALLS

PROGRAM = "tests.engines.generate_transformers"
NUM_LAYERS, NUM_PROMPTS, NEW_TOKENS = 2, 3, 8

pytestmark = only_with_engines


def generate(*arguments: object, ranks: int = 1) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    run("transformers", *start, "-m", PROGRAM, *arguments)


def result_of(out: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.with_suffix(f".{rank}").read_text())
    return found


@pytest.mark.parametrize("num_experts", [8, 10])
def test_tokens_are_those_of_one_process(num_experts: int, tmp_path: Path) -> None:
    model = save_model("transformers", tmp_path / "model", num_experts)
    generate(tmp_path / "one", model)
    generate(tmp_path / "two", model, ranks=2)
    alone = result_of(tmp_path / "one", 0)
    assert alone["carried"] == 0
    for rank in range(2):
        found = result_of(tmp_path / "two", rank)
        assert found["carried"] == NUM_LAYERS
        assert found["tokens"] == alone["tokens"]
        # A profile shows its rounds: one a layer and token that was computed.
        assert found["calls"] == dict.fromkeys(CALLS, NUM_LAYERS * NUM_PROMPTS * NEW_TOKENS)
