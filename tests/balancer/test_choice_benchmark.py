"""The program that times the choice of replicas, on the CPU: it runs, and its check finds a wrong slot."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.project.checkout import ROOT

PROGRAM = ROOT / "benchmarks" / "replica_choice.py"


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(
        sys, "argv",
        [str(PROGRAM), "--device", "cpu", "--tokens", "2", "--rounds", "1", "--output_file", str(report)],
    )  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert "2 tokens: slots and counts are the CPU's" in capsys.readouterr().out
    (size,) = json.loads(report.read_text())["sizes"]
    assert {"router", "router, round_robin, counting", "kernel, balanced"} <= size["us"].keys()


def test_its_check_can_fail() -> None:
    program = runpy.run_path(str(PROGRAM))
    subject = program["Subject"](4, program["planned"](288, 32), 32, torch.device("cpu"))
    subject.check()
    subject.choices["hash"].ep_rank = 2
    subject.choices["hash"]._args.rank = 2
    with pytest.raises(ValueError, match="kernel, hash, 4 tokens: other slots than the CPU's"):
        subject.check()
