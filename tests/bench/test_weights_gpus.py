"""The program that measures weight updates between GPUs, without GPUs: gloo and the provider `host`."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import warm
from tests.project.checkout import ROOT

pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")

SMALL = "--device cpu --hidden 1024 --layers 1 --rounds 1 --watermark_mb 8 --task_mb 4"
WEIGHTS = 1024 * 1024 * (1 + 1 + 9) + 2 * 256 * 1024
"""Elements of the model: q, k, v, o of 1024, gate, up and down of 3 x 1024."""
ONE_MODEL = {"bf16": 2 * WEIGHTS, "fp8": WEIGHTS + 4 * WEIGHTS // 128**2}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("weights_gpus")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), str(ROOT / "benchmarks" / "weights_gpus.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(("ranks", "layout", "models"), [(2, "replicas", 1), (4, "tp", 1), (4, "replicas", 2)])
def test_an_update_stands_beside_a_broadcast_and_its_floors(
    tmp_path: Path, ranks: int, layout: str, models: int
) -> None:
    path = tmp_path / "weights_gpus.json"
    done = run("--gpus", str(ranks), "--layout", layout, *SMALL.split(), "--output_file", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["schema"] == "putget.weights_gpus/1"
    found = report["ways"]["putget"]
    assert found["error"] is None
    assert [row["recipe"] for row in found["rows"]] == ["bf16", "fp8"]
    for row in found["rows"]:
        assert row["num_bytes"] == models * ONE_MODEL[row["recipe"]]
        assert list(row["seconds"]) == ["paused", "swap", "nccl", "engine", "copy"]
        assert min(row["seconds"].values()) > 0
        for reports in row["reports"].values():
            assert sum(trainer["num_bytes"] for trainer in reports[0]) == row["num_bytes"]
        assert f"{row['recipe']:5} putget, swap: " in done.stdout


def test_a_peer_that_cannot_run_is_an_error_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "weights_gpus.json"
    flags = [*SMALL.split(), "--recipes", "bf16", "--peers", "checkpoint_engine", "--output_file", str(path)]
    done = run(*flags)
    assert done.returncode == 1
    ways = json.loads(path.read_text())["ways"]
    assert ways["putget"]["error"] is None
    assert ways["checkpoint_engine"]["rows"] == []
    assert "exit codes" in ways["checkpoint_engine"]["error"]


def test_an_unknown_peer_is_refused() -> None:
    done = run("--peers", "pigeons")
    assert done.returncode == 2
    assert "--peers: pigeons came; allowed are checkpoint_engine" in done.stderr


@pytest.mark.parametrize("fp8", [False, True])
def test_weights_that_differ_in_one_bit_are_found(program: Any, *, fp8: bool) -> None:
    options = argparse.Namespace(hidden=1024, layers=1, small=3)
    fused = program.Fused(options, 1, 2, fp8=fp8)

    def load() -> None:
        for name, shape in program.shapes(options).items():
            fused.load(program.rounded(name, program.values(name, shape), fp8=fp8))

    load()
    program.check(options, fused, "cpu", fp8=fp8)
    assert not fused.tensors["0.down"].view(torch.uint8).any()  # the next check needs another load
    load()
    fused.tensors["0.down"].view(torch.uint8)[7, 9] ^= 1
    with pytest.raises(RuntimeError, match=r"0\.down of rollout rank 1 differs"):
        program.check(options, fused, "cpu", fp8=fp8)
