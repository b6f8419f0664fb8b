"""The base of kernels (native/cuda/exec.cuh) in CTAs of several warps: the accesses that barriers order.

By tests/native/ctas.cpp, what dispatch puts, in each of its kernels; by the stress job, all of a round. The CPU backend
has one thread a rank: what lanes do together is seen here, without a GPU (tests/native/emulated), by ThreadSanitizer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.proofs import PROTOCOL_TEXT, proved_by
from tests.protocol.stress_job import CTA_ROUNDS, SEEDS, STUCK, StressJob, is_caught, shared_job


@pytest.mark.parametrize(("sanitizer", "whole_chunks"), [("thread", False), ("address,undefined", True)])
def test_ctas_put_what_is_said(sanitizer: str, whole_chunks: bool, tmp_path: Path) -> None:
    done = StressJob(sanitizer, tmp_path, source="ctas.cpp", ctas=True, whole_chunks=whole_chunks)()
    assert done.returncode == 0, done.stdout + done.stderr


RECEIVED = {"topk_ids", "topk_weights", "payload", "stats"}
SUMMED = {"output"}

DISPATCH, ITEMS, SHORT = "protocol/dispatch/dispatch.h", "protocol/dispatch/items.h", "protocol/dispatch/short_rows.h"
EXEC = "cuda/exec.cuh"
MISTAKES = {
    "ranks behind the lanes of a warp": (ITEMS, "      first += exec.lanes();\n", ""),
    "which lane has found a row": (ITEMS, "exec.of_lane(row, lane);", "exec.of_lane(row, 0);"),
    "warps that share a segment": (ITEMS, "if ((count++ & (splits - 1)) == split) visit(const", "visit(const"),
    "the second part of a segment": (ITEMS, "load_wide(exec, begin + exec.lane());", "load_wide(exec, begin);"),
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
    "rows of four ranks counted at once": (
        EXEC,
        "const uint32_t mine = sums >> (8 * lane()) & 0xffu;",
        "const uint32_t mine = sums & 0xffu;",
    ),
    "choices that a thread counts behind its first one": (
        "protocol/round/routing.h",
        "for (uint32_t i = begin + exec.thread(); i < end; i += exec.threads()) {",
        "for (uint32_t i = begin + exec.thread(); i < begin; i += exec.threads()) {",
    ),
    "choices that the CTA before counts too": (
        DISPATCH,
        "head.active, share.first_header(call), share.end_token,",
        "head.active, share.first_token, share.end_token,",
    ),
    "numbers that come when all have been told": (
        DISPATCH,
        "  exec.mark(Stage::kPublished, exec.threads() - 1);\n",
        "  if (exec.block() == 0) put_stats(exec, plan, call.stats, head.active);\n",
    ),
    "parts that are told before they are there": (DISPATCH, "  exec.sync();\n  exec.mark(Stage::kPut);\n", ""),
}


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, tmp_path: Path) -> None:
    done = StressJob("thread", tmp_path, MISTAKES[mistake], "ctas.cpp", ctas=True)()
    assert is_caught(done, RECEIVED | {"scratch"}), f"{mistake}: nothing checks it"


@proved_by(*PROTOCOL_TEXT)
def test_lanes_that_do_not_come_end_the_program(tmp_path: Path) -> None:
    """A GPU would hang with a sum that some lanes leave out."""
    summed = "      const uint32_t sums = __reduce_add_sync(0xffffffffu, (set & 0xfu)"
    mistake = (EXEC, summed, "      if (lane() >= 4) continue;\n" + summed)
    done = StressJob("thread", tmp_path, mistake, "ctas.cpp", ctas=True)()
    assert done.returncode == STUCK, done.stdout + done.stderr
    assert "threads wait for others which do not come" in done.stderr


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> StressJob:
    return shared_job(tmp_path_factory, "thread", ctas=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("objects", CTA_ROUNDS.objects)
@pytest.mark.parametrize(("ranks", "blocks"), CTA_ROUNDS.sizes)
def test_rounds_of_ctas_are_clean(job: StressJob, ranks: int, blocks: int, objects: str, seed: int) -> None:
    done = job(*CTA_ROUNDS.options(ranks, blocks, objects, seed))
    assert done.returncode == 0, done.stdout + done.stderr


# Orders between the warps of a CTA, or the lanes of a warp, in one kernel. With the places that each orders, and the
# objects that show it.
COMBINE, SUM = "protocol/combine/combine.h", "protocol/combine/sentinel_sum.h"
BARRIERS: dict[str, tuple[set[str], str, str, str, str]] = {
    "the state before it is looked at": (
        {"scratch"},
        "0",
        DISPATCH,
        "  exec.sync();\n  exec.mark(Stage::kState);\n",
        "  exec.mark(Stage::kState);\n",
    ),
    "who has ended the round": (
        SUMMED | {"scratch"},
        "0",
        COMBINE,
        "if (exec.any(released)) return false;",
        "if (released) return false;",
    ),
    "a scale that others still look at": (set(), "2", SUM, "if (kQuantised) well = exec.all_lanes(well);", ""),
    "the copy of the state, as the round is closed": (
        {"state"},
        "0",
        "protocol/round/signal.h",
        "return exec.peek(word);",
        "return *word;",
    ),
    "the half of a release that comes before": (
        RECEIVED | {"output"},
        "0",
        EXEC,
        "__device__ void prepare_publish() const { ptx::fence_sys(); }",
        "__device__ void prepare_publish() const {}",
    ),
    "the CTA that comes last": (
        RECEIVED | SUMMED | {"state"},  # J2 covers the rows that are copied for combine
        "01",
        EXEC,
        "    __syncthreads();\n    if (gridDim.x == 1) return true;\n",
        "    if (gridDim.x == 1) return true;\n",
    ),
    "routes before they are used": (
        {"scratch"},
        "0",
        DISPATCH,
        "  exec.sync();\n  if (scratch.objection == Objection::kNone && wait.missing.empty()) return true;",
        "  if (scratch.objection == Objection::kNone && wait.missing.empty()) return true;",
    ),
}


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_barrier_is_needed(barrier: str, tmp_path: Path) -> None:
    places, objects, *change = BARRIERS[barrier]
    job = StressJob("thread", tmp_path, (change[0], change[1], change[2]), ctas=True)
    for seed in range(2, 66):  # of other rounds, of which not each shows it
        done = job("--ranks", 3, "--blocks", 2, "--rounds", 60, "--objects", objects, "--seed", seed, "--timeout", 4)
        if is_caught(done, places):
            return
    pytest.fail(f"{barrier}: nothing checks it")
