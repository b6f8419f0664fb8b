"""The examples run, as a reader would run them."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import Rank, fresh_ranks, warm
from tests.project.checkout import ROOT

EXAMPLES = ROOT / "examples"


def under_torchrun(example: str, python: str) -> str:
    """The output of two ranks, on the CPU also where there are GPUs."""
    result = subprocess.run(
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"examples/{example}"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_one_layer() -> None:
    told = under_torchrun("layer.py", sys.executable)  # a new Python, as a reader has it
    for rank, tokens in enumerate((0, 16)):
        assert f"rank {rank} of 2 on cpu: {tokens} tokens, as a dense layer would give" in told


def test_a_whole_layer() -> None:
    assert "4 of 8 experts on each of 2 ranks, cpu" in under_torchrun("moe_layer.py", warm.python())


def test_a_balanced_layer() -> None:
    told = under_torchrun("balanced.py", warm.python())
    for rank in range(2):
        assert f"rank {rank} of 2: as a dense layer would give; planned max/mean 1.0" in told


def test_a_layer_that_changes_its_placement() -> None:
    told = under_torchrun("placed_layer.py", warm.python())
    for rank in range(2):
        assert f"rank {rank} of 2: the same output with the planned replicas; max/mean 1." in told


def test_layers_that_follow_the_load() -> None:
    told = under_torchrun("online_balancer.py", warm.python())
    for rank in range(2):
        found = re.search(rf"rank {rank} of 2: (\d+) experts moved; max/mean (\S+) at first, (\S+) now", told)
        assert found is not None, told
        assert int(found[1]) > 5
        assert float(found[3]) < 1.1 < float(found[2])


@pytest.mark.parametrize("example", ["layer.py", "moe_layer.py"])
def test_one_layer_is_short(example: str) -> None:
    lines = (EXAMPLES / example).read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith(("import", '"""'))]) <= 30


def as_torchrun_does(rank: Rank, path: Path, port: int) -> None:
    """A body: the environment of torchrun, then the program."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank.rank), LOCAL_RANK=str(rank.rank), WORLD_SIZE=str(rank.size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            "cpu", marks=pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the example takes the GPUs")
        ),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")],
        ),
    ],
)
def test_moving_from_nccl(place: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with fresh_ranks(2, place) as ranks:
        ranks.call(as_torchrun_does, EXAMPLES / "from_nccl.py", port, timeout=100)


def test_unit_test_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("test_engine_on_cpu")
    (mark,) = example.test_layer_equals_a_dense_one.pytestmark
    assert len(mark.args[1]) == 3
    for num_tokens in mark.args[1]:
        example.test_layer_equals_a_dense_one(num_tokens)
    example.test_a_rank_that_stays_away_is_named()


def test_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells, one after the other."""
    pytest.importorskip("matplotlib").use("Agg")
    cells = json.loads((EXAMPLES / "laptop.ipynb").read_text())["cells"]
    names: dict[str, object] = {"__name__": "__notebook__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec(compile(cell["source"], "laptop.ipynb", "exec", dont_inherit=True), names)
    told = capsys.readouterr().out
    assert "rank 3 received [0, 1, " in told
    assert "planned:    max/mean 1.0" in told


def test_the_images_copy_and_install_what_there_is() -> None:
    text = (EXAMPLES / "docker" / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    made = [name for _, name in stages]
    assert {"cpu", "cuda"} <= set(made)
    assert set(re.findall(r"--from=(\S+)", text)) <= set(made)
    assert (ROOT / "transfer" / "pyproject.toml").is_file()
    assert all(f"--target {name} " in text for name in ("cpu", "cuda"))
