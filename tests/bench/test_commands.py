"""The subcommands as a user runs them, on a few CPU ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import matplotlib.image
import numpy as np
import pytest

from putget import hardware
from putget_bench import cli, demo_serve, environment, profiles, report

Command = Callable[[str], str]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def putget(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process (its ranks are processes of their own) and returns what it printed."""

    def run(flags: str) -> str:
        code = cli.main(flags.split())
        captured = capsys.readouterr()
        if code != 0 or captured.err:
            # All of it: what a rank said on a machine that is gone by now cannot be asked for again.
            pytest.fail(f"putget {flags}\nexit code {code}\n{captured.err}\n{captured.out}", pytrace=False)
        return captured.out

    return run


def test_bench_with_peers_writes_a_valid_report_and_a_picture(putget: Command, tmp_path: Path) -> None:
    report_path, plot_path = tmp_path / "out.json", tmp_path / "out.png"
    flags = (
        "bench --device cpu --ep_size 2 -b 0 -e 4 --iters 6 --warmup 1 --iter_stats --kernel_breakdown "
        f"--hidden_size 512 --peers nccl,flashinfer --output_file {report_path} --plot {plot_path}"
    )
    printed = putget(flags)
    document = json.loads(report_path.read_text())
    jsonschema.Draft202012Validator(report.schema()).validate(document)
    assert document["command"] == ["putget", *flags.split()]
    assert [size["batch_size"] for size in document["results"]] == [0, 1, 2, 4]
    for size in document["results"]:
        peers = ["gloo AG+RS", "gloo all-to-all"] if size["batch_size"] else []  # no tokens: nothing for them to do
        assert [contender["name"] for contender in size["contenders"]] == ["putget", *peers]
        check_arithmetic(size, document["ceiling"])
    assert {peer["name"]: peer["status"] for peer in document["peers"]}["nccl"] == "measured"
    assert "there are no kernels on the CPU" in printed
    assert "4 tokens a rank: correct;" in printed
    assert matplotlib.image.imread(plot_path).shape[:2] == (1200, 2025)


def check_arithmetic(size: dict[str, Any], ceiling: dict[str, Any]) -> None:
    """The rates, shares and ratios of the report follow from its bytes and latencies."""
    ours, moved = size["contenders"][0], size["bytes"]
    for phase, rate in (("dispatch", "write_gbps"), ("combine", "read_gbps")):  # on the CPU rows are got
        latency_us = ours[phase]["latency_us"]
        assert ours[phase]["wire_bytes"] == pytest.approx(moved[phase], rel=1e-4)
        assert ours[phase]["wire_gbps"] == pytest.approx(moved[phase] / latency_us / 1e3, rel=1e-4)
        assert ours[phase]["algorithm_gbps"] == pytest.approx(moved[f"{phase}_algorithm"] / latency_us / 1e3, rel=1e-4)
        assert ours[phase]["ceiling_fraction"] == pytest.approx(ours[phase]["wire_gbps"] / ceiling[rate], rel=1e-4)
        assert ours[phase]["percentiles_us"]["p50"] == pytest.approx(latency_us, rel=1e-4)
    for peer in size["contenders"][1:]:
        read = peer["combine"]["wire_gbps"] / ceiling["read_gbps"]
        assert peer["combine"]["ceiling_fraction"] == pytest.approx(read, rel=1e-4)
    for peer in size["contenders"]:
        ratio = ours["pair"]["latency_us"] / peer["pair"]["latency_us"]
        assert peer["pair"]["ratio"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize("profile", profiles.PROFILES)
def test_every_profile_runs_whole(putget: Command, profile: str) -> None:
    """Nothing is made smaller but the batch."""
    printed = putget(f"bench --device cpu --ep_size 4 -b 3 -e 3 --iters 2 --warmup 0 --profile {profile} --peers nccl")
    assert "3 tokens a rank: correct;" in printed


@pytest.mark.parametrize(("top_k", "router"), [(3, ""), (5, "--perfect_router"), (9, "")])
def test_odd_top_k_and_hidden_size(putget: Command, top_k: int, router: str) -> None:
    flags = f"bench --device cpu --ep_size 3 -b 4 -e 4 --iters 2 --warmup 0 --hidden_size 3584 --top_k {top_k} {router}"
    printed = putget(flags)
    assert f"hidden 3584, top_k {top_k}, 256 experts" in " ".join(printed.split())
    assert "4 tokens a rank: correct;" in printed


@pytest.mark.parametrize(
    "flags",
    [
        "--ep_size 3 --profile gpt_oss_120b --quant nvfp4 --num_experts 10 --top_k 3",
        "--ep_size 4 --quant bf16 --payload_dtype float32 --combine_dtype float16 --hidden_size 96 --perfect_router",
        "--ep_size 1 --hidden_size 256 --peers nccl",
        "--ep_size 2 --hidden_size 272 --combine_dtype fp8_block --peers nccl",
        "--ep_size 2 --hidden_size 256 --combine_dtype fp8_block",
    ],
)
def test_bench_of_other_shapes(putget: Command, flags: str) -> None:
    printed = putget(f"bench --device cpu -b 1 -e 9 -f 3 --iters 2 --warmup 0 {flags}")
    assert "9 tokens a rank: correct;" in printed


@pytest.mark.parametrize("provider", ["tcp", "host"])
def test_bench_across_domains(putget: Command, tmp_path: Path, provider: str) -> None:
    pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")
    path = tmp_path / "out.json"
    printed = putget(
        f"bench --device cpu --ep_size 3 --domain_size 2 --network {provider} -b 0 -e 4 -f 4 --iters 3 --warmup 1 "
        f"--hidden_size 128 --output_file {path}"
    )
    assert f"domains of 2 over {provider}" in " ".join(printed.split())
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(report.schema()).validate(document)
    assert (document["config"]["network"], document["config"]["domain_size"]) == (provider, 2)
    assert [size["checked"] for size in document["results"]] == [True] * 3
    assert document["workspace"].splitlines()[-1].endswith("bytes for other domains")


def test_bench_reads_a_routing_file(putget: Command, tmp_path: Path) -> None:
    path = tmp_path / "routing.npz"
    generator = np.random.default_rng(5)
    keys = generator.random((2, 30, 16))
    np.savez_compressed(path, law=keys.argsort(axis=2)[:, :, :6].astype(np.uint8))
    flags = f"bench --device cpu --ep_size 2 -b 5 -e 5 --iters 2 --hidden_size 128 --routing_file {path}"
    printed = putget(flags)
    assert "top_k 6, 16 experts" in printed
    assert "file routing" in " ".join(printed.split())


def test_bench_under_torchrun(tmp_path: Path) -> None:
    flags = f"bench --device cpu -b 2 -e 2 --iters 2 --hidden_size 128 --output_file {tmp_path / 'out.json'}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "putget",
            *flags.split(),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 tokens a rank: correct;") == 1  # one rank talks
    assert json.loads((tmp_path / "out.json").read_text())["config"]["ep_size"] == 2


def test_reports_name_the_commit_that_they_are_told(
    putget: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    flags = f"bench --device cpu --ep_size 1 -b 1 -e 1 --iters 1 --hidden_size 64 --output_file {path}"
    monkeypatch.setattr(environment, "checkout_commit", lambda: None)
    for variable, flag, expected in (("", "", None), ("abc", "", "abc"), ("abc", "--commit def", "def")):
        monkeypatch.setenv("PUTGET_COMMIT", variable)
        putget(f"{flags} {flag}")
        document = json.loads(path.read_text())
        jsonschema.Draft202012Validator(report.schema()).validate(document)
        assert document["commit"] == expected


def test_roofline(putget: Command, tmp_path: Path) -> None:
    path = tmp_path / "roofline.json"
    printed = putget(f"roofline --device cpu --ep_size 2 --iters 3 --commit abc --output_file {path}")
    document = json.loads(path.read_text())
    assert document["commit"] == "abc"
    assert document["schema"] == "putget.roofline/3"
    assert {(rate["kind"], rate["num_sms"]) for rate in document["rates"]} == {
        ("write", None),
        ("read", None),
        ("copy", 0),
    }
    assert all(rate["gbps"] > 0 for rate in document["rates"])
    assert document["barrier_us"] > 0
    for kind in ("write", "read", "copy"):
        assert re.search(rf"^ +{kind} +\d", printed, re.MULTILINE)


def test_demo(putget: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_serve, "why_not", lambda: "no reason")  # test_demo_serve.py has the rest
    plot_path = tmp_path / "demo.png"
    printed = putget(f"demo --device cpu --ep_size 2 --plot {plot_path}")
    for tokens in (1, 4, 16, 64):
        assert re.search(
            rf"^{tokens} tokens a rank: every byte as the oracle has it; relative error .* 0\.00\d", printed, re.M
        )
        assert re.search(rf"^ +{tokens} .* equal +0\.00\d+ *$", printed, re.M)
    assert "saved" in printed
    assert f"Plot: {plot_path}" in printed
    assert plot_path.stat().st_size > 10_000
    assert printed.endswith("One prompt through putget serve is left out: no reason.\n")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("graph", "sizes"),
    [("", "-b 0 -e 128 -f 16"), ("--no_cuda_graph", "-b 16 -e 16")],
)
def test_bench_on_gpus(putget: Command, tmp_path: Path, graph: str, sizes: str) -> None:
    num_gpus = len(hardware.gpus())
    if num_gpus == 0 or hardware.why_no_cuda() is not None:
        pytest.skip("needs a CUDA GPU")
    path = tmp_path / "out.json"
    printed = putget(
        f"bench --device cuda --ep_size {num_gpus} {sizes} --iters 10 --warmup 2 "
        f"--iter_stats --kernel_breakdown --peers nccl --output_file {path} --plot {tmp_path / 'out.png'} {graph}"
    )
    assert "16 tokens a rank: correct;" in printed
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(report.schema()).validate(document)
    assert document["timing"]["clock"] == "cuda events"
    assert document["timing"]["cuda_graph"] is (graph != "--no_cuda_graph")
    assert document["timing"]["flush"] == "overwrite"
    for size in document["results"]:
        peers = ["nccl AG+RS", "nccl all-to-all"] if size["batch_size"] else []
        assert [contender["name"] for contender in size["contenders"]] == ["putget", *peers]
        for contender in size["contenders"]:
            names = " ".join(kernel["name"] for kernel in contender["kernels"])
            assert names
            if num_gpus > 1:  # for one rank NCCL copies
                assert ("nccl" in names.lower()) == ("nccl" in contender["name"]), names


@pytest.mark.gpu
@pytest.mark.parametrize(
    "command",
    [
        "demo --device cuda --plot {folder}/demo.png",
        "demo --device cuda --ep_size 4 --plot {folder}/demo.png",
        "bench --device cuda --ep_size 4 -b 0 -e 16 -f 16 --iters 4 --warmup 1",
        "roofline --device cuda --iters 5",
    ],
)
def test_other_commands_on_gpus(putget: Command, tmp_path: Path, command: str) -> None:
    if not hardware.gpus() or hardware.why_no_cuda() is not None:
        pytest.skip("needs a CUDA GPU")
    assert putget(command.format(folder=tmp_path))
