"""The bench of requests between two processes: a small one has all figures, and a page that differs ends it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer.kv import _bench
from putget_transfer.kv.__main__ import main
from putget_transfer.kv._models import Model


def test_a_small_bench_has_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    options = ["--networks", "host", "--models", "deepseek-v3", "--tokens", "128", "--rounds", "1", "--samples", "2"]
    assert main(["bench", *options, "--output_file", str(path)]) == 0
    found = json.loads(path.read_text())
    [row] = found["transfers"]
    assert (row["num_bytes"], row["pages"], row["page_bytes"]) == (61 * 2 * 73728, 122, 73728)
    assert all(0 < seconds < math.inf for seconds in row["seconds"].values())
    assert row["of_paged"] == pytest.approx(row["seconds"]["paged"] / row["seconds"]["request"])
    [steps] = found["begin_steps"]
    assert steps["asked"]["p50_us"] > 0 < steps["alone"]["p50_us"]
    assert found["first_writes"][0]["ready"]["count"] <= 2
    assert "From all pages ready" in capsys.readouterr().out


def test_a_page_that_differs_is_found() -> None:
    shape = _bench.Shape(Model(layers=2, kv_heads=1, head_bytes=64), 4, 16)
    with _bench.Pair("host", shape) as pair:
        pair.request([0, 1, 2, 3], [3, 2, 1, 0])
        pair.check([0, 1, 2, 3], [3, 2, 1, 0])
        with pytest.raises(RuntimeError, match="page 0 is not what came as 3"):
            pair.check([0, 1, 2, 3], [3, 2, 1, 0])


def test_a_percentile_is_one_of_the_values() -> None:
    assert _bench.percentile([5, 1, 3], 0.5) == 3
    assert _bench.percentile(list(range(100)), 0.99) == 99
    assert math.isnan(_bench.percentile([], 0.5))
