"""The protocol text under ThreadSanitizer: clean as it is, caught once one order is weakened or one wait is skipped.

The job is tests/native/stress.cpp. The mutations come from the tags in native/protocol, so that a new publish or
observe is tried without a line here.
"""

from __future__ import annotations

import pytest

from tests.protocol import tags
from tests.protocol.stress_job import FAULT, MISMATCH, REPORT, StressJob

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> StressJob:
    return StressJob("thread", tmp_path_factory.mktemp("thread"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("objects", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_protocol_is_clean(job: StressJob, ranks: int, objects: int, seed: int) -> None:
    done = job("--ranks", ranks, "--rounds", 300, "--objects", objects, "--seed", seed)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tag", tags.enumerators("Tag"))
def test_a_weakened_order_is_caught(job: StressJob, tag: str) -> None:
    caught = [job("--rounds", 300, "--objects", 2, "--seed", seed, "--weaken", tag).returncode for seed in SEEDS]
    assert set(caught) <= {0, REPORT}
    assert REPORT in caught, f"{tag} is as good without its order: nothing depends on it, or nothing checks it"


@pytest.mark.parametrize("tag", sorted(tags.observed()))
def test_a_skipped_wait_is_caught(job: StressJob, tag: str) -> None:
    for seed in SEEDS:
        done = job("--rounds", 300, "--objects", 2, "--seed", seed, "--timeout", 2, "--skip", tag)
        assert done.returncode in {0, MISMATCH, FAULT, REPORT}, done.stderr
        if done.returncode != 0:
            return
    pytest.fail(f"{tag} need not be waited for: nothing depends on it, or nothing checks it")


def test_an_unknown_tag_is_refused(job: StressJob) -> None:
    assert job("--weaken", "Z9").returncode == 2
