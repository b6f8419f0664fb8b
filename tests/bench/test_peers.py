"""Peers that are there, that are not, that break, and that deliver something wrong; stand-ins take their place."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from putget import hardware
from putget_bench import cli, launch, peers, settings
from putget_bench.parser import build_parser
from putget_bench.settings import Settings, resolve
from tests.bench import rank_work

STAND_INS = Path(__file__).parent / "stand_ins"
SHAPE = ("--ep_size", "2", "--hidden_size", "256", "--top_k", "4", "--num_experts", "16", "-e", "4", "-f", "4")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks get this process's path too."""
    monkeypatch.syspath_prepend(str(STAND_INS))


def bench(*flags: str, work: Any = rank_work.with_stand_ins, **broken: str) -> tuple[int, list[dict[str, Any]]]:
    """Runs the bench with stand-ins, which the ranks may use on the CPU."""
    found = settings_of(*flags)
    events: list[dict[str, Any]] = []
    code = launch.run(work, rank_work.WithStandIns(found, broken), found.ep_size, "cpu", events.append)
    return code, events


def settings_of(*flags: str) -> Settings:
    common = ["bench", "--device", "cpu", "--iters", "2", "--warmup", "1", *SHAPE]
    return resolve(build_parser().parse_args([*common, *flags]), None)


def names(events: list[dict[str, Any]]) -> list[list[str]]:
    return [[c["name"] for c in event["size"]["contenders"]] for event in events if event["kind"] == "size"]


def statuses(events: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [event["peers"] for event in events if event["kind"] == "peers"][-1]


def test_every_peer_of_the_command_line_is_registered() -> None:
    assert tuple(peers.REGISTRY) == settings.PEERS


@pytest.mark.parametrize(("name", "package"), [("flashinfer", "flashinfer"), ("deepep", "deep_ep")])
def test_a_peer_that_is_not_installed_is_absent(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for device in ("cpu", "cuda"):
        found = peers.find(name, device)
        assert (found.status, found.detail) == ("absent", f"the Python package {package} is not installed")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["flashinfer", "deepep"])
def test_a_peer_for_gpus_is_not_supported_on_cpus(name: str) -> None:
    assert peers.find(name, "cuda").status == "measured"
    found = peers.find(name, "cpu")
    assert (found.status, found.detail) == ("not supported", "it runs on cuda, this run is on cpu")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    "flags",
    [
        ("--quant", "bf16"),
        ("--quant", "fp8", "--perfect_router"),
        ("--quant", "nvfp4"),
        ("--top_k", "1", "--seed", "3"),  # some ranks get nothing
        ("--quant", "bf16", "--payload_dtype", "float32", "--combine_dtype", "float16"),
    ],
)
def test_flashinfer_is_checked_and_timed_in_turns(flags: tuple[str, ...]) -> None:
    code, events = bench("--peers", "nccl,flashinfer", *flags)
    assert code == 0, events
    assert names(events) == [["putget", "gloo AG+RS", "gloo all-to-all", "flashinfer"]] * 2
    assert statuses(events)[1] == {
        "name": "flashinfer",
        "status": "measured",
        "detail": "FlashInfer 0.7.2, MoeAlltoAll",
    }
    size = next(event["size"] for event in events if event["kind"] == "size")
    ours, theirs = size["contenders"][0], size["contenders"][-1]
    for phase in ("dispatch", "combine", "pair"):
        moved = [contender[phase]["wire_gbps"] * contender[phase]["latency_us"] for contender in (ours, theirs)]
        assert moved[0] == pytest.approx(moved[1])


@pytest.mark.usefixtures("stand_ins")
def test_flashinfer_combines_in_fp8_where_that_is_asked_for() -> None:
    found = replace(settings_of("--peers", "flashinfer"), combine_dtype="fp8_block")
    assert found.output().dtype == torch.bfloat16
    events: list[dict[str, Any]] = []
    code = launch.run(rank_work.with_stand_ins, rank_work.WithStandIns(found, {}), 2, "cpu", events.append)
    assert code == 0, events
    assert names(events) == [["putget", "flashinfer", "flashinfer fp8"]] * 2
    size = next(event["size"] for event in events if event["kind"] == "size")
    bf16, fp8 = ({k: c["combine"][k] for k in ("wire_gbps", "latency_us")} for c in size["contenders"][1:])
    assert fp8["wire_gbps"] * fp8["latency_us"] == pytest.approx(bf16["wire_gbps"] * bf16["latency_us"] / 2)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("quant", ["bf16", "fp8"])
def test_both_modes_of_deepep_are_checked_and_timed(quant: str) -> None:
    code, events = bench("--peers", "deepep", "--quant", quant)
    assert code == 0, events
    assert names(events) == [["putget", "deepep LL", "deepep normal"]] * 2
    assert statuses(events) == [{"name": "deepep", "status": "measured", "detail": "DeepEP 1.2.1"}]
    size = [event["size"] for event in events if event["kind"] == "size"][-1]
    ours, low_latency, normal = (
        {phase: c[phase]["wire_gbps"] * c[phase]["latency_us"] * 1e3 for phase in ("dispatch", "combine")}
        for c in size["contenders"]
    )
    assert normal == pytest.approx(ours)
    assert low_latency["combine"] == pytest.approx(size["bytes"]["combine_per_pair"])
    values = 256 + 2 * 4 if quant == "fp8" else 2 * 256
    pairs = size["bytes"]["combine_per_pair"] / 512
    assert low_latency["dispatch"] == pytest.approx(pairs * (values + 16))


@pytest.mark.usefixtures("stand_ins")
def test_low_latency_mode_is_for_small_batches() -> None:
    code, events = bench("--peers", "deepep", deepep="small memory")
    assert code == 0
    assert names(events) == [["putget", "deepep LL", "deepep normal"], ["putget", "deepep normal"]]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("flags", "detail"),
    [
        ("--quant nvfp4", "it carries BF16 and FP8 rows, got --quant nvfp4"),
        ("--quant bf16 --payload_dtype float32", "it carries BF16 and FP8 rows, got --payload_dtype float32"),
        ("--combine_dtype float16", "it combines BF16 rows, got --combine_dtype float16"),
        ("--hidden_size 192", "it needs rows of a multiple of 128 values, got 192"),
        ("--num_experts 15", "it needs a number of experts that the ranks divide evenly, got 15 for 2"),
    ],
)
def test_deepep_says_what_it_does_not_carry(flags: str, detail: str) -> None:
    code, events = bench("--peers", "deepep", *flags.split())
    assert code == 0
    assert statuses(events) == [{"name": "deepep", "status": "not supported", "detail": detail}]
    assert names(events) == [["putget"]] * 2


@pytest.mark.usefixtures("stand_ins")
def test_deepep_without_its_native_library_is_absent() -> None:
    code, events = bench("--peers", "deepep", deepep="no library")
    assert code == 0
    detail = "it cannot be imported: libnvshmem_host.so.3: cannot open shared object file"
    assert statuses(events) == [{"name": "deepep", "status": "absent", "detail": detail}]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"flashinfer": "dispatch"}, "rank 0: flashinfer: dispatch: rows of rank 1 differ from the reference"),
        ({"flashinfer": "combine"}, "rank 0: flashinfer: relative error"),
        ({"deepep": "low latency"}, "rank 0: deepep LL: relative error"),
        ({"deepep": "normal"}, "rank 0: deepep normal: relative error"),
    ],
)
def test_a_wrong_result_of_a_peer_ends_the_run(broken: dict[str, str], complaint: str) -> None:
    code, events = bench("--peers", next(iter(broken)), **broken)
    assert code == 1
    (mismatch,) = (event["text"] for event in events if event["kind"] == "mismatch")
    assert complaint in mismatch
    assert names(events) == []


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("flags", "broken", "status", "detail"),
    [
        # Found when the ranks make it: rank 1 alone fails, and nobody waits for it.
        (("--peers", "flashinfer"), {"flashinfer": "import"}, "absent", "it cannot be imported: no driver on rank 1"),
        (
            ("--peers", "flashinfer", "--top_k", "3"),
            {},
            "not supported",
            "flashinfer at 1 tokens a rank: Unsupported top_k: 3",
        ),
        (
            ("--peers", "flashinfer", "--num_experts", "15"),
            {},
            "not supported",
            "it needs a number of experts that the ranks divide evenly, got 15 for 2",
        ),
    ],
)
def test_a_peer_that_cannot_be_made_is_left_out(
    flags: tuple[str, ...], broken: dict[str, str], status: str, detail: str
) -> None:
    code, events = bench(*flags, **broken)
    assert code == 0
    assert statuses(events) == [{"name": "flashinfer", "status": status, "detail": detail}]
    assert names(events) == [["putget"]] * 2


@pytest.mark.usefixtures("stand_ins")
def test_a_peer_that_fails_at_a_size_drops_out_there() -> None:
    code, events = bench("--peers", "nccl,flashinfer", flashinfer="large batches")
    assert code == 0
    assert names(events) == [
        ["putget", "gloo AG+RS", "gloo all-to-all", "flashinfer"],
        ["putget", "gloo AG+RS", "gloo all-to-all"],
    ]
    assert statuses(events)[1] == {
        "name": "flashinfer",
        "status": "not supported",
        "detail": "flashinfer at 4 tokens a rank: too many tokens",
    }


@pytest.mark.usefixtures("stand_ins")
def test_one_mode_that_fails_leaves_the_other() -> None:
    code, events = bench("--peers", "deepep", deepep="no room")
    assert code == 0
    assert names(events) == [["putget", "deepep normal"]] * 2
    detail = "DeepEP 1.2.1; left out: deepep LL at 1 tokens a rank: no room"
    assert statuses(events) == [{"name": "deepep", "status": "measured", "detail": detail}]


@pytest.mark.gpu
def test_flashinfer_on_gpus(tmp_path: Path) -> None:
    num_gpus = len(hardware.gpus())
    if num_gpus < 2 or hardware.why_no_cuda() is not None:
        pytest.skip("needs two CUDA GPUs")
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs the package flashinfer")
    path = tmp_path / "out.json"
    flags = f"bench --device cuda --ep_size {num_gpus} -b 1 -e 64 -f 8 --iters 10 --warmup 2 --peers flashinfer"
    assert cli.main([*flags.split(), "--output_file", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["peers"][0]["status"] == "measured", document["peers"]
    for size in document["results"]:
        assert [contender["name"] for contender in size["contenders"]] == ["putget", "flashinfer"]
