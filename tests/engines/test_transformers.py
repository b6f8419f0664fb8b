"""transformers itself, token for token against one process. `make test-engines` installs it and runs this."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "engines" / "transformers" / "bin" / "python"
PROGRAM = "tests.engines.generate_transformers"
NUM_LAYERS = 2

pytestmark = pytest.mark.skipif(
    "PUTGET_TEST_ENGINES" not in os.environ, reason="runs the engines themselves: make test-engines"
)


def run(*arguments: object, ranks: int = 1) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
    command = [str(PYTHON), *start, "-m", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def result_of(out: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.with_suffix(f".{rank}").read_text())
    return found


@pytest.mark.parametrize("num_experts", [8, 10])
def test_tokens_are_those_of_one_process(num_experts: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    run("save", model, num_experts)
    run(tmp_path / "one", model)
    run(tmp_path / "two", model, ranks=2)
    alone = result_of(tmp_path / "one", 0)
    assert alone["carried"] == 0
    for rank in range(2):
        found = result_of(tmp_path / "two", rank)
        assert found["carried"] == NUM_LAYERS
        assert found["tokens"] == alone["tokens"]
