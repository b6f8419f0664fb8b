"""Rounds across domains under ThreadSanitizer: clean as they are, caught once an order is weakened or a wait left out.

The job is tests/native/domains_rounds.cpp: the text that the library runs, its proxies and its network as threads.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.proofs import PROTOCOL_TEXT, proved_by
from tests.protocol.stress_job import (
    FAULT,
    LIMIT_S,
    MISMATCH,
    OPTIONS,
    REPORT,
    SEEDS,
    SOURCES,
    compile_job,
    compiled_program,
    objects_of,
    prefix_of,
)
from tests.protocol.tags import ROOT
from tests.protocol.test_domains_tags import AWAITED, PUBLISHED

PROXY = ROOT / "native" / "domains"
PARTS = (SOURCES / "domains_rounds.cpp", *(PROXY / f"{name}.cpp" for name in ("proxy", "thread", "local_network")))
QUANTISED = ("--quantised", "1")
TRIES = range(1, 7)  # for a mistake to show, which one seed may not: the first that does ends the test


class Rounds:
    """The job, compiled, with how such programs start here."""

    def __init__(self, folder: Path) -> None:
        self._prefix = prefix_of("thread")
        self._objects = objects_of(PARTS, folder, "thread")
        self._program = compiled_program(self._objects, [], folder, "thread")

    def with_mistake(self, folder: Path, name: str, right: str, wrong: str) -> Path:
        """The job with another text in a file of native."""
        native = folder / "native"
        shutil.copytree(ROOT / "native", native)
        header = native / name
        assert header.read_text().count(right) == 1, f"{name} does not say once: {right}"
        header.write_text(header.read_text().replace(right, wrong))
        changed = folder / "domains_rounds.o"
        built = compile_job(changed, "domains_rounds.cpp", "thread", native=native, extra=("-O1", "-c"))
        assert built.returncode == 0, built.stderr
        others = [part for part in self._objects if part.name != changed.name]
        return compiled_program(others, [changed], folder, "thread")

    def run(
        self, seed: int, *more: object, rounds: int = 150, program: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        words = ["--seed", seed, "--rounds", rounds, *more]
        command = [*self._prefix, str(program or self._program), *map(str, words)]
        return subprocess.run(command, env=OPTIONS, capture_output=True, text=True, timeout=LIMIT_S)

    def catches(self, statuses: set[int], *mistake: str, program: Path | None = None) -> bool:
        for seed in TRIES:
            done = self.run(seed, *mistake, program=program)
            if done.returncode != 0:
                assert done.returncode in statuses, done.stderr
                return True
        return False


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    return Rounds(tmp_path_factory.mktemp("rounds"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", [(), QUANTISED], ids=["as written", "quantised"])
@pytest.mark.parametrize("domain_size", [1, 2, 3])
def test_rounds_across_domains_are_clean(job: Rounds, domain_size: int, how: tuple[str, ...], seed: int) -> None:
    done = job.run(seed, "--domain_size", domain_size, *how)
    assert done.returncode == 0, done.stderr


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("tag", sorted(PUBLISHED | AWAITED))
def test_a_weakened_order_is_caught(job: Rounds, tag: str) -> None:
    assert job.catches({REPORT}, "--weaken", tag)


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("tag", ["X7", "X9"])
def test_a_weakened_order_of_quantised_sums_is_caught(job: Rounds, tag: str) -> None:
    assert job.catches({REPORT}, *QUANTISED, "--weaken", tag)


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("tag", sorted(AWAITED))
def test_a_wait_that_is_left_out_is_caught(job: Rounds, tag: str) -> None:
    assert job.catches({MISMATCH, FAULT, REPORT}, "--skip", tag)


@proved_by(*PROTOCOL_TEXT)
def test_sums_for_others_wait_for_the_rows_of_their_domain(job: Rounds, tmp_path: Path) -> None:
    """A rank that gives its rows late, and an agent of its domain that does not wait for it."""
    assert job.run(1, "--late", 1, rounds=20).returncode == 0
    wait = "  if (!await_domain(exec, plan, across, of_domain)) return;\n"
    hasty = job.with_mistake(tmp_path, "protocol/domains/serve.h", wait, "")
    assert job.run(1, "--late", 1, rounds=20, program=hasty).returncode in {MISMATCH, REPORT}


BLOCKS = ("--blocks", "3")
EXEC, DOMAINS = "cpu/exec.h", "protocol/domains"
MISTAKES_OF_BLOCKS = {
    "J5 and J6 order nothing": (EXEC, "fetch_add(counter, 1, __ATOMIC_ACQ_REL) + 1", "fetch_add(counter, 1, 0) + 1"),
    "J7 is handed on without a release": (
        EXEC,
        "    atomics::store_release(word, value);",
        "    atomics::store_relaxed(word, value);",
    ),
    "J7 is taken over without an acquire": (
        EXEC,
        "    return atomics::load_acquire(word);",
        "    return atomics::load_relaxed(word);",
    ),
    "X2 before J5": (
        f"{DOMAINS}/pack.h",
        "  if (!exec.template last_to_arrive<Join::J5>(across.joined, &scratch.last)) return;\n",
        "",
    ),
    "X7 before J6": (f"{DOMAINS}/serve.h", "!exec.template last_to_arrive<Join::J6>(joined, &scratch.last) || ", ""),
    "J7 of any round": (
        f"{DOMAINS}/waits.h",
        "if ((seen & kHandedOn) != 0 && flag_epoch(seen) == epoch) return",
        "if (seen != 0) return",
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", [(), QUANTISED], ids=["as written", "quantised"])
@pytest.mark.parametrize("domain_size", [1, 2])
def test_steps_of_several_blocks_are_clean(job: Rounds, domain_size: int, how: tuple[str, ...], seed: int) -> None:
    done = job.run(seed, "--domain_size", domain_size, *BLOCKS, *how, rounds=60)
    assert done.returncode == 0, done.stderr


OBJECTS = ("--objects", "2", "--domain_size", "2")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", [(), BLOCKS], ids=["one block", "blocks"])
def test_objects_of_one_workspace_are_clean(job: Rounds, how: tuple[str, ...], seed: int) -> None:
    done = job.run(seed, *OBJECTS, *how, rounds=80)
    assert done.returncode == 0, done.stderr


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", [("--skip", "D0"), ("--weaken", "D0"), ("--weaken", "C5")], ids=" ".join)
def test_rows_of_another_object_that_come_too_early_are_caught(job: Rounds, mistake: tuple[str, str]) -> None:
    """They lie where an agent may still sum rows of the object before."""
    assert job.catches({MISMATCH, FAULT, REPORT}, *OBJECTS, *mistake)


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", MISTAKES_OF_BLOCKS)
def test_a_mistake_among_blocks_is_caught(job: Rounds, tmp_path: Path, mistake: str) -> None:
    program = job.with_mistake(tmp_path, *MISTAKES_OF_BLOCKS[mistake])
    assert job.catches({MISMATCH, FAULT, REPORT}, "--domain_size", "1", *BLOCKS, program=program)
