"""transformers itself, token for token against one process. `make test-engines` installs it and runs this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.run import only_with_engines, run
from tests.engines.trace import CALLS

PROGRAM = "tests.engines.generate_transformers"
MODELS = (8, 10)
NUM_LAYERS, NUM_PROMPTS, NEW_TOKENS = 2, 3, 8

pytestmark = only_with_engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models, in one process and on two ranks."""
    folder = tmp_path_factory.mktemp("transformers")
    run("transformers", "-m", PROGRAM, folder, *MODELS)
    return folder


@pytest.mark.parametrize("num_experts", MODELS)
def test_tokens_are_those_of_one_process(num_experts: int, folder: Path) -> None:
    alone, *ranks = (json.loads((folder / f"{num_experts}.{of}").read_text()) for of in ("1.0", "2.0", "2.1"))
    assert alone["carried"] == 0
    for found in ranks:
        assert found["carried"] == NUM_LAYERS
        assert found["tokens"] == alone["tokens"]
        # A profile shows its rounds: one a layer and token that was computed.
        assert found["calls"] == dict.fromkeys(CALLS, NUM_LAYERS * NUM_PROMPTS * NEW_TOKENS)
