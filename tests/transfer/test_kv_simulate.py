"""The model of times to the first token: the published figures, the limits that it cannot leave, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer.kv import _simulate_command, _table
from putget_transfer.kv.__main__ import main
from putget_transfer.kv._simulate import MODELS, NICS, PUBLISHED, Nic, Setting, fit, simulate

WITHIN = {"efa": 0.03, "connectx7": 0.16}
SETTING = Setting(operations_per_s=3.2e15, chunk_tokens=2048, latency_s=1e-4, prefill_tp=1, decode_tp=1)


@pytest.mark.parametrize("name", list(NICS))
def test_two_parameters_predict_the_published_sizes_between(name: str) -> None:
    nic = fit(name, {kib: PUBLISHED[name][kib] for kib in (1, 64)})
    for kib in (8, 16):
        assert nic.gigabits_per_s(kib << 10) == pytest.approx(PUBLISHED[name][kib][0], rel=WITHIN[name])


def test_layers_that_leave_early_never_take_longer() -> None:
    for model, prefill in MODELS.items():
        slow = Nic("slow", 1e5, 1e9)
        for nic in (*NICS.values(), slow):
            row = simulate(model, nic, 5000, SETTING)
            assert row.transfer_s == pytest.approx(nic.seconds(row.num_writes, row.num_bytes))
            assert row.after_s == pytest.approx(row.prefill_s + row.transfer_s + SETTING.latency_s)
            # Nothing arrives before it is computed, and all of it takes the NIC's time.
            assert row.layerwise_s > max(row.prefill_s, row.transfer_s) + SETTING.latency_s
            assert row.layerwise_s < row.after_s
        # The network needs longer than the prefill: bytes are sent from the first layer on.
        first = row.prefill_s / prefill.model.layers
        assert row.layerwise_s < row.transfer_s + first + SETTING.latency_s
        assert row.num_bytes == 5000 * prefill.model.layers * prefill.model.kv_heads * prefill.model.head_bytes * (
            1 if prefill.model.kv_heads == 1 else 2
        )


def test_ranks_share_the_writes() -> None:
    setting = Setting(operations_per_s=3.2e15, chunk_tokens=2048, latency_s=0.0, prefill_tp=8, decode_tp=1)
    one, eight = (simulate("llama-70b", NICS["efa"], 4096, at) for at in (SETTING, setting))
    assert eight.num_bytes == one.num_bytes
    # Pages of 8 KiB instead of 64: the NIC's writes are the limit, and there are eight NICs.
    assert eight.num_writes == 8 * one.num_writes
    assert eight.transfer_s == pytest.approx(one.num_writes / NICS["efa"].writes_per_s)


def test_the_command_shows_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    options = ["simulate", "--models", "deepseek-v3", "--nics", "efa", "--tokens", "4096", "1024"]
    assert main([*options, "--output_file", str(report)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[:5] for line in shown.splitlines() if line.startswith("deepseek")] == [
        ["deepseek-v3", "efa", "1024", "976", "72"],
        ["deepseek-v3", "efa", "4096", "3904", "288"],
    ]
    document = json.loads(report.read_text())
    assert [row["tokens"] for row in document["results"]] == [1024, 4096]
    assert all(abs(row["error"]) < WITHIN[row["nic"]] for row in document["check"])
    for wrong in (["--chunk_tokens", "0"], ["--tokens", "0"], ["--latency_us", "-1"]):
        with pytest.raises(SystemExit):
            main([*options, *wrong])
        assert wrong[0][2:] in capsys.readouterr().err


def test_the_plot_has_both_models(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [simulate(model, NICS["efa"], tokens, SETTING) for model in MODELS for tokens in (1024, 2048)]
    _simulate_command.draw(rows, tmp_path / "times.svg")
    drawn = (tmp_path / "times.svg").read_text()
    assert all(f"<!-- {model} -->" in drawn for model in MODELS)


@pytest.mark.parametrize("option", ["--output_file", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_first(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, reason in ((tmp_path / "no" / "x.png", "its folder does not exist"), (tmp_path, "it is a folder")):
        with pytest.raises(SystemExit):
            main(["simulate", option, str(path)])
        told = capsys.readouterr()
        assert f"{option[2:]}: {path} came; {reason}" in told.err
        assert not told.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "--tokens", "0"], "tokens: 0 came; at least 1"),
        (["plan", "--decode_tp", "0"], "decode_tp: 0 came; at least 1"),
        (["plan", "--target", "3"], "target: 3 came; decode ranks are 0 to 0"),
        (["plan", "--target", "-1"], "target: -1 came"),
        (["simulate", "--tokens", "8", "0"], "tokens: 0 came; each prompt has at least 1"),
        (["simulate", "--latency_us", "-1"], "latency_us: -1 came; at least 0"),
        (["bench", "--output_file", "no/such/folder.json"], "its folder does not exist"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert told in capsys.readouterr().err


def test_a_table_stands_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    _table.show("title", ("a", "number"), [("first", "1"), ("b", "1000000")])
    assert capsys.readouterr().out == "title\n    a   number\nfirst        1\n    b  1000000\n\n"
