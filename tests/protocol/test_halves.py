"""Halves out of turn: every block refuses them, whatever the grids, before a byte reaches a peer.

The program is tests/native/halves.cpp. The host refuses most of that before a kernel runs; graphs come this far.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.harness.proofs import PROTOCOL_TEXT, proved_by
from tests.protocol.stress_job import StressJob


def test_halves_out_of_turn_are_refused(tmp_path: Path) -> None:
    done = StressJob("address,undefined", tmp_path, source="halves.cpp")()
    assert done.returncode == 0, done.stdout + done.stderr


MISTAKES = {
    "the number of parts is not looked at": (
        "protocol/round/signal.h",
        "return by_this_block | by_other_grid;",
        "return by_this_block;",
    ),
    "the own part is not looked at": (
        "protocol/round/signal.h",
        "return by_this_block | by_other_grid;",
        "return by_other_grid;",
    ),
    "dispatch looks at the first block alone": (
        "protocol/dispatch/dispatch.h",
        "if (own.published(exec.blocks(), round.epoch + 1) || own.combining(round.open, round.epoch)) {",
        "if (exec.block() == 0 &&\n"
        "      (own.published(exec.blocks(), round.epoch + 1) || own.combining(round.open, round.epoch))) {",
    ),
    "dispatch does not ask for combine": (
        "protocol/dispatch/dispatch.h",
        " || own.combining(round.open, round.epoch)) {",
        ") {",
    ),
    "combine does not ask for dispatch": (
        "protocol/combine/combine.h",
        "const bool is_dispatching = flag_epoch(own.arrived) == turn.epoch + 1;",
        "const bool is_dispatching = false;",
    ),
    "who copies does not look at the end": (
        "protocol/combine/combine.h",
        "return is_own & !released & !sent & !(work.copies & ended);",
        "return is_own & !released & !sent;",
    ),
    "who copies judges nothing": (
        "protocol/combine/combine.h",
        "const bool judges = kIsSentinel || work.sends || work.copies;",
        "const bool judges = kIsSentinel || work.sends;",
    ),
    "the note is not looked at": (
        "protocol/combine/combine.h",
        "return is_own & !released & !sent &",
        "return is_own & !released &",
    ),
    "the note is not left": (
        "protocol/combine/combine.h",
        "    if (exec.thread() == 0) {\n      exec.note(",
        "    if (false) {\n      exec.note(",
    ),
    "the note tells of CTAs that do not send": (
        "protocol/combine/combine.h",
        "pack_part(work.senders, 0)",
        "pack_part(exec.blocks(), 0)",
    ),
    "who sends judges nothing": (
        "protocol/combine/combine.h",
        "const bool judges = kIsSentinel || work.sends || work.copies;",
        "const bool judges = work.copies;",
    ),
    "release does not ask": (
        "protocol/round/release.h",
        "if (scratch.own.combining(head.open, head.epoch)) {",
        "if (false) {",
    ),
}


@proved_by(*PROTOCOL_TEXT)
def test_compiled_like_a_mistake_the_text_refuses_them(tmp_path: Path) -> None:
    file, right, _ = next(iter(MISTAKES.values()))
    done = StressJob("undefined", tmp_path, (file, right, right), "halves.cpp")()
    assert done.returncode == 0, done.stdout + done.stderr


def run_with(mistake: str, folder: Path) -> CompletedProcess[str]:
    folder.mkdir()
    return StressJob("undefined", folder, MISTAKES[mistake], "halves.cpp")()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[CompletedProcess[str]]]]:
    """Every mistake, compiled and run on all cores."""
    folder = tmp_path_factory.mktemp("halves")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {mistake: pool.submit(run_with, mistake, folder / str(n)) for n, mistake in enumerate(MISTAKES)}
        pool.shutdown(cancel_futures=True)


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, runs: dict[str, Future[CompletedProcess[str]]]) -> None:
    assert runs[mistake].result().returncode != 0, f"{mistake}: nothing checks it"
