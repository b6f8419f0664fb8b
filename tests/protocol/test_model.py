"""The model of the synchronisation (native/model) holds, and fails once one thing in it is left out or misplaced.

Bigger configurations pass too (RANKS=3 ROUNDS=2 ROUTES=2: 17 million states); they would only take longer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parents[2] / "native" / "model"
SPIN, CC = shutil.which("spin"), shutil.which("cc")
# What a model takes by -D without being wrong: sizes, and parts that can be switched on.
PARAMETERS = {"RANKS", "ROUNDS", "SLOTS", "EPOCHS", "ROUTES", "EXTRA", "BLOCKS", "MIX_AFTER"}
VARIANTS = {"LAYERS", "DEADLINES", "MIXED_ENDS", "IN_PLACE"}

ASSERTION, DEADLOCK = "assertion violated", "invalid end state"


@dataclass(frozen=True)
class Check:
    """One run of SPIN: a model, its -D options, and the error that must be found (None: there is none)."""

    model: str
    options: str
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.options}"

    @property
    def defines(self) -> set[str]:
        return set(re.sub(r"=\d+", "", self.options).split())


CORRECT = [
    Check("putget", "RANKS=3 ROUNDS=3 ROUTES=0"),
    Check("putget", "RANKS=3 ROUNDS=3 ROUTES=1"),
    Check("putget", "RANKS=2 ROUNDS=3 ROUTES=4"),
    Check("putget", "RANKS=2 ROUNDS=4 SLOTS=2"),
    Check("putget", "RANKS=2 ROUNDS=4 EPOCHS=8"),
    Check("putget", "RANKS=2 ROUNDS=4 LAYERS"),
    Check("putget", "RANKS=3 ROUNDS=3 ROUTES=1 LAYERS"),
    Check("putget", "RANKS=2 ROUNDS=4 LAYERS MIX_AFTER=1"),
    Check("putget", "RANKS=2 ROUNDS=2 DEADLINES EXTRA=2 LAYERS"),
    Check("putget", "RANKS=3 ROUNDS=1 ROUTES=1 DEADLINES EXTRA=1 LAYERS"),
    Check("putget", "RANKS=2 ROUNDS=2 DEADLINES MIXED_ENDS"),
    Check("join", "ROUNDS=3"),
    Check("join", "ROUNDS=3 IN_PLACE"),
    Check("join", "ROUNDS=1 DEADLINES"),
    Check("join", "ROUNDS=1 DEADLINES IN_PLACE"),
]
MUTATIONS = [
    Check("putget", "SKIP_D1", ASSERTION),
    Check("putget", "SKIP_D4", ASSERTION),
    Check("putget", "SKIP_C3", ASSERTION),
    Check("putget", "SKIP_R1", DEADLOCK),
    Check("putget", "SKIP_C2", DEADLOCK),
    Check("putget", "SKIP_EMPTY_D3", DEADLOCK),
    Check("putget", "EARLY_D3", ASSERTION),
    Check("putget", "EARLY_C2", ASSERTION),
    Check("putget", "EARLY_R1", ASSERTION),
    Check("putget", "EARLY_CLEAR", ASSERTION),
    Check("putget", "TORN_FLAG", ASSERTION),
    Check("putget", "PLAIN_COMPARE", ASSERTION),
    Check("putget", "LAYERS SKIP_D0", ASSERTION),
    Check("putget", "LAYERS EARLY_C5", ASSERTION),
    Check("putget", "LAYERS SKIP_C5", DEADLOCK),
    Check("putget", "LAYERS MIX_AFTER=1 MIX_AS_FINISHED", ASSERTION),
    Check("putget", "ROUNDS=2 DEADLINES MIXED_ENDS IGNORE_HOW", ASSERTION),
    Check("putget", "ROUNDS=2 DEADLINES NO_DEADLINE", DEADLOCK),
    Check("putget", "ROUNDS=2 DEADLINES EXTRA=2 LAYERS OLD_PAGES", ASSERTION),
    Check("putget", "RANKS=3 ROUNDS=2 DEADLINES EXTRA=1 SKIP_FLAG_INIT", DEADLOCK),
    Check("putget", "RANKS=3 ROUNDS=2 DEADLINES EXTRA=1 SKIP_BARRIER", DEADLOCK),
    Check("join", "NO_J1", DEADLOCK),
    Check("join", "NO_J2", ASSERTION),
    Check("join", "NO_J3", ASSERTION),
    Check("join", "NO_OWN_FLAG", ASSERTION),
    Check("join", "IN_PLACE ALL_JUDGE", ASSERTION),
    Check("join", "ROUNDS=1 DEADLINES J1_LOSES_FAULT", ASSERTION),
    Check("join", "EARLY_EPOCH", DEADLOCK),
    Check("join", "KEEP_ARRIVALS", DEADLOCK),
    Check("join", "KEEP_STAGED", DEADLOCK),
]


def run(check: Check, folder: Path, environment: dict[str, str]) -> str:
    """SPIN's report on one model.

    The environment is a copy: this runs beside the tests, and pytest writes the name of each into the process's own,
    which a program that is being started at that moment would read half-written.
    """
    folder.mkdir()
    options = [f"-D{option}" for option in check.options.split()]
    for command in (
        [SPIN, "-a", *options, str(MODELS / f"{check.model}.pml")],
        [CC, "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-DNOCLAIM", "-DMEMLIM=4096", "-o", "pan", "pan.c"],
    ):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            return f"{command} failed:\n{done.stdout}{done.stderr}"
    command = ["./pan", "-m100000", "-w22"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[Check, Future[str]]:
    """All runs, on as many cores as there are."""
    if SPIN is None or CC is None:
        pytest.skip("spin or a C compiler is not installed (apt-get install spin)")
    folder = tmp_path_factory.mktemp("spin")
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    environment = dict(os.environ)
    futures = {
        check: pool.submit(run, check, folder / str(n), environment) for n, check in enumerate(CORRECT + MUTATIONS)
    }
    pool.shutdown(wait=False)
    return futures


@pytest.mark.parametrize("check", CORRECT, ids=str)
def test_model_holds(check: Check, reports: dict[Check, Future[str]]) -> None:
    report = reports[check].result()
    assert "errors: 0" in report, report
    assert "Search not completed" not in report, report


@pytest.mark.parametrize("check", MUTATIONS, ids=str)
def test_mutation_is_found(check: Check, reports: dict[Check, Future[str]]) -> None:
    report = reports[check].result()
    assert f"pan:1: {check.error}" in report, report


@pytest.mark.parametrize("model", ["putget", "join"])
def test_every_mutation_of_a_model_is_tried(model: str) -> None:
    text = (MODELS / f"{model}.pml").read_text()
    names = set(re.findall(r"(?:^#ifdef |^#ifndef |defined\()(\w+)", text, re.MULTILINE))
    tried = set().union(*(check.defines for check in MUTATIONS if check.model == model))
    assert names - PARAMETERS - VARIANTS == tried - PARAMETERS - VARIANTS
