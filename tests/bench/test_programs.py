"""The programs of benchmarks/ that measure the all-to-all, on two CPU ranks, and the tables made of their reports."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest

from putget_bench import report
from tests.harness import warm
from tests.project.checkout import ROOT

RUNS = """
# a comment
ablate: ablate --batches 2 --hidden_size 256 --iters 2 --warmup 1 --only got   # another
ep2/deepseek_v3: bench --batches 1,3 --hidden_size 256 --iters 2 --warmup 1 --peers nccl
distribution_3: bench --batches 3 --hidden_size 256 --iters 5 --warmup 1 --iter_stats
"""


def run(program: str, *arguments: str) -> str:
    command = [warm.python(), str(ROOT / "benchmarks" / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_series_an_overlap_and_their_tables(tmp_path: Path) -> None:
    runs = tmp_path / "runs.txt"
    runs.write_text(RUNS)
    (tmp_path / "ep2").mkdir()
    run("series.py", str(runs), "--ep_size", "2", "--device", "cpu", "--out", str(tmp_path))
    for name, sizes in (("ablate", [2]), ("ep2/deepseek_v3", [1, 3]), ("distribution_3", [3])):
        document = json.loads((tmp_path / f"{name}.json").read_text())
        jsonschema.Draft202012Validator(report.schema()).validate(document)
        assert [size["batch_size"] for size in document["results"]] == sizes
    flags = "--ep_size 2 --device cpu --tokens 4 --num_sms 0 --product_rows 16 --hidden_size 256 --iters 3"
    told = run("overlap.py", *flags.split(), "--output_file", str(tmp_path / "overlap.json"))
    assert "MISMATCH" not in told
    (overlap,) = json.loads((tmp_path / "overlap.json").read_text())["overlap"]
    times = overlap["latency_us"]
    assert overlap["over_longer"] == times["together"] / max(times["halves"], times["products"])

    tables = run("tables.py", str(tmp_path))
    contenders = json.loads((tmp_path / "ablate.json").read_text())["results"][0]["contenders"]
    for contender in contenders:
        pair = contender["pair"]["latency_us"]
        lines = [line for line in tables.splitlines() if line.startswith(f"| {contender['name']} |")]
        assert any(f" / {pair:.1f} x" in line for line in lines), contender["name"]
    assert {"putget", "got rows"} == {contender["name"] for contender in contenders}
    for line in ("| deepseek_v3 | 256/8/256 fp8 | 3 |", "| 3 | combine | 8 |", "| 4 | sentinel | None | 16 |"):
        assert line in tables


SMALL = "--ep_size 2 --device cpu --batches 1,3 --hidden_size 256 --iters 2 --warmup 1"


@pytest.mark.parametrize("turns", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_builds_take_turns(tmp_path: Path, turns: int) -> None:
    def median_pair(name: str, size: int) -> float:
        reports = [json.loads((tmp_path / f"{name}_{turn}.json").read_text()) for turn in range(1, turns + 1)]
        pairs = (report["results"][size]["contenders"][0]["pair"]["latency_us"] for report in reports)
        return sorted(pairs)[turns // 2]

    library = ROOT / "python" / "putget" / "libputget.so"
    told = run(
        "builds.py", "--out", str(tmp_path), "--turns", str(turns), "now", f"same={library}", "--", *SMALL.split()
    )
    head, _, *lines = told.splitlines()
    assert head == "| tokens | now: dispatch / combine / pair, us | same: dispatch / combine / pair, us |"
    for size, line in enumerate(lines):
        now, same = (median_pair(name, size) for name in ("now", "same"))
        assert line.startswith(f"| {(1, 3)[size]} | ")
        assert f" / {now:.2f} x1.000 | " in line
        assert line.endswith(f" / {same:.2f} x{same / now:.3f} |")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["now", "other=not_there.so", "--"], 2, "other=not_there.so: there is no such library"),
        (["now", "now", "--"], 2, "two builds are called now"),
        (["--turns", "0", "now", "--"], 2, "--turns is 0, expected 1 or more"),
        (["now", "--", "--batches", "none"], 1, "now_1: exit code 2"),
        (["now", "other=pyproject.toml", "--", *SMALL.split()], 1, "other_1: exit code 1"),
        (["--limit_s", "0.01", "now", "--", *SMALL.split()], 1, "now_1: no end after 0.01 s"),
    ],
)
def test_a_build_that_cannot_be_timed_ends_it(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    """Nothing is timed in the place of what was named."""
    command = [warm.python(), str(ROOT / "benchmarks" / "builds.py"), "--out", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == code
    assert said in done.stderr


def test_launches_stand_beside_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    flags = f"--ep_size 2 --device cpu --batches 3 --hidden_size 256 --iters 2 --warmup 1 --output_file {path}"
    run("launches.py", "--combine", "sentinel_rows=no", "--dispatch", "blocks=1", "--", *flags.split())
    (size,) = json.loads(path.read_text())["results"]
    assert size["checked"]
    named = {contender["name"] for contender in size["contenders"]}
    assert named == {"putget", "dispatch blocks=1", "combine sentinel_rows=no"}


@pytest.mark.parametrize("fields", ["rows=1", "blocks", "blocks=many", "splits=3"])
def test_what_is_no_launch_is_said(fields: str) -> None:
    command = [warm.python(), str(ROOT / "benchmarks" / "launches.py"), "--combine", fields]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"{fields!r} is no launch" in done.stderr


def test_a_network_round_stands_beside_the_bare_engine(tmp_path: Path) -> None:
    pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")
    path = tmp_path / "network_round.json"
    flags = f"--tokens 1,3 --hidden_size 64 --rounds 20 --output_file {path}"
    told = run("network_round.py", *flags.split())
    document = json.loads(path.read_text())
    assert (document["schema"], document["mismatches"]) == ("putget.network_round/1", [])
    assert [(line["provider"], line["tokens"]) for line in document["results"]] == [
        ("tcp", 1), ("tcp", 3), ("host", 1), ("host", 3)
    ]  # fmt: skip
    for line in document["results"]:
        assert line["rounds"] == 20
        assert line["ratio"] == line["round_us"] / line["bare_us"]
        assert min(line["bare_us"], line["one_domain_us"], *line["halves_us"].values()) > 0
        # Header, an index of two entries a token, rows of 16 bytes of ids and weights and 64 values.
        assert line["message_bytes"] == 64 + 16 + line["tokens"] * (16 + 128)
        assert line["return_bytes"] == line["tokens"] * 128
    assert "tcp, 3 tokens: round " in told


def test_a_wrong_result_ends_an_overlap_with_an_error() -> None:
    program = (
        "import sys, runpy\n"
        "from putget_bench import launch\n"
        "launch.run = lambda work, plan, size, device, listen: listen({'kind': 'mismatch', 'text': 'rank 1'}) or 1\n"
        "sys.argv = ['x', '--ep_size', '2', '--device', 'cpu']\n"
        f"runpy.run_path({str(ROOT / 'benchmarks' / 'overlap.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([warm.python(), "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "MISMATCH rank 1\n"), done.stderr
