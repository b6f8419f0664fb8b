"""Dispatch by CTAs of several warps, each lane a thread, under ThreadSanitizer: what they put, and what orders them.

By tests/native/ctas.cpp. The CPU backend has one thread a rank: what lanes do together is seen here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.stress_job import StressJob


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_ctas_put_what_is_said(sanitizer: str, tmp_path: Path) -> None:
    done = StressJob(sanitizer, tmp_path, source="ctas.cpp")()
    assert done.returncode == 0, done.stdout + done.stderr


DISPATCH, ITEMS, SHORT = "protocol/dispatch.h", "protocol/items.h", "protocol/short_rows.h"
MISTAKES = {
    "ranks behind the lanes of a warp": (ITEMS, "      first += exec.lanes();\n", ""),
    "which lane has found a row": (ITEMS, "exec.of_lane(row, lane);", "exec.of_lane(row, 0);"),
    "warps that split a piece's targets": (ITEMS, "if ((count++ & (splits - 1)) == split) visit(const", "visit(const"),
    "the second part of a piece": (ITEMS, "load_wide(exec, begin + exec.lane());", "load_wide(exec, begin);"),
    "the first access of another payload": (
        SHORT,
        "if (p != payload_ || i != exec.thread()) load",
        "if (i != exec.thread()) load",
    ),
    "a thread's second id": (SHORT, "      if (i != exec.thread()) load_header(plan, call, i);\n", ""),
    "ids of a token that begins in another CTA": (DISPATCH, "chunk < first_header ? first_header : chunk", "chunk"),
    "items of a chunk that is not routed": (DISPATCH, "share.end < chunk_end ? share.end : chunk_end", "share.end"),
    "a chunk that is passed while it is put": (
        DISPATCH,
        "    exec.sync();  // the last chunk's puts have read the scratch\n",
        "",
    ),
    "a chunk that is put while it is routed": (DISPATCH, "    exec.sync();\n    chunk = token;\n", "chunk = token;\n"),
    "parts that are told before they are there": (DISPATCH, "  exec.sync();\n  exec.mark(Stage::kPut);\n", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, tmp_path: Path) -> None:
    done = StressJob("thread", tmp_path, MISTAKES[mistake], "ctas.cpp")()
    assert done.returncode != 0, f"{mistake}: nothing checks it"
