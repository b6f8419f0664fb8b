"""The protocol text under ThreadSanitizer: clean as it is, caught once one order is weakened or one wait is skipped.

The job is tests/native/stress.cpp. The mutations come from the tags in native/protocol, so that a new publish or
observe is tried without a line here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.proofs import PROTOCOL_TEXT, proved_by
from tests.protocol import tags
from tests.protocol.stress_job import BLOCK_ROUNDS, EVERY_KIND, REPORT, SEEDS, StressJob, is_caught, shared_job

TRIES = range(1, 33)  # for a mutation to show, which one seed may not: the first that does ends the test


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> StressJob:
    return shared_job(tmp_path_factory, "thread")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("objects", BLOCK_ROUNDS.objects)
@pytest.mark.parametrize(("ranks", "blocks"), BLOCK_ROUNDS.sizes)
def test_the_protocol_is_clean(job: StressJob, ranks: int, blocks: int, objects: str, seed: int) -> None:
    done = job(*BLOCK_ROUNDS.options(ranks, blocks, objects, seed))
    assert done.returncode == 0, done.stderr


# The places that each order protects (docs/protocol.md, the proofs): a race must be there to count as this order's.
# Rows that come next meet readers and writers of the round before (R1, C2, D1), of two rounds before (D3, D4) or, in
# mixed layouts, of the end of the round before (C5, D0, J3).
RECEIVED = {"topk_ids", "topk_weights", "payload", "stats"}
SUMMED = {"output"}
PROTECTED = {
    "R1": RECEIVED,
    "D1": RECEIVED,
    "D0": RECEIVED | SUMMED,
    "D3": RECEIVED | SUMMED | {"state"},
    "D4": RECEIVED | SUMMED | {"state"},
    "C2": RECEIVED | {"output"},
    "C3": {"output"},
    "C5": RECEIVED | SUMMED,
    "J2": {"output", "state"},
    "J3": RECEIVED | SUMMED | {"state"},
    "F2": set(),  # no order: a wait alone
}


def caught(job: StressJob, tag: str, *mutation: str) -> bool:
    """Whether ThreadSanitizer objects, where the tag's order protects something; nothing else may happen to the job."""
    for seed in TRIES:
        done = job("--blocks", 2, "--objects", EVERY_KIND, "--seed", seed, *mutation)
        assert done.returncode in {0, REPORT}, done.stderr
        if is_caught(done, PROTECTED[tag]):
            return True
    return False


ROUNDS = sorted(tag for tag in tags.published() | tags.observed() if not tags.of_landing(tag))


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("tag", ROUNDS)
def test_a_weakened_order_is_caught(job: StressJob, tag: str) -> None:
    assert caught(job, tag, "--weaken", tag), f"{tag} without its order: nothing depends on it, or nothing checks it"


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("join", [join for join in tags.enumerators("Join") if not tags.of_landing(join)])
def test_a_weakened_join_is_caught(job: StressJob, join: str) -> None:
    mutation = ("--weaken-join", join)
    assert caught(job, join, *mutation), f"{join} without its order: nothing depends on it, or nothing checks it"


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("tag", [tag for tag in sorted(tags.observed() | tags.polled()) if not tags.of_landing(tag)])
def test_a_skipped_wait_is_caught(job: StressJob, tag: str) -> None:
    for seed in TRIES:
        done = job("--blocks", 2, "--objects", EVERY_KIND, "--seed", seed, "--timeout", 2, "--skip", tag)
        if is_caught(done, PROTECTED[tag] | {"state"}):
            return
    pytest.fail(f"{tag} need not be waited for: nothing depends on it, or nothing checks it")


# Plain accesses where another CTA, or a peer, stores at the same moment. With the place that the report must name.
PLAIN = {
    "a peer's flag": (
        "ended",
        "protocol/combine/sentinel.h",
        "    is_ahead_ = may_load_;\n",
        "    is_ahead_ = may_load_;\n"
        "    const uint32_t peer = (plan.shape.ep_rank + 1) % plan.shape.ep_size;\n"
        "    if (*flag_line(plan.own(), plan.layout.ended, peer) == 1) is_ahead_ = false;\n",
    ),
    "the copy of the state": ("state", "protocol/round/signal.h", "return exec.peek(word);", "return *word;"),
    "that the round is closed": (
        "state",
        "protocol/combine/combine.h",
        "exec.note(&plan.state->head.open, 0u);",
        "plan.state->head.open = 0;",
    ),
    "how the round has ended": (
        "state",
        "protocol/combine/combine.h",
        "exec.note(&plan.state->head.end, kEndedByCombine);",
        "plan.state->head.end = kEndedByCombine;",
    ),
}


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("access", PLAIN)
def test_a_plain_access_is_caught(access: str, tmp_path: Path) -> None:
    place, *change = PLAIN[access]
    require_caught(tmp_path, (change[0], change[1], change[2]), blocks=3, objects="0", places={place})


# Accesses that no tag tells apart: the flags of a kernel's parts.
PARTS = {
    "the first and the last part alone": (
        "if (!scratch.head.active.has(peer)) continue;\n    all = observe_part<tag>(",
        "if (!scratch.head.active.has(peer)) continue;\n"
        "if (part != 0 && part + 1 < parts_of(scratch.value[peer])) continue;\n    all = observe_part<tag>(",
    ),
    "parts of any round": (
        "const auto is_there = [&] { return flag_epoch(seen) == epoch; };",
        "const auto is_there = [&] { return part != 0 || flag_epoch(seen) == epoch; };",
    ),
    "as many parts as this rank has": (
        "most = parts > most ? parts : most;",
        "most = expected;",
    ),
}


# Sentinel rows: what tells that a word has come, and what sets it back. With the objects that show it.
WHOLE, SCALED = "0", "2"
SENTINEL = {
    "half a word taken for a whole": (
        WHOLE,
        "protocol/round/words.h",
        "return half[0] != kNotCome && half[1] != kNotCome;",
        "return half[0] != kNotCome;",
    ),
    "a scale that is not waited for": (
        SCALED,
        "protocol/combine/sentinel_sum.h",
        "all = all && leaves.scale[i] != kScaleNotCome;",
        ";",
    ),
    "a row of another slot": (
        WHOLE,
        "protocol/combine/sentinel.h",
        "uint64_t{slot} * plan.shape.wire_row_bytes();",
        "0;",
    ),
    "a ask that is not passed on": (
        WHOLE,
        "protocol/dispatch/dispatch.h",
        "shown(src) | (wait.rows[src] & kWantsSentinels);",
        "shown(src);",
    ),
    "rows that are got are not copied": (
        WHOLE,
        "protocol/combine/expert_rows.h",
        "return stays || head.left[src] >= kWantsSentinels ? 0 : head.left[src];",
        "return 0;",
    ),
    "own rows stay outside where a finish half sums them": (
        WHOLE,
        "protocol/combine/expert_rows.h",
        "call.rows != nullptr && call.half == Half::kBoth &&",
        "call.rows != nullptr &&",
    ),
    "a row of several segments is not copied": (
        WHOLE,
        "protocol/combine/expert_rows.h",
        "const Divisor segments = call.segments_of_row;",
        "const Divisor segments = call.segments_of_row;\n  if (segments.value() > 1) return;",
    ),
    "a word that is not set back": (
        WHOLE,
        "protocol/combine/sentinel_sum.h",
        "exec.clear(packs + row[i] + pack);",
        ";",
    ),
    "a word set back before it has come": (
        WHOLE,
        "protocol/combine/sentinel_sum.h",
        "bool well = look_until<Tag::F2>(",
        "for (uint32_t i = 0; i < kRows; ++i) {\n"
        "if (comes(row[i]) && is_there(i)) exec.clear(packs + row[i] + pack);\n"
        "}\n"
        "bool well = look_until<Tag::F2>(",
    ),
    "a scale that is not set back": (
        SCALED,
        "protocol/combine/sentinel_sum.h",
        "exec.clear(scale_at(plan, packs + row[i], pack));",
        ";",
    ),
    "a scale set back before all have looked": (
        SCALED,
        "protocol/combine/sentinel_sum.h",
        "if (is_there(i) && ends_block)",
        "if (is_there(i))",
    ),
    "an own row is sent, and read where it stays": (
        WHOLE,
        "protocol/combine/sentinel.h",
        "(own_rows_stay(plan, call) ? 1 : 0)",
        "0",
    ),
    "a sum of experts for another slot": (
        WHOLE,
        "protocol/combine/expert_major.h",
        "sentinel_row(plan, plan.shape.ep_rank, at.slot)",
        "sentinel_row(plan, plan.shape.ep_rank, 0)",
    ),
    "a sum of experts that is not where it is got": (
        WHOLE,
        "protocol/combine/combine.h",
        "sum_rows<Codec>(exec, plan, call, head);",
        ";",
    ),
    "those that only sum send too": (
        WHOLE,
        "protocol/combine/combine.h",
        "call.half != Half::kFinish && exec.block() < work.senders;",
        "call.half != Half::kFinish;",
    ),
}


def require_caught(
    folder: Path, mistake: tuple[str, str, str], blocks: int, objects: str, places: set[str] | None = None
) -> None:
    """The job with a mistake in the text fails with one of the seeds: by a wrong byte, a deadline or a race there."""
    job = StressJob("thread", folder, mistake)
    for seed in TRIES:
        done = job("--blocks", blocks, "--objects", objects, "--seed", seed, "--timeout", 2)
        if is_caught(done, places or set()):
            return
    pytest.fail(f"{mistake}: nothing checks it")


@proved_by(*PROTOCOL_TEXT)
def test_compiled_like_a_mistake_the_text_is_clean(tmp_path: Path) -> None:
    file, right, _ = next(iter(SENTINEL.values()))[1:]
    job = StressJob("thread", tmp_path, (file, right, right))
    for seed in (1, 2):
        done = job("--blocks", 3, "--objects", EVERY_KIND, "--seed", seed)
        assert done.returncode == 0, done.stderr


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", SENTINEL)
def test_a_mistake_about_rows_that_are_their_own_flags_is_caught(mistake: str, tmp_path: Path) -> None:
    objects, *change = SENTINEL[mistake]
    require_caught(tmp_path, tuple(change), blocks=2, objects=objects)


# Slots: of batches with several chunks, shared by several CTAs.
SLOTS = {
    "a chunk that is not passed": (
        "protocol/round/routing.h",
        "    scratch.rows[rank] = scratch.rows_so_far(rank);\n",
        "",
    ),
    "predecessors that are not counted": (
        "protocol/dispatch/dispatch.h",
        "if (!Exec::kFewTokens && share.first_chunk() != 0) {",
        "if (Exec::kFewTokens) {",
    ),
}


# Statistics: told to all ranks, before the flag that says so.
PUT_STATS = "  if (plan.shape.num_stats != 0 && exec.block() == 0) put_stats(exec, plan, call.stats, head.active);\n"
STATS = {
    "numbers that come behind the flag": (
        "protocol/dispatch/dispatch.h",
        "  exec.mark(Stage::kPublished, exec.threads() - 1);\n",
        PUT_STATS,
    ),
    "numbers for the other ranks alone": (
        "protocol/dispatch/stats.h",
        "if (active.has(peer)) exec.put(",
        "if (active.has(peer) && peer != plan.shape.ep_rank) exec.put(",
    ),
}


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", SLOTS)
def test_a_mistake_about_slots_is_caught(mistake: str, tmp_path: Path) -> None:
    require_caught(tmp_path, SLOTS[mistake], blocks=3, objects="01", places=RECEIVED)


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", STATS)
def test_a_mistake_about_statistics_is_caught(mistake: str, tmp_path: Path) -> None:
    require_caught(tmp_path, STATS[mistake], blocks=2, objects="02", places={"stats"})


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", PARTS)
def test_a_mistake_about_parts_is_caught(mistake: str, tmp_path: Path) -> None:
    places = PROTECTED["D4"]
    require_caught(tmp_path, ("protocol/round/signal.h", *PARTS[mistake]), blocks=4, objects=EVERY_KIND, places=places)


@pytest.mark.parametrize("option", ["--weaken", "--weaken-join", "--skip", "--objects"])
def test_an_unknown_name_is_refused(job: StressJob, option: str) -> None:
    assert job(option, "Z9").returncode == 2
