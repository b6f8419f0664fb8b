"""`putget bench --no_sync`: a library without waits is timed on purpose only, and says what it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from putget import hardware
from putget_bench import cli, report
from tests.harness import warm

ROOT = Path(__file__).parents[2]
BENCH = "bench --device cpu --ep_size 2 -b 2 -e 2 --iters 2 --hidden_size 64"


@pytest.fixture(scope="module")
def without_waits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library without waits, for CPUs, compiled in haste."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("needs CMake")
    build = tmp_path_factory.mktemp("no_waits")
    options = ["-DPUTGET_CUDA=OFF", "-DPUTGET_ABLATE=waits", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-O0"]
    python = f"-DPython_EXECUTABLE={sys.executable}"
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(build), python, *options],
        [cmake, "--build", str(build), "--target", "putget", "-j2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "libputget.so"


def run(library: Path, flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PUTGET_LIBRARY": str(library)}
    command = [warm.python(), "-m", "putget", *flags.split()]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_library_without_waits_is_timed_and_not_checked(without_waits: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run(without_waits, f"{BENCH} --no_sync --output_file {path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 tokens a rank: NOT CHECKED;" in done.stdout
    assert "UNSAFE" in done.stdout
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(report.schema()).validate(document)
    assert document["config"]["no_sync"] is True
    assert [size["checked"] for size in document["results"]] == [False]


def test_nobody_times_it_by_accident(without_waits: Path) -> None:
    done = run(without_waits, BENCH)
    assert done.returncode == 2
    assert "built without waits and gives wrong results" in done.stderr


def test_doctor_says_what_is_left_out(without_waits: Path) -> None:
    done = run(without_waits, "doctor --json")
    found = {(finding["area"], finding["name"]): finding for finding in json.loads(done.stdout)["findings"]}
    assert found["putget", "protocol"]["detail"] == "built for benchmarks, without waits: UNSAFE"


ALONE = """
import torch
from tests.harness import run_ranks
from tests.harness.cases import Case, Round

CASE = Case(3, (Round(1, (3, 8, 0)),), num_experts=7, top_k=3, output=((32,), torch.bfloat16))

def body(rank):
    sent = CASE.sent(0, rank.rank)
    arguments = (sent.topk_ids, sent.topk_weights, *sent.payloads)
    with rank.all_to_all(**{**CASE.options(), "tuning": None}, timeout_s=20.0) as a2a:
        for _ in range(3 if rank.rank == 0 else 0):
            a2a.dispatch(*arguments)
            a2a.combine()
            a2a.dispatch_start(*arguments)
            a2a.dispatch_finish()
            a2a.combine_start()
            a2a.combine_finish()
        a2a.check()

run_ranks(3, body, mode="thread", timeout=15)
"""


def test_one_rank_plays_alone(without_waits: Path) -> None:
    """No wait is left in what is timed, neither in whole calls nor in halves: nobody comes, nobody is missed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PUTGET_LIBRARY": str(without_waits), "PYTHONPATH": path}
    command = [warm.python(), "-c", ALONE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_product_refuses_no_sync(capsys: pytest.CaptureFixture[str]) -> None:
    assert hardware.build().ablated == ""
    assert cli.main([*BENCH.split(), "--no_sync"]) == 2
    assert "-DPUTGET_ABLATE=waits" in capsys.readouterr().err
