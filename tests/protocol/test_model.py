"""The models of the synchronisation (native/model) hold, and fail once one thing in them is left out or misplaced.

Bigger configurations of agreement pass too, and would only take longer: READMIT LIMIT=7 (11 million states), WAKES=1
(40 million), VICTIM=1 WAKES=1 REACH=4 STEPWISE.
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

from tests.harness.proofs import proved_by

MODELS = Path(__file__).resolve().parents[2] / "native" / "model"
SPIN, CC = shutil.which("spin"), shutil.which("cc")
# Settings that a model takes by -D without being wrong: sizes, and parts that can be switched on.
PARAMETERS = {
    "RANKS",
    "ROUNDS",
    "SLOTS",
    "EPOCHS",
    "ROUTES",
    "EXTRA",
    "BLOCKS",
    "SMS",
    "CELLS",
    "ARRIVALS",
    "MIX_AFTER",
    "COPY",
    "ASK",
    "SENDING",
    "LIMIT",
    "PAUSES",
    "WAKES",
    "VICTIM",
    "REACH",
    "SOURCES",
    "EMPTY",
    "TAKERS",
    "BATCHES",
}
VARIANTS = {
    "LAYERS",
    "DEADLINES",
    "MIXED_ENDS",
    "EITHER",
    "MIXED",
    "SAME_ORDER",
    "ZERO",
    "HALVES",
    "SKEW",
    "PEERS_MAY_STOP",
    "SENTINEL",
    "STEPWISE",
    "READMIT",
    "STATS",
    "DEATH",
}

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
    # Ranks: rounds of all endings and routes; two layouts; deadlines and death.
    Check("ranks", "RANKS=3 ROUNDS=3 ROUTES=0"),
    Check("ranks", "RANKS=2 ROUNDS=3 ROUTES=4"),
    Check("ranks", "RANKS=2 ROUNDS=4 LAYERS"),
    Check("ranks", "RANKS=2 ROUNDS=4 LAYERS SLOTS=2 EPOCHS=8"),
    Check("ranks", "RANKS=3 ROUNDS=3 ROUTES=1 LAYERS"),
    Check("ranks", "RANKS=2 ROUNDS=4 LAYERS MIX_AFTER=1"),
    Check("ranks", "ROUNDS=2 DEADLINES EXTRA=2 LAYERS"),
    Check("ranks", "RANKS=3 ROUNDS=1 ROUTES=1 DEADLINES EXTRA=1 LAYERS"),
    Check("ranks", "ROUNDS=2 DEADLINES MIXED_ENDS"),
    Check("ranks", "ROUNDS=2 DEADLINES MIXED_ENDS LAYERS"),
    Check("ranks", "RANKS=3 ROUNDS=2 ROUTES=0 ASK=5"),
    Check("ranks", "RANKS=2 ROUNDS=2 ROUTES=4 ASK=1 SLOTS=2"),
    Check("ranks", "RANKS=2 ROUNDS=4 LAYERS ASK=2 EPOCHS=8"),
    Check("ranks", "RANKS=2 ROUNDS=4 LAYERS ASK=3 EPOCHS=8"),
    Check("ranks", "ROUNDS=2 DEADLINES MIXED_ENDS ASK=3"),
    Check("ranks", "RANKS=3 ROUNDS=3 ROUTES=0 STATS"),
    Check("ranks", "RANKS=2 ROUNDS=4 LAYERS STATS"),
    # CTAs: parts, joins and copies of the state, with grids that change from kernel to kernel.
    Check("ctas", "ROUNDS=3"),
    Check("ctas", "SKEW"),
    Check("ctas", "COPY=1"),
    Check("ctas", "COPY=3"),
    Check("ctas", "ROUNDS=1 COPY=3 SKEW"),
    Check("ctas", "ROUNDS=1 HALVES COPY=3"),
    Check("ctas", "MIXED"),
    Check("ctas", "MIXED COPY=1"),
    Check("ctas", "MIXED COPY=3"),
    Check("ctas", "ZERO"),
    Check("ctas", "ROUNDS=1 ZERO COPY=3"),
    Check("ctas", "ROUNDS=1 DEADLINES"),
    Check("ctas", "ROUNDS=1 DEADLINES COPY=3"),
    Check("ctas", "ASK=3"),
    Check("ctas", "ASK=1 COPY=1"),
    Check("ctas", "ROUNDS=1 HALVES ASK=1 COPY=3"),
    Check("ctas", "MIXED ASK=1 SENDING=1"),
    Check("ctas", "ROUNDS=1 DEADLINES ASK=3"),
    Check("ctas", "ROUNDS=1 HALVES ASK=2"),
    # Halves: in any order on one rank; between the halves of another object.
    Check("halves", "COPY=3"),
    Check("halves", "MIXED COPY=3"),
    Check("halves", "ASK=3 COPY=3 EITHER"),
    Check("halves", "ASK=1 COPY=3"),
    Check("overlap", "ROUNDS=3"),
    Check("overlap", "MIXED"),
    Check("overlap", "MIXED START_WAITS SAME_ORDER LEFT_OPEN"),
    Check("overlap", "ROUNDS=3 SENTINEL"),
    Check("overlap", "MIXED SENTINEL"),
    # Domains: proxies and a network without order; both ways at once, or one of them for several rounds.
    Check("domains", "SOURCES=5 ROUNDS=1"),
    Check("domains", "SOURCES=1 ROUNDS=3 EMPTY=1"),
    Check("domains", "SOURCES=1 TAKERS=1"),
    Check("domains", "SOURCES=1 ROUNDS=1 DEATH"),
    # Landing areas: cells; which batch is taken.
    Check("landing", "ARRIVALS=4"),
    Check("landing", "CELLS=2 ARRIVALS=5"),
    Check("batches", "ROUNDS=3"),
    # Tables and slots; loads.
    Check("domains_ctas", "SMS=1"),
    Check("domains_ctas", "BLOCKS=3 SMS=1"),
    Check("domains_ctas", "BLOCKS=3 SMS=3"),
    Check("tables", "ROUNDS=4"),
    Check("tables", "RANKS=3 ROUNDS=3 BATCHES=1 DEATH"),
    Check("loads", "ROUNDS=9"),
    Check("loads", "RANKS=3 ROUNDS=5 DEATH"),
    # Agreement: a rank that pauses at any step, and who goes on.
    Check("agreement", "WAKES=0"),
]
# Larger ones. Smaller ones above have each of their parts.
LARGE = [
    Check("ranks", "ROUNDS=2 DEADLINES EXTRA=1 LAYERS ASK=3"),
    Check("ranks", "ROUNDS=2 DEADLINES EXTRA=2 LAYERS STATS"),
    Check("ctas", "ROUNDS=1 DEADLINES MIXED"),
    Check("ctas", "ASK=2 COPY=3"),
    Check("halves", "ROUNDS=2"),
    Check("halves", "COPY=3 EITHER"),
    Check("halves", "ASK=3"),
    Check("overlap", "RANKS=3"),
    Check("domains", "SOURCES=3 ROUNDS=1 TAKERS=3"),
    Check("agreement", "WAKES=1 REACH=1"),
]
MUTATIONS = [
    Check("ranks", "SKIP_D1", ASSERTION),
    Check("ranks", "SKIP_D4", ASSERTION),
    Check("ranks", "SKIP_C3", ASSERTION),
    Check("ranks", "SKIP_R1", DEADLOCK),
    Check("ranks", "SKIP_C2", DEADLOCK),
    Check("ranks", "SKIP_EMPTY_D3", DEADLOCK),
    Check("ranks", "EARLY_D3", ASSERTION),
    Check("ranks", "EARLY_C2", ASSERTION),
    Check("ranks", "EARLY_R1", ASSERTION),
    Check("ranks", "EARLY_CLEAR", ASSERTION),
    Check("ranks", "TORN_FLAG", ASSERTION),
    Check("ranks", "PLAIN_COMPARE", ASSERTION),
    Check("ranks", "ROUTES=1 LATE_READ", ASSERTION),
    Check("ranks", "LAYERS SKIP_D0", ASSERTION),
    Check("ranks", "LAYERS EARLY_C5", ASSERTION),
    Check("ranks", "LAYERS SKIP_C5", DEADLOCK),
    Check("ranks", "LAYERS MIX_AFTER=1 MIX_AS_FINISHED", ASSERTION),
    Check("ranks", "ROUNDS=2 DEADLINES MIXED_ENDS IGNORE_HOW", ASSERTION),
    Check("ranks", "ROUNDS=2 DEADLINES MIXED_ENDS ASK=3 IGNORE_END", ASSERTION),
    Check("ranks", "ROUNDS=2 DEADLINES NO_DEADLINE", DEADLOCK),
    Check("ranks", "ROUNDS=2 DEADLINES EXTRA=2 LAYERS OLD_PAGES", ASSERTION),
    Check("ranks", "RANKS=3 ROUNDS=2 DEADLINES EXTRA=1 SKIP_FLAG_INIT", ASSERTION),
    Check("ranks", "RANKS=3 ROUNDS=2 DEADLINES EXTRA=1 SKIP_BARRIER", DEADLOCK),
    Check("ranks", "ASK=3 SKIP_F2", ASSERTION),
    Check("ranks", "ASK=3 FORGET_ASK", DEADLOCK),
    Check("ranks", "ASK=3 F1_TWICE", ASSERTION),
    Check("ranks", "ASK=3 SKIP_F3", ASSERTION),
    Check("ranks", "ASK=3 EARLY_F3", DEADLOCK),
    Check("ranks", "ASK=3 LATE_F3", DEADLOCK),
    Check("ranks", "ASK=3 SKIP_WORD_INIT", ASSERTION),
    Check("ranks", "ASK=3 SKIP_D1", ASSERTION),
    Check("ranks", "LAYERS ASK=3 SKIP_D0", ASSERTION),
    Check("ranks", "LAYERS ASK=3 EARLY_C5", ASSERTION),
    Check("ranks", "ROUNDS=2 DEADLINES EXTRA=2 LAYERS ASK=3 OLD_PAGES", ASSERTION),
    Check("ranks", "STATS LATE_S1", ASSERTION),
    Check("ranks", "STATS S1_WITH_ROWS", ASSERTION),
    Check("ranks", "ROUTES=2 STATS SKIP_D1", ASSERTION),
    Check("ranks", "LAYERS STATS SKIP_D0", ASSERTION),
    Check("ctas", "SKIP_D1", ASSERTION),
    Check("ctas", "D1_IN_ONE_CTA", ASSERTION),
    Check("ctas", "MIXED SKIP_D0", ASSERTION),
    Check("ctas", "MIXED D0_IN_ONE_CTA", ASSERTION),
    Check("ctas", "SKIP_D4", ASSERTION),
    Check("ctas", "D4_WITHOUT_OWN", ASSERTION),
    Check("ctas", "FIRST_PART_ALONE", ASSERTION),
    Check("ctas", "PARTS_LIKE_OWN", DEADLOCK),
    Check("ctas", "EARLY_D3", ASSERTION),
    Check("ctas", "EARLY_EPOCH", DEADLOCK),
    Check("ctas", "SKIP_C3", ASSERTION),
    Check("ctas", "C3_IN_ONE_CTA", ASSERTION),
    Check("ctas", "ROUNDS=1 COPY=3 C3_WITHOUT_OWN", ASSERTION),
    Check("ctas", "ROUNDS=1 COPY=3 NO_J2", ASSERTION),
    Check("ctas", "COPY=3 KEEP_COPIED", ASSERTION),
    Check("ctas", "ROUNDS=1 COPY=3 C2_BEFORE_COPIES", ASSERTION),
    Check("ctas", "COPY=3 SKIP_C3", ASSERTION),
    Check("ctas", "ASK=1 COPY=3 COPIERS_ASK_OPEN", ASSERTION),
    Check("ctas", "MIXED NO_J3", ASSERTION),
    Check("ctas", "MIXED KEEP_GOTTEN", ASSERTION),
    Check("ctas", "MIXED EARLY_C5", ASSERTION),
    Check("ctas", "ROUNDS=1 DEADLINES MIXED J3_LOSES_FAULT", ASSERTION),
    Check("ctas", "STRICT_FIRST_PART", ASSERTION),
    Check("ctas", "ALL_JUDGE", ASSERTION),
    Check("ctas", "ASK=3 SKIP_F2", ASSERTION),
    Check("ctas", "ASK=3 F2_ONE_WORD", ASSERTION),
    Check("ctas", "ASK=3 SKIP_F3", ASSERTION),
    Check("ctas", "ASK=3 FORGET_ASK", DEADLOCK),
    Check("ctas", "ASK=3 SENDERS_ASK_OPEN", ASSERTION),
    Check("halves", "ASK=3 IGNORE_NOTE", ASSERTION),
    Check("halves", "ASK=3 LEAVE_NO_NOTE", ASSERTION),
    Check("halves", "ASK=3 NOTE_OF_GRID", ASSERTION),
    Check("halves", "ASK=3 IGNORE_RELEASE", ASSERTION),
    Check("halves", "IGNORE_FIRST_PART", ASSERTION),
    Check("halves", "IGNORE_OWN_PART", DEADLOCK),
    Check("halves", "IGNORE_COMBINING", ASSERTION),
    Check("halves", "IGNORE_ARRIVED", DEADLOCK),
    Check("halves", "DISPATCH_LOOKS_IN_ONE_CTA", ASSERTION),
    Check("halves", "COPY=3 TRUST_OTHERS", ASSERTION),
    Check("halves", "ASK=3 TRUST_OTHERS", ASSERTION),
    Check("halves", "COPY=3 COPIERS_IGNORE_END", ASSERTION),
    Check("halves", "ASK=3 IGNORE_FIRST_PART", ASSERTION),
    Check("halves", "ASK=3 IGNORE_OWN_PART", ASSERTION),
    Check("halves", "RELEASE_DOES_NOT_ASK", ASSERTION),
    Check("overlap", "WHOLE_DISPATCH", DEADLOCK),
    Check("overlap", "WHOLE_COMBINE", DEADLOCK),
    Check("overlap", "START_WAITS", DEADLOCK),
    Check("overlap", "LEFT_OPEN", DEADLOCK),
    Check("domains", "SOURCES=1 SKIP_X0", ASSERTION),
    Check("domains", "SOURCES=1 SKIP_X4", ASSERTION),
    Check("domains", "SOURCES=1 SKIP_X9", ASSERTION),
    Check("domains", "SOURCES=1 SKIP_DOORBELL", ASSERTION),
    Check("domains", "SOURCES=1 SKIP_END", DEADLOCK),
    Check("domains", "SOURCES=1 SKIP_OVER", ASSERTION),
    Check("domains", "SOURCES=1 SKIP_PARCEL", ASSERTION),
    Check("domains", "SOURCES=1 SKIP_RETURN_OVER", ASSERTION),
    Check("domains", "SOURCES=1 SKIP_X6", ASSERTION),
    Check("domains", "SOURCES=1 SKIP_X7", ASSERTION),
    Check("domains", "SOURCES=5 EARLY_X6", DEADLOCK),
    Check("domains", "SOURCES=1 EARLY_X9", ASSERTION),
    Check("domains", "SOURCES=1 ONE_BOARD", DEADLOCK),
    Check("domains", "SOURCES=1 NO_ANSWER", DEADLOCK),
    Check("domains", "SOURCES=1 ROUNDS=1 DEATH OLD_PAGES", ASSERTION),
    Check("domains", "SOURCES=1 ROUNDS=1 DEATH OLD_GENERATION", DEADLOCK),
    Check("landing", "SKIP_L6", ASSERTION),
    Check("landing", "L6_ANY", ASSERTION),
    Check("landing", "L3_ANY", ASSERTION),
    Check("landing", "EARLY_L2", ASSERTION),
    Check("landing", "NO_J4", ASSERTION),
    Check("landing", "EARLY_L5", ASSERTION),
    Check("landing", "L5_TO_SOURCE_ALONE", DEADLOCK),
    Check("batches", "LATE_S1", ASSERTION),
    Check("batches", "OWN_LANDED", ASSERTION),
    Check("batches", "KEEP_OWN", ASSERTION),
    Check("batches", "LEAST_TAKEN", ASSERTION),
    Check("batches", "SKIP_D1", DEADLOCK),
    Check("domains_ctas", "NO_J5", ASSERTION),
    Check("domains_ctas", "NO_J6", ASSERTION),
    Check("domains_ctas", "ONE_J6", DEADLOCK),
    Check("domains_ctas", "EARLY_X2", ASSERTION),
    Check("domains_ctas", "J7_ANY", ASSERTION),
    Check("domains_ctas", "SKIP_X0", ASSERTION),
    Check("domains_ctas", "J7_ANY_X0", ASSERTION),
    Check("domains_ctas", "JOIN_STAYS", DEADLOCK),
    Check("domains_ctas", "NO_OWN_LOOK", DEADLOCK),
    Check("tables", "SKIP_D1", DEADLOCK),
    Check("tables", "SKIP_D4", DEADLOCK),
    Check("tables", "SKIP_H4", ASSERTION),
    Check("tables", "SKIP_H8", ASSERTION),
    Check("tables", "EARLY_H1", ASSERTION),
    Check("tables", "EARLY_L2", ASSERTION),
    Check("tables", "EARLY_TAKE", ASSERTION),
    Check("tables", "OWN_LANDED", ASSERTION),
    Check("tables", "SLOT_FIRST", ASSERTION),
    Check("tables", "TABLE_FIRST", ASSERTION),
    Check("tables", "RANKS=3 ROUNDS=3 BATCHES=1 DEATH LEAST_TAKEN", ASSERTION),
    Check("tables", "RANKS=3 ROUNDS=3 BATCHES=1 DEATH KEEP_OWN", ASSERTION),
    Check("tables", "RANKS=3 ROUNDS=3 BATCHES=1 DEATH SLOTS_ALONE", ASSERTION),
    Check("loads", "RANKS=3 ROUNDS=5 DEATH KEEP_HISTORY", ASSERTION),
    Check("loads", "EARLY_DONE", ASSERTION),
    Check("loads", "OWN_DONE", ASSERTION),
    Check("loads", "SKIP_DONE", ASSERTION),
    Check("loads", "SKIP_TOLD", ASSERTION),
    Check("loads", "KEEP_TOLD", ASSERTION),
    Check("loads", "EARLY_GATHERED", ASSERTION),
    Check("agreement", "OLD_MISSING", ASSERTION),
    Check("agreement", "NO_ASK", ASSERTION),
    Check("agreement", "SAME_GRACE", ASSERTION),
    Check("agreement", "WAKES=1 NO_TIME_TO_COME", ASSERTION),
    Check("agreement", "NO_FOLLOW", ASSERTION),
    Check("agreement", "WAKES=1 NO_REASON", ASSERTION),
    Check("agreement", "WAKES=1 REACH=1 NO_ORDER", ASSERTION),
    Check("agreement", "VICTIM=1 WAKES=1 REACH=4 STEPWISE NO_HOLD", ASSERTION),
    Check("agreement", "OWN_MIXED", ASSERTION),
    Check("agreement", "OWN_EPOCH", ASSERTION),
]


def run(check: Check, folder: Path, environment: dict[str, str]) -> str:
    """SPIN's report on one model.

    The environment is a copy: this runs beside the tests, and pytest writes the name of each into the process's own,
    which a program that is being started at that moment would read half-written.
    """
    folder.mkdir()
    options = [f"-D{option}" for option in check.options.split()]
    level = "-O0" if check.error else "-O1"  # an error is found at once: compiling takes longer
    for command in (
        [SPIN, "-a", *options, str(MODELS / f"{check.model}.pml")],
        [CC, level, "-w", "-DSAFETY", "-DCOLLAPSE", "-DNOCLAIM", "-DMEMLIM=4096", "-o", "pan", "pan.c"],
    ):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            return f"{command} failed:\n{done.stdout}{done.stderr}"
    command = ["./pan", "-m100000", "-w22"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
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


@proved_by("native/model")
@pytest.mark.parametrize("check", CORRECT, ids=str)
def test_model_holds(check: Check, reports: dict[Check, Future[str]]) -> None:
    report = reports[check].result()
    assert "errors: 0" in report, report
    assert "Search not completed" not in report, report


@pytest.mark.soak
@pytest.mark.parametrize("check", LARGE, ids=str)
def test_a_large_model_holds(check: Check, tmp_path: Path) -> None:
    if SPIN is None or CC is None:
        pytest.skip("spin or a C compiler is not installed (apt-get install spin)")
    report = run(check, tmp_path / "spin", dict(os.environ))
    assert "errors: 0" in report, report
    assert "Search not completed" not in report, report


@proved_by("native/model")
@pytest.mark.parametrize("check", MUTATIONS, ids=str)
def test_mutation_is_found(check: Check, reports: dict[Check, Future[str]]) -> None:
    report = reports[check].result()
    assert f"pan:1: {check.error}" in report, report


def test_every_mutation_of_the_models_is_tried() -> None:
    text = "\n".join(path.read_text() for path in sorted(MODELS.glob("*.pml")))
    names = set(re.findall(r"(?:^#ifdef |^#ifndef |defined\()(\w+)", text, re.MULTILINE))
    tried = set().union(*(check.defines for check in MUTATIONS))
    assert names - PARAMETERS - VARIANTS == tried - PARAMETERS - VARIANTS
