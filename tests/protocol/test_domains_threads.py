"""Proxies under ThreadSanitizer: clean as they are, caught once an order is weakened.

The job is tests/native/domains_threads.cpp: kernels, proxies and a network as threads.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.proofs import PROTOCOL_TEXT, proved_by
from tests.protocol.stress_job import LIMIT_S, MISMATCH, REPORT, SEEDS, SOURCES, compiled_program, objects_of, prefix_of
from tests.protocol.test_domains_proxy import PROXY

THREAD = PROXY.with_name("thread.cpp")
TRIES = range(1, 9)  # for a mistake to show, which one seed may not: the first that does ends the test


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Everything but the proxy, compiled."""
    return objects_of((SOURCES / "domains_threads.cpp", THREAD), tmp_path_factory.mktemp("threads"), "thread")


@pytest.fixture(scope="module")
def prefix() -> tuple[str, ...]:
    """How such programs start here."""
    return prefix_of("thread")


def job(parts: list[Path], proxy: Path, folder: Path) -> Path:
    return compiled_program(parts, objects_of((proxy,), folder, "thread"), folder, "thread")


def run(prefix: tuple[str, ...], program: Path, seed: int, rounds: int = 60) -> subprocess.CompletedProcess[str]:
    command = [*prefix, str(program), "--seed", str(seed), "--rounds", str(rounds)]
    environment = {"TSAN_OPTIONS": f"halt_on_error=1 exitcode={REPORT}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_and_proxies_are_clean(parts: list[Path], prefix: tuple[str, ...], tmp_path: Path, seed: int) -> None:
    done = run(prefix, job(parts, PROXY, tmp_path), seed)
    assert done.returncode == 0, done.stdout + done.stderr


LONG_ROUNDS = 5_000
# Between the two looks of the mistake a rank has the time to end its round, whatever the scheduler does.
KIND_READ_FIRST = (
    "  if (flag_epoch(own) != epoch) return false;\n  RankSet others",
    "  std::this_thread::sleep_for(std::chrono::microseconds(50));\n  RankSet others",
)


@pytest.fixture(scope="module")
def fast_parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same without ThreadSanitizer, which is slow: for steps that meet seldom."""
    return objects_of((SOURCES / "domains_threads.cpp", THREAD), tmp_path_factory.mktemp("fast"), "undefined")


@pytest.mark.parametrize("seed", SEEDS)
def test_many_rounds_are_right(fast_parts: list[Path], tmp_path: Path, seed: int) -> None:
    program = compiled_program(fast_parts, objects_of((PROXY,), tmp_path, "undefined"), tmp_path, "undefined")
    done = run((), program, seed, LONG_ROUNDS)
    assert done.returncode == 0, done.stdout + done.stderr


@proved_by(*PROTOCOL_TEXT)
def test_a_kind_that_is_read_before_its_round_has_ended_is_caught(fast_parts: list[Path], tmp_path: Path) -> None:
    """closed[rank] may change between two looks at it: its kind must come from the look that saw the epoch."""
    right, wrong = KIND_READ_FIRST
    text = PROXY.read_text()
    assert text.count(right) == 1
    source = tmp_path / "proxy.cpp"
    changed = text.replace(right, wrong).replace("if (flag != own)", "if (flag_value(flag) != flag_value(own))")
    source.write_text("#include <chrono>\n#include <thread>\n" + changed)
    program = compiled_program(fast_parts, objects_of((source,), tmp_path, "undefined"), tmp_path, "undefined")
    assert any("a proxy has stopped" in run((), program, seed).stdout for seed in TRIES)


@proved_by(*PROTOCOL_TEXT)
def test_a_thread_that_goes_on_with_a_removed_proxy_is_caught(
    parts: list[Path], prefix: tuple[str, ...], tmp_path: Path
) -> None:
    right = "      proxies = proxies_;\n"
    text = THREAD.read_text()
    assert text.count(right) == 1
    source = tmp_path / "thread.cpp"
    source.write_text(text.replace(right, "      if (proxies.empty()) proxies = proxies_;\n"))
    others = [part for part in parts if part.stem != "thread"]
    changed = objects_of((source, PROXY), tmp_path, "thread")
    program = compiled_program(others, changed, tmp_path, "thread")
    assert any(run(prefix, program, seed).returncode in {REPORT, MISMATCH} for seed in TRIES)


WEAKENED = {
    "X0": ("store_release(board_.sent()", "store_relaxed(board_.sent()"),
    "X0, the transport's word": (
        "static_cast<uint32_t>(load_acquire(&over))",
        "static_cast<uint32_t>(load_relaxed(&over))",
    ),
    "X2": ("load_acquire(board_.out(", "load_relaxed(board_.out("),
    "X4": ("store_release(board.landed(", "store_relaxed(board.landed("),
    "X7": ("load_acquire(board_.back(", "load_relaxed(board_.back("),
    "X9": ("store_release(board_.returned(", "store_relaxed(board_.returned("),
    "a counter": ("return load_acquire(word) == seen + 1", "return load_relaxed(word) == seen + 1"),
}


@proved_by(*PROTOCOL_TEXT)
@pytest.mark.parametrize("order", WEAKENED)
def test_a_weakened_order_is_caught(order: str, parts: list[Path], prefix: tuple[str, ...], tmp_path: Path) -> None:
    right, wrong = WEAKENED[order]
    text = PROXY.read_text()
    assert text.count(right) == 1, f"proxy.cpp does not say once: {right}"
    source = tmp_path / "proxy.cpp"
    source.write_text(text.replace(right, wrong))
    program = job(parts, source, tmp_path)
    codes = (run(prefix, program, seed).returncode for seed in TRIES)
    assert any(code in {REPORT, MISMATCH} for code in codes), f"{order}: nothing checks it"
