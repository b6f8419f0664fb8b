"""Landing areas under ThreadSanitizer: clean as the text is, caught once an order is weakened or a look left out.

The job is tests/native/landing_job.h, a part of the stress job: kernels of each rank, a thread that posts orders, and
one that puts in place of a rank's kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.proofs import PROTOCOL_TEXT, proved_by
from tests.protocol import tags
from tests.protocol.stress_job import REPORT, SEEDS, StressJob, is_caught, shared_job

TRIES = range(1, 9)
OPTIONS = ("--landing", 1, "--ranks", 3, "--blocks", 2, "--rounds", 20, "--timeout", 60)
# The places that each order protects: a race must be there to count as this order's.
PROTECTED = {
    "H1": {"orders"},
    "H2": {"orders"},
    "H3": {"orders"},
    "H4": {"orders"},
    "H5": {"cells", "orders"},
    "H6": {"cells", "orders"},
    "H7": {"cells", "orders"},
    "H8": {"cells", "orders"},
    "L2": {"cells"},
    "L3": {"cells"},
    "L5": {"cells"},
    "L6": {"cells"},
    "J4": {"cells", "landing_state"},
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> StressJob:
    return shared_job(tmp_path_factory, "thread")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_landing_is_clean(job: StressJob, blocks: int, seed: int) -> None:
    done = job(*OPTIONS, "--blocks", blocks, "--seed", seed)
    assert done.returncode == 0, done.stdout + done.stderr


def test_landing_of_ctas_is_clean(tmp_path_factory: pytest.TempPathFactory) -> None:
    done = shared_job(tmp_path_factory, "thread", ctas=True)(*OPTIONS, "--rounds", 8)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_order_is_tried() -> None:
    orders = {*tags.published(), *tags.observed(), *tags.enumerators("Join")}
    assert {tag for tag in orders if tags.of_landing(tag)} == PROTECTED.keys()


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("tag", sorted(PROTECTED))
def test_a_weakened_order_is_caught(job: StressJob, tag: str) -> None:
    option = "--weaken-join" if tag == "J4" else "--weaken"
    for seed in TRIES:
        done = job(*OPTIONS, "--seed", seed, option, tag)
        assert done.returncode in {0, REPORT}, done.stderr
        if is_caught(done, PROTECTED[tag]):
            return
    pytest.fail(f"{tag} without its order: nothing depends on it, or nothing checks it")


TEXT, STEP = "protocol/landing/landing.h", "protocol/landing/step.h"
MISTAKES = {
    "a cell that is not free": (
        TEXT,
        "return is_first || flag_epoch(exec.template observe<Tag::L6>(flag)) == before;",
        "return is_first || flag_epoch(exec.template observe<Tag::L6>(flag)) != before + 1;",
    ),
    "an arrival that is not the wanted one": (
        TEXT,
        "if (flag_epoch(flag) != order.arrival) break;",
        "if (flag_epoch(flag) == plan.first) break;",
    ),
    "a put that is told of before its last part": (
        TEXT,
        "end / plan.blob_bytes);\n  state.put_bytes = end - count * plan.blob_bytes;",
        "(end + plan.blob_bytes / 2) / plan.blob_bytes);\n"
        "  state.put_bytes = end < plan.blob_bytes ? 0 : end % plan.blob_bytes;",
    ),
    "a cell that is free before it is taken": (
        TEXT,
        "    ++state.checked;\n",
        "  const TakeOrder taken = plan.orders->take[state.checked % kOrders];\n"
        "  for (uint32_t rank = 0; rank < plan.ep_size; ++rank) {\n"
        "    exec.template publish<Tag::L5>(taken_flag(plan, rank, plan.ep_rank, taken.arrival), "
        "pack_flag(taken.arrival, 0));\n  }\n"
        "    ++state.checked;\n",
    ),
    "a table that changes before its batch is taken": (
        TEXT,
        "kOrders];\n    if (!not_behind(order.batch, last)) break;\n    const Table",
        "kOrders];\n    const Table",
    ),
    "a table whose next words may change before it is written": (
        TEXT,
        "pack_flag(share.end_tables, 0)",
        "pack_flag(state.end.tables, 0)",
    ),
    "a cell that is not free for the thread": (
        TEXT,
        "pack_flag(state.may_copy, 0)",
        "pack_flag(state.end.puts, 0)",
    ),
    "a put that the thread tells of before its bytes": (
        TEXT,
        "  orders.copied_sum[copied % kOrders] = copy(orders.put[copied % kOrders]);  // [L1]\n  ++copied;\n"
        "  exec.template publish<Tag::H5>(&orders.copied, pack_flag(copied, 0));",
        "  exec.template publish<Tag::H5>(&orders.copied, pack_flag(copied + 1, 0));\n"
        "  orders.copied_sum[copied % kOrders] = copy(orders.put[copied % kOrders]);  // [L1]\n  ++copied;",
    ),
    "loads that change while the host reads them": (STEP, " && planned - 1 == state.window;", ";"),
    "loads that the host reads before all are there": (STEP, "if (count != 0 && count == left)", "if (count != 0)"),
}


SEEN_IN = {mistake: {"cells", "slots", "tables", "sums"} for mistake in MISTAKES}
# A kernel reads the sum of what the thread copied before it reads the bytes.
SEEN_IN["a put that the thread tells of before its bytes"] = {"cells", "orders"}


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, tmp_path: Path) -> None:
    job = StressJob("thread", tmp_path, MISTAKES[mistake])
    for seed in TRIES:
        if is_caught(job(*OPTIONS, "--timeout", 10, "--seed", seed), SEEN_IN[mistake]):
            return
    pytest.fail(f"{mistake}: nothing checks it")
