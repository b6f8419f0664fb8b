"""native/protocol/domains and putget_transport.h: who is whose agent, where each byte of a message lies, bad messages.

By tests/native/parcel.cpp and transport.c.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.protocol.stress_job import SOURCES, StressJob
from tests.protocol.tags import ROOT

CC = shutil.which("cc")


def test_domains_and_messages_are_as_they_are_said(tmp_path: Path) -> None:
    done = StressJob("address,undefined", tmp_path, source="parcel.cpp")()
    assert done.returncode == 0, done.stdout + done.stderr


PARCEL, DOMAINS = "protocol/domains/parcel.h", "protocol/domains/domains.h"
MISTAKES = {
    "places of ranks that are not active": (
        DOMAINS,
        "if (domain_of_[rank] != domain || !active.has(rank)) continue;",
        "if (domain_of_[rank] != domain) continue;",
    ),
    "an agent of a smaller domain": (DOMAINS, "place_[source] % size_[domain]", "place_[source]"),
    "the split behind the own domain": (DOMAINS, "? domain : domain - 1", "? domain : domain"),
    "the header's bytes in a write": (PARCEL, "- around) / (shape", ") / (shape"),
    "a message of too many parcels": (PARCEL, "rows < least ? 0 : static", "rows == 0 ? 0 : static"),
    "the sender of an immediate": (PARCEL, "(sender & 2047)", "(sender & 63)"),
    "senders of a range that meet": (
        PARCEL,
        "while (ranks > uint64_t{1} << bits)",
        "while (ranks > uint64_t{2} << bits)",
    ),
    "a range that is too short": (PARCEL, "(32 - kSenderBits + bits)", "(31 - kSenderBits + bits)"),
    "the place in a range": (PARCEL, "imm >> kSenderBits << bits |", "imm >> (kSenderBits + 1) << bits |"),
    "more rows than the split has": (PARCEL, " || header.rows > shape.max_tokens", ""),
    "more parcels than have landed": (PARCEL, "header.num_parcels != num_parcels || ", ""),
    "rows of a parcel": (
        PARCEL,
        " ||\n      header.parcel_rows != shape.rows_of_parcel(header.rows, parcel)) {",
        ") {",
    ),
    "where returns go": (PARCEL, "header.returns_at != sender.returns_at || ", ""),
    "an older message": (PARCEL, "  if (header.epoch != sender.epoch) return ParcelMistake::kEpoch;\n", ""),
    "statistics in front of the first parcel": (
        PARCEL,
        "return stats_bytes + parcel * parcel",
        "return parcel * parcel",
    ),
    "statistics without rows": (PARCEL, "    if (rows == 0 && stats_bytes != 0) return 1;\n", ""),
    "statistics in the hash": (PARCEL, "stats_bytes};\n    uint64_t value", "0};\n    uint64_t value"),
    "entries behind the first": (PARCEL, "k < top_k; ++k) takes", "k < 1; ++k) takes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, tmp_path: Path) -> None:
    done = StressJob("address,undefined", tmp_path, MISTAKES[mistake], "parcel.cpp")()
    assert done.returncode != 0, f"{mistake}: nothing checks it"


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_the_table_of_a_transport_is_c(tmp_path: Path) -> None:
    assert CC is not None
    options = ["-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'native' / 'include'}"]
    subprocess.run([CC, *options, "-o", str(tmp_path / "transport"), str(SOURCES / "transport.c")], check=True)
