"""The report of an update, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer.weights import Report
from putget_transfer.weights.__main__ import main
from tests.transfer.weights_cluster import DEADLINE_S, Cluster


def test_a_report_becomes_a_picture(tmp_path: Path) -> None:
    cluster = Cluster(replicas=2)
    try:
        cluster.source.set(1)
        update = cluster.controller.update(1, DEADLINE_S)
    finally:
        cluster.close()
    path = tmp_path / "update.json"
    path.write_text(update.to_json())
    report = json.loads(path.read_text())["trainers"]["0"]
    assert {stage for stage, _, _ in report["spans"]} == {"prepare", "write", "wait"}
    assert all(0 <= begin <= end <= report["seconds"] for _, begin, end in report["spans"])
    assert sum(report["received"].values()) == report["num_bytes"]
    assert list(report["received"]) == ["0", "1", "2", "3"]
    assert main(["plot", str(path), str(tmp_path / "update.svg")]) == 0
    drawn = (tmp_path / "update.svg").read_text()
    assert drawn.count("<path") > 10
    path.write_text(update.trainers[0].to_json())
    assert main(["plot", str(path), str(tmp_path / "update.png")]) == 0
    assert (tmp_path / "update.png").stat().st_size > 1000


def test_spans_are_joined() -> None:
    report = Report(1, 0)
    for at in range(20_000):
        report.ran("prepare", report.begun + at, report.begun + at + 0.9)
    assert report.prepare_s == pytest.approx(18_000)
    assert len(report.spans) < 100
    assert report.spans[-1][2] == pytest.approx(19_999.9)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"trainers": {"0": {}}}', '{"trainers": {}}'])
def test_other_files_are_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "update.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(["plot", str(path), str(tmp_path / "update.png")])
    assert "report" in capsys.readouterr().err


def test_files_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "update.json"
    for words, told in (
        ([str(report), str(tmp_path / "update.png")], f"{report}: it cannot be read: No such file"),
        ([str(report), str(tmp_path / "no" / "update.png")], "update.png came; its folder does not exist"),
    ):
        with pytest.raises(SystemExit):
            main(["plot", *words])
        assert told in capsys.readouterr().err
