"""native/protocol/round/divisor.h, routing.h and predecessors.h against the plain ways of saying the same.

By tests/native/routing.cpp.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.proofs import PROTOCOL_TEXT, proved_by
from tests.protocol.stress_job import StressJob


def test_routes_are_counted_as_they_are_said(tmp_path: Path) -> None:
    done = StressJob("address,undefined", tmp_path, source="routing.cpp")()
    assert done.returncode == 0, done.stdout + done.stderr


MISTAKES = {
    "the rounding of a multiplier": ("protocol/round/divisor.h", "/ divisor + 1);", "/ divisor);"),
    "what the halves of an id are worth": (
        "protocol/round/routing.h",
        "return static_cast<uint64_t>(id_[i]) >> 32 == 0 ? static_cast<uint32_t>(id_[i]) : ~0u;",
        "return static_cast<uint32_t>(id_[i]);",
    ),
    "an inactive rank": (
        "protocol/round/routing.h",
        "static_cast<uint32_t>(entry) < plan.shape.ep_size && active.holds(entry);",
        "static_cast<uint32_t>(entry) < plan.shape.ep_size;",
    ),
    "tokens that are not valid": (
        "protocol/dispatch/predecessors.h",
        "  if (end > router.num_valid) end = router.num_valid;\n",
        "",
    ),
    "ranks behind the first word": (
        "protocol/dispatch/predecessors.h",
        "router.active, end, 32, scratch);",
        "router.active, end, 64, scratch);",
    ),
    "what one thread has counted": (
        "protocol/dispatch/predecessors.h",
        "    from += uint64_t{exec.threads()} * shape.top_k;\n",
        "",
    ),
    "ids of 16 bytes": ("protocol/round/routing.h", "i += kWide) {", "i += 2 * kWide) {"),
    "ids behind the first eight": (
        "protocol/dispatch/predecessors.h",
        "k < count; k += kIdBatch",
        "k < count && k == 0; k += kIdBatch",
    ),
}


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, tmp_path: Path) -> None:
    done = StressJob("undefined", tmp_path, MISTAKES[mistake], "routing.cpp")()
    assert done.returncode != 0, f"{mistake}: nothing checks it"
