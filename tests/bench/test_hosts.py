"""Commands under torchrun on two hosts, which are network namespaces: ranks of each, joined over TCP."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest

from putget_bench import report
from tests.harness import hosts, warm

pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")

ROOT = Path(__file__).parents[2]
LIMIT_S = 240


def start(name: str, node: int, flags: str, ranks: int = 2) -> subprocess.Popen[str]:
    """torchrun on a host; the first one has the store."""
    torchrun = [warm.python(), "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
    store = ["--nproc-per-node", str(ranks), "--master-addr", f"{hosts.NETWORK}.1", "--master-port", "29500"]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *torchrun, *store, "-m", "putget", *flags.split()],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": hosts.NIC, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(flags: str, ranks: int = 2) -> list[str]:
    """The output of torchrun on each host, with so many ranks there; both must succeed."""
    with hosts.made(2) as made:
        nodes = [start(name, node, flags, ranks) for node, name in enumerate(made.names)]
        try:
            printed = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
        finally:
            for node in nodes:
                node.terminate()
                node.wait(30)
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    return printed


def test_bench(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    first, other = run(f"bench --device cpu -b 2 -e 2 --iters 2 --hidden_size 128 --output_file {path}")
    assert first.count("2 tokens a rank: correct;") == 1
    assert "correct" not in other  # one rank talks
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(report.schema()).validate(document)
    assert (document["config"]["ep_size"], document["config"]["network"]) == (4, "auto")
    assert "domains of the ranks of a host" in " ".join(first.split())
    assert document["ceiling"]["write_gbps"] > 0


def test_roofline() -> None:
    """Each host measures its own memory."""
    first, _ = run("roofline --device cpu --iters 2")
    assert "write" in first


def test_demo(tmp_path: Path) -> None:
    """A host of one rank has no link to measure."""
    first, _ = run(f"demo --device cpu --plot {tmp_path / 'demo.png'}", ranks=1)
    assert first.count("every byte as the oracle has it") == 4
