"""The protocol text stays inside its memory and inside the language: the stress job under the other sanitizers."""

from __future__ import annotations

import pytest

from tests.protocol.stress_job import SEEDS, StressJob


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> StressJob:
    return StressJob("address,undefined", tmp_path_factory.mktemp("address"))


@pytest.mark.parametrize("seed", [*SEEDS, 20])
@pytest.mark.parametrize("objects", ["0", "23", "0123"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_the_protocol_is_clean(job: StressJob, blocks: int, objects: str, seed: int) -> None:
    done = job("--ranks", 4, "--blocks", blocks, "--rounds", 300, "--objects", objects, "--seed", seed)
    assert done.returncode == 0, done.stderr
