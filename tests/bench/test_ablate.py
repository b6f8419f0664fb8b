"""Variants of putget: what there is, what they move, and how one is added."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from putget import hardware
from putget_bench import cli, launch, report, variants
from putget_bench.parser import build_parser
from putget_bench.settings import Settings, resolve
from tests.bench import rank_work

SHAPE = "--ep_size 2 --hidden_size 256 --top_k 4 --num_experts 16 --iters 2 --warmup 1"


def ablate_settings(*flags: str) -> Settings:
    parsed = build_parser().parse_args(["ablate", "--device", "cpu", *SHAPE.split(), *flags])
    return resolve(parsed, None)


def test_one_run_compares_all_variants(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    flags = f"ablate --device cpu -b 0 -e 4 -f 4 {SHAPE} --iter_stats --output_file {path}"
    assert cli.main(flags.split()) == 0
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(report.schema()).validate(document)
    assert document["config"]["ablate"] == list(variants.GROUPS)
    whole = ["putget", "bf16 rows", "nvfp4 rows", "staged combine", "got rows"]
    whole += ["fp8_block back"]
    whole += ["halves", "expert load", "statistics"]
    names = [[contender["name"] for contender in size["contenders"]] for size in document["results"]]
    assert names == [whole, [*whole, "ids by putget", "ids by gloo"], [*whole, "ids by putget", "ids by gloo"]]

    last = document["results"][-1]
    found = {contender["name"]: contender for contender in last["contenders"]}
    assert [found[name]["group"] for name in ("putget", "bf16 rows", "staged combine", "ids by gloo")] == [
        None,
        "rows",
        "combine_input",
        "exchange",
    ]
    rows = last["bytes"]["combine"] / (2 * 256)  # that leave a rank, mean over ranks
    for name, row_bytes in {
        "putget": 256 + 2 * 4 + 4 * 8,
        "bf16 rows": 2 * 256 + 4 * 8,
        "nvfp4 rows": 128 + 16 + 4 * 8,
        "staged combine": 256 + 2 * 4 + 4 * 8,
        "ids by putget": 16 + 4 * 8,
    }.items():
        assert found[name]["dispatch"]["wire_bytes"] == pytest.approx(rows * row_bytes), name
    for name, row_bytes in {
        "putget": 512,
        "got rows": 512,
        "fp8_block back": 256 + 2 * 4 + 8,
    }.items():
        assert found[name]["combine"]["wire_bytes"] == pytest.approx(rows * row_bytes), name
    assert found["ids by gloo"]["dispatch"]["wire_bytes"] == 4 * 4 * 4  # tokens, ids of each, bytes of one, one peer
    assert found["ids by gloo"]["combine"] is found["ids by gloo"]["pair"] is None

    printed = capsys.readouterr().out
    factor = 1 / found["staged combine"]["combine"]["ratio"]
    assert re.search(rf"^ +4 +staged combine .* +[\d.]+ +{factor:.2f} +[\d.]+ +[\d.]+ +[\d.]+% *$", printed, re.M)
    assert re.search(r"^ +4 +bf16 rows +[\d.]+ KiB +1\.84 .* 1\.00 *$", printed, re.M)
    assert "ids by gloo: all-gather of all ids" in printed
    assert "per (token, k)" not in printed


def test_only_picks_groups() -> None:
    assert ablate_settings("--only", "exchange, rows").ablate == ("exchange", "rows")
    with pytest.raises(ValueError, match=r"--only must be a comma-separated list of rows, .* or floor, got 'pull'"):
        ablate_settings("--only", "pull")


def test_rows_leave_out_the_default_and_what_does_not_fit() -> None:
    def names(*flags: str) -> list[str]:
        return [variant.name for variant in variants.GROUPS["rows"](ablate_settings(*flags))]

    assert names() == ["bf16 rows", "nvfp4 rows"]
    assert names("--quant", "bf16") == ["fp8 rows", "nvfp4 rows"]
    assert names("--hidden_size", "100") == ["bf16 rows"]


def test_sms_up_to_all_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ablate_settings()
    assert list(variants.GROUPS["num_sms"](settings)) == []
    monkeypatch.setattr(hardware, "gpus", lambda: (SimpleNamespace(num_sms=132),))
    on_gpu: Any = SimpleNamespace(device="cuda")
    found = list(variants.GROUPS["num_sms"](on_gpu))
    assert [variant.name for variant in found] == ["4 SMs", "8 SMs", "16 SMs", "32 SMs", "64 SMs", "132 SMs"]
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(variants, "Putget", lambda *_, **options: asked.append(options))
    for variant in found:
        variant.build(())  # type: ignore[arg-type]
    assert asked == [{"num_sms": count} for count in (4, 8, 16, 32, 64, 132)]


def run(work: launch.Work, settings: Settings) -> tuple[int, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return launch.run(work, settings, settings.ep_size, "cpu", events.append), events


def test_a_variant_is_added_in_a_few_lines() -> None:
    code, events = run(rank_work.with_another_group, ablate_settings("-b", "2", "-e", "2"))
    assert code == 0, events
    (size,) = (event["size"] for event in events if event["kind"] == "size")
    assert [(c["name"], c["group"], c["changes"]) for c in size["contenders"]] == [
        ("putget", None, None),
        ("patient", "deadline", "waits for an hour"),
    ]


@pytest.mark.parametrize("broken", ["staged combine", "expert load", "statistics", "ids by putget", "ids by gloo"])
def test_a_wrong_variant_ends_the_run(broken: str) -> None:
    work = {
        "staged combine": rank_work.corrupt_staged,
        "expert load": rank_work.corrupt_load,
        "statistics": rank_work.corrupt_statistics,
        "ids by putget": rank_work.corrupt_ids,
        "ids by gloo": rank_work.corrupt_gather,
    }[broken]
    code, events = run(work, ablate_settings("-b", "2", "-e", "2", "--only", "combine_input,balancer,exchange"))
    assert code == 1
    (mismatch,) = (event["text"] for event in events if event["kind"] == "mismatch")
    assert f"2 tokens a rank: rank 0: {broken}: " in mismatch


def test_choices_of_no_expert_are_not_counted(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(16), (64, 1)), axis=1)[None, :, :4]
    ids[:, ::3, 2] = -1
    np.savez(tmp_path / "ids.npz", ids=ids.astype(np.int32))
    flags = f"ablate --device cpu -b 8 -e 8 {SHAPE} --only balancer --routing_file {tmp_path / 'ids.npz'}"
    assert cli.main(flags.split()) == 0


@pytest.mark.gpu
def test_ablations_on_gpus(tmp_path: Path) -> None:
    num_gpus = len(hardware.gpus())
    if num_gpus == 0 or hardware.why_no_cuda() is not None:
        pytest.skip("needs a CUDA GPU")
    path = tmp_path / "out.json"
    flags = f"ablate --device cuda --ep_size {num_gpus} -b 1 -e 64 -f 64 --iters 10 --warmup 2 --output_file {path}"
    assert cli.main(flags.split()) == 0
    for size in json.loads(path.read_text())["results"]:
        names = {contender["name"] for contender in size["contenders"]}
        assert {
            "staged combine",
            "expert load",
            "statistics",
            "16 SMs",
            "ids by nccl",
            "bytes and flags",
            "bytes, longer pieces",
            "bytes, counted slots",
            "bytes, sent back",
        } <= names


def test_got_rows_are_no_variant_of_quantised_ones() -> None:
    assert [variant.name for variant in variants.GROUPS["got"](ablate_settings())] == ["got rows"]
    assert list(variants.GROUPS["got"](ablate_settings("--combine_dtype", "fp8_block"))) == []
