"""Halves out of turn: every block refuses them, whatever the grids, before a byte reaches a peer.

The program is tests/native/halves.cpp. The host refuses most of that before a kernel runs; graphs come this far.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.stress_job import StressJob


def test_halves_out_of_turn_are_refused(tmp_path: Path) -> None:
    done = StressJob("address,undefined", tmp_path, source="halves.cpp")()
    assert done.returncode == 0, done.stdout + done.stderr


MISTAKES = {
    "the number of parts is not looked at": (
        "protocol/signal.h",
        "return flag_epoch(first) == round && parts_of(flag_value(first)) != parts;",
        "return false;",
    ),
    "the own part is not looked at": ("protocol/signal.h", "if (flag_epoch(part) == round) return true;", ""),
    "dispatch looks at the first block alone": (
        "protocol/dispatch.h",
        "if (own.published(exec.blocks(), head.epoch + 1) || own.combining(head)) {",
        "if (exec.block() == 0 && (own.published(exec.blocks(), head.epoch + 1) || own.combining(head))) {",
    ),
    "dispatch does not ask for combine": ("protocol/dispatch.h", " || own.combining(head)) {", ") {"),
    "combine does not ask for dispatch": (
        "protocol/combine.h",
        "if (flag_epoch(own.arrived) == head.epoch + 1) return refuse(Misuse::kNotFinished);",
        "",
    ),
    "combine trusts the others": (
        "protocol/combine.h",
        "  if (head.num_tokens != call.num_tokens) return refuse(Misuse::kTokenCount);",
        "  if (exec.block() != 0) return true;",
    ),
    "the note is not looked at": (
        "protocol/combine.h",
        "!(work.sends && wait.own.published(exec.blocks(), head.epoch))",
        "true",
    ),
    "the note is not left": (
        "protocol/combine.h",
        "if (work.sends && !work.moving && exec.thread() == 0) {",
        "if (false) {",
    ),
    "who sends judges nothing": (
        "protocol/combine.h",
        "return !(kIsFlagged || work.sends) || may_be_in_turn(exec, plan, call, work, wait);",
        "return true;",
    ),
    "release does not ask": ("protocol/combine.h", "if (scratch.own.combining(head)) {", "if (false) {"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, tmp_path: Path) -> None:
    done = StressJob("undefined", tmp_path, MISTAKES[mistake], "halves.cpp")()
    assert done.returncode != 0, f"{mistake}: nothing checks it"
