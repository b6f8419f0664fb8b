"""Short stress runs, and proof that a run with one spoilt row does not pass."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import warm
from tests.stress.words import mix, small

ROUNDS = Path(__file__).with_name("rounds.py")


def run(*arguments: str, timeout: float = 120.0) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [warm.python(), str(ROUNDS), *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    report = json.loads(lines[-1])
    assert report["failed_ranks"] == 0, done.stderr
    return done.returncode, report


@pytest.mark.parametrize(("mode", "ranks"), [("processes", 4), ("threads", 3)])
def test_random_rounds_are_right(ranks: int, mode: str, device: str) -> None:
    extra = ("--threads",) if mode == "threads" else ()
    rounds = 200 if device == "cuda" else 100
    status, report = run("--ranks", str(ranks), "--device", device, "--rounds", str(rounds), *extra)
    assert (status, report["wrong"], report["rounds"]) == (0, 0, rounds)
    assert report["tokens"] > 0
    assert report["eager"] > 0
    assert (report["replayed"] > 0) == (device == "cuda")


@pytest.mark.parametrize("plant", ["received", "combined"])
def test_a_spoilt_row_is_seen(plant: str, device: str) -> None:
    status, report = run("--ranks", "2", "--device", device, "--threads", "--rounds", "20", "--plant", plant)
    check = "words" if plant == "received" else "combined"
    assert status == 1
    assert report["wrong"] == report["wrong_by_check"][check] > 0
    assert report["first_wrong_round"] is not None


def test_the_hash_spreads() -> None:
    """Neighbouring rounds, sources, tokens and columns give unrelated words."""
    grid = [torch.arange(8, dtype=torch.int32).reshape([-1 if i == d else 1 for i in range(4)]) for d in range(4)]
    words = mix(*grid, 7)
    assert words.shape == (8, 8, 8, 8)
    assert len(words.unique()) == 8**4
    counts = torch.bincount(small(words, 16).flatten(), minlength=16)
    assert counts.max() < 2 * counts.min()
