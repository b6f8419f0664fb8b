"""Flags: what they resolve to, and that every wrong one is named with what is allowed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from putget_bench import cli, demo, settings
from putget_bench.parser import build_parser

CPU = ("bench", "--device", "cpu")


def resolved(*flags: str, world_size: int | None = None) -> settings.Settings:
    return settings.resolve(build_parser().parse_args([*CPU, *flags]), world_size)


def test_the_flags_of_the_documentation() -> None:
    flags = (
        "--backend nvlink_one_sided --profile deepseek_v3 --perfect_router --kernel_breakdown --iter_stats "
        "--ep_size 8 -b 1 -e 2048 -f 2"
    )
    found = resolved(*flags.split())
    assert found.batches == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    assert (found.hidden_size, found.top_k, found.num_experts) == (7168, 8, 256)
    assert found.max_tokens_per_rank == 2048
    assert found.router == "perfect"
    assert found.iter_stats
    assert found.kernel_breakdown
    assert not found.cuda_graph  # there is none on the CPU


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("-b 1 -e 8", (1, 2, 4, 8)),
        ("-b 3 -e 30 -f 3", (3, 9, 27)),
        ("-b 0 -e 4", (0, 1, 2, 4)),
        ("-b 8 -e 24 -i 8", (8, 16, 24)),
        ("-b 5 -e 5", (5,)),
        ("-b 500", (500,)),
        ("--batches 0,1,128,4096", (0, 1, 128, 4096)),
    ],
)
def test_batch_sizes(flags: str, sizes: tuple[int, ...]) -> None:
    assert resolved(*flags.split()).batches == sizes


def test_flags_win_over_the_profile() -> None:
    found = resolved(*["--profile", "gpt_oss_120b", "--top_k", "22", "--num_experts", "512"])
    assert (found.hidden_size, found.top_k, found.num_experts) == (2880, 22, 512)


@pytest.mark.parametrize(
    ("profile", "shape"),
    [
        ("deepseek_v3", (7168, 8, 256, "fp8")),
        ("qwen3_235b", (4096, 8, 128, "fp8")),
        ("kimi_k2", (7168, 8, 384, "fp8")),
        ("gpt_oss_120b", (2880, 4, 128, "fp8")),
        ("h2048_k22_e512", (2048, 22, 512, "nvfp4")),
    ],
)
def test_profiles(profile: str, shape: tuple[int, int, int, str]) -> None:
    found = resolved("--profile", profile)
    assert (found.hidden_size, found.top_k, found.num_experts, found.quant) == shape
    assert resolved("--profile", profile, "--quant", "bf16").quant == "bf16"


def test_ranks_follow_the_launcher() -> None:
    assert resolved(world_size=3).ep_size == 3
    with pytest.raises(ValueError, match="--ep_size must be what the launcher started, 3, got 2"):
        resolved("--ep_size", "2", world_size=3)


def test_peers_are_kept_in_order_once() -> None:
    assert resolved("--peers", "deepep, nccl,deepep").peers == ("deepep", "nccl")


def test_a_routing_file_gives_top_k_and_experts(tmp_path: Path) -> None:
    path = str(tmp_path / "routing.npz")
    np.savez(path, law=np.arange(2 * 8 * 6, dtype=np.uint8).reshape(2, 8, 6) % 64)
    found = resolved("--routing_file", path)
    assert (found.top_k, found.num_experts, found.router) == (6, 64, "file")
    assert resolved("--routing_file", path, "--num_experts", "80").num_experts == 80
    with pytest.raises(ValueError, match="--top_k must be that of --routing_file, 6, got 8"):
        resolved("--routing_file", path, "--top_k", "8")
    with pytest.raises(ValueError, match="--num_experts must be at least 64 for --routing_file, got 63"):
        resolved("--routing_file", path, "--num_experts", "63")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--ep_size 0", "--ep_size must be 1 to 128, got 0"),
        ("--ep_size 129", "--ep_size must be 1 to 128, got 129"),
        ("--batches 8,4", "--batches must be ascending numbers of tokens, comma-separated, got '8,4'"),
        ("--batches 1,1", "--batches must be ascending numbers of tokens, comma-separated, got '1,1'"),
        ("--batches 1,x", "--batches must be ascending numbers of tokens, comma-separated, got '1,x'"),
        ("--batches 1 -f 8", "--batches 1 and -f 8 exclude each other"),
        ("--batches 1 -b 0", "--batches 1 and -b 0 exclude each other"),
        ("--ep_size x", "--ep_size: invalid int value: 'x'"),
        ("--backend nvls", "--backend: invalid choice: 'nvls'"),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
        ("--profile gpt2", "--profile: invalid choice: 'gpt2'"),
        ("--hidden_size 0", "--hidden_size must be 1 to 1048576, got 0"),
        ("--top_k 33", "--top_k must be 1 to 32, got 33"),
        ("--num_experts 7", "--num_experts must be at least --top_k 8, got 7"),
        ("--quant int4", "--quant: invalid choice: 'int4'"),
        ("--payload_dtype float16", "--payload_dtype float16 is for unquantised rows (--quant bf16), got --quant fp8"),
        ("--payload_dtype int8", "--payload_dtype: invalid choice: 'int8'"),
        ("--quant nvfp4 --hidden_size 100", "--hidden_size must be a multiple of 16 for --quant nvfp4, got 100"),
        (
            "--combine_dtype fp8_block --hidden_size 100",
            "--hidden_size must be a multiple of 16 for --combine_dtype fp8_block, got 100",
        ),
        ("--combine_dtype int8", "--combine_dtype: invalid choice: 'int8'"),
        ("-b -1", "-b must be 0 or more, got -1"),
        ("-b 4 -e 2", "-e must be at least the first batch size 4 (-b), got 2"),
        ("-i 0", "-i must be 1 or more, got 0"),
        ("-f 1", "-f must be 2 or more, got 1"),
        ("-i 1 -f 2", "-i (step, 1) and -f (factor, 2) exclude each other"),
        ("-e 99999999999", "max_tokens_per_rank"),
        ("--max_tokens_per_rank 4", "--max_tokens_per_rank must be at least the largest batch 64 (-e), got 4"),
        ("--iters 0", "--iters must be 1 or more, got 0"),
        ("--warmup -1", "--warmup must be 0 or more, got -1"),
        ("--seed -1", "--seed must be 0 or more, got -1"),
        ("--seed 4294967296", "--seed must be at most 4294967295, got 4294967296"),
        ("--num_sms 4", "--num_sms 4 needs --device cuda, this run is on the CPU"),
        ("--peers nccl,mpi", "--peers must be a comma-separated list of nccl, flashinfer or deepep, got 'mpi'"),
        ("--perfect_router --routing_file x.npz", "--perfect_router and --routing_file x.npz exclude each other"),
        ("--routing_file /none/x.npz", "--routing_file /none/x.npz: No such file or directory"),
        ("--perfect_router --num_experts 9 --ep_size 8", "--num_experts 9 leaves some of --ep_size 8 without"),
        ("--output_file /none/x.json", "--output_file /none/x.json: its directory does not exist"),
        ("--plot x.txt", "--plot must end in .png or .svg or .pdf, got x.txt"),
        ("--network ib", "--network: invalid choice: 'ib'"),
        ("--network tcp", "--network tcp needs --domain_size, since all ranks are on this host"),
        ("--domain_size 0", "--domain_size must be 1 to 3, below --ep_size 4, got 0"),
        ("--domain_size 4", "--domain_size must be 1 to 3, below --ep_size 4, got 4"),
        ("--iter 5", "unrecognized arguments: --iter 5"),
    ],
)
def test_wrong_flags_are_named(flags: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    code: object
    try:
        code = cli.main([*CPU, *flags.split()])
    except SystemExit as exit_:  # argparse's own complaints
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2
    assert complaint in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("command", ["roofline", "demo"])
def test_other_commands_check_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--device", "cpu", "--ep_size", "500"]) == 2
    assert f"putget {command}: error: --ep_size must be 1 to 128, got 500" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "device", "num_gpus", "words"),
    [
        ("auto", "cpu", 1, "1 GPU"),
        ("auto", "cpu", 2, "2 GPUs"),
        ("auto", "cpu", 0, None),
        ("cpu", "cpu", 2, None),
        ("auto", "cuda", 4, None),
    ],
)
def test_a_run_on_the_cpu_beside_gpus_says_so(
    monkeypatch: pytest.MonkeyPatch, asked: str, device: str, num_gpus: int, words: str | None
) -> None:
    monkeypatch.setattr(settings.hardware, "gpus", lambda: [None] * num_gpus)
    expected = (
        f"These figures will be the CPU's: --ep_size 4 is more than the {words} here. --device cuda --ep_size "
        f"{num_gpus} runs there; --device cuda alone emulates the ranks on {words}."
    )
    assert settings.why_cpu(asked, device, 4) == (words and expected)


@pytest.mark.parametrize(
    ("device", "ep_size", "num_gpus", "words"),
    [
        ("cuda", 4, 1, "4 ranks take turns on 1 GPU"),
        ("cuda", 4, 2, "4 ranks take turns on 2 GPUs"),
        ("cuda", 2, 2, None),
        ("cpu", 4, 1, None),
    ],
)
def test_ranks_that_share_a_gpu_are_said(
    monkeypatch: pytest.MonkeyPatch, device: str, ep_size: int, num_gpus: int, words: str | None
) -> None:
    monkeypatch.setattr(settings.hardware, "gpus", lambda: [SimpleNamespace(num_sms=132)] * num_gpus)
    said = settings.share_gpus(device, ep_size)
    assert said is None if words is None else said is not None and said.startswith(words)
    flags = f"bench --device {device} --ep_size {ep_size} --hidden_size 256"
    resolved = settings.resolve(build_parser().parse_args(flags.split()), None)
    assert (resolved.device, resolved.ep_size) == (device, ep_size)
    assert resolved.iters == (100 if said is None and device == "cuda" else 20)


def test_peers_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.hardware, "gpus", lambda: [SimpleNamespace(num_sms=132)])
    flags = build_parser().parse_args(["bench", "--device", "cuda", "--ep_size", "4", "--peers", "nccl"])
    with pytest.raises(ValueError, match="--peers nccl needs a GPU for each rank, got --ep_size 4"):
        settings.resolve(flags, None)


@pytest.mark.parametrize(
    ("num_gpus", "expected"), [(0, ("cpu", 8)), (1, ("cuda", 4)), (2, ("cuda", 2)), (8, ("cuda", 8))]
)
def test_the_demo_uses_the_gpus_that_it_finds(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, expected: tuple[str, int]
) -> None:
    monkeypatch.setattr(settings.hardware, "gpus", lambda: [SimpleNamespace(num_sms=132)] * num_gpus)
    monkeypatch.setattr(settings.hardware, "why_no_cuda", lambda: None)
    resolved = demo._settings(build_parser().parse_args(["demo"]))
    assert (resolved.device, resolved.ep_size) == expected
