"""native/domains: the product's proxies over a network in virtual time, with every byte compared; each step taken out.

The job is tests/native/domains.cpp: random topologies, shapes and rounds, writes in any order, lost and sent again, and
ranks that go silent. Its sources are compiled apart, so that a mistake costs the compiling of one file.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.proofs import PROTOCOL_TEXT, proved_by
from tests.protocol.stress_job import LIMIT_S, MISMATCH, REPORT, SOURCES, compiled_program, objects_of
from tests.protocol.tags import ROOT

PROXY = ROOT / "native" / "domains" / "proxy.cpp"
PARTS = (SOURCES / "domains.cpp", ROOT / "native" / "domains" / "virtual_network.cpp")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Everything but the proxy, compiled."""
    return objects_of(PARTS, tmp_path_factory.mktemp("domains"), "address,undefined")


def job(parts: list[Path], proxy: Path, folder: Path) -> Path:
    return compiled_program(parts, objects_of((proxy,), folder, "address,undefined"), folder, "address,undefined")


def run(program: Path, *options: object) -> subprocess.CompletedProcess[str]:
    environment = {"ASAN_OPTIONS": f"exitcode={REPORT}", "UBSAN_OPTIONS": f"exitcode={REPORT}"}
    command = [str(program), *map(str, options)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def test_every_byte_is_in_its_place(parts: list[Path], tmp_path: Path) -> None:
    program = job(parts, PROXY, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(lambda seed: run(program, "--seed", seed, "--worlds", 100, "--deaths", 100), (1, 2)):
            assert done.returncode == 0, done.stdout + done.stderr


MISTAKES = {
    "statistics that stay behind": ("shape.write_at(sending.next)", "shape.parcel_at(sending.next)"),
    "X0 without the transport's word": (
        " || !sending->lane.idle()) return false;\n  }\n  ++sent_",
        ") return false;\n  }\n  ++sent_",
    ),
    "X2 of any round": (
        "if (flag_epoch(doorbell) != epoch) return false;\n  const uint32_t ended",
        "const uint32_t ended",
    ),
    "X3 before the end of the round before": ("if (sending.ended == sending.dispatched) return begin", "return begin"),
    "X3 into another split": ("write.dst_offset = sending.to + at;", "write.dst_offset = sending.to + at + 16;"),
    "X3 from the first parcel": ("const uint64_t at = shape.write_at(sending.next);", "const uint64_t at = 0;"),
    "X3 to another agent": (
        "sending.lane.peer = domains.agent(config_.rank, domain);",
        "sending.lane.peer = domains.member(domain, domains.size(domain) - 1);",
    ),
    "X4 before all parcels": ("      if (!serving.parcel[parcel].grown()) return false;\n", ""),
    "X4 before the return of the round before is over": (
        "  if (!serving.lane.idle()) return false;\n  if (num_parcels",
        "  if (num_parcels",
    ),
    "X4 in its own board alone": (
        "const Board board(config_.board[domains.member(domain, place)]);\n    store_release(board.landed",
        "const Board board(config_.board[config_.rank]);\n    store_release(board.landed",
    ),
    "X6 of this rank alone": (
        "    if (flag_epoch(flag) != epoch) return false;\n    if (flag != own",
        "    if (flag != own",
    ),
    "X7 of any round": ("    if (flag_epoch(doorbell) != serving.landed) return false;\n", ""),
    "X8 from the first parcel": (
        "const uint64_t at = uint64_t{serving.next} * shape",
        "const uint64_t at = uint64_t{0} * shape",
    ),
    "X8 into another split": ("write.dst_offset = serving.to + at;", "write.dst_offset = serving.to + at + 16;"),
    "X9 before all parcels": ("parcel = num_parcels; parcel-- > 0;) {", "parcel = 1; parcel-- > 0;) {"),
    "X9 without a release": ("const bool released = sending.released.grown();", "const bool released = false;"),
    "X10 never": ("serving.told = true;\n", "serving.told = true;\n  return true;\n"),
    "a message counted twice": ("    serving.last[num_parcels - 1].take();\n", ""),
    "a full network": ("if (status == PUTGET_TRANSPORT_FULL) return Post::kLater;", ""),
    "a failed write": ("if (lane.failed()) stop(", "if (false) stop("),
    "another generation": (
        "parcel_imm(kind, config_.generation, config_.workspace, parcel, sender)",
        "parcel_imm(kind, 0, config_.workspace, parcel, sender)",
    ),
}


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, parts: list[Path], tmp_path: Path) -> None:
    right, wrong = MISTAKES[mistake]
    text = PROXY.read_text()
    assert text.count(right) == 1, f"proxy.cpp does not say once: {right}"
    source = tmp_path / "proxy.cpp"
    source.write_text(text.replace(right, wrong))
    done = run(job(parts, source, tmp_path), "--worlds", 60, "--deaths", 60)
    assert done.returncode in {MISMATCH, REPORT}, f"{mistake}: nothing checks it"
