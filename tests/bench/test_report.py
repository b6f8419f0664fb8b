"""The report: its schema, its tables and its picture."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import matplotlib.image
import pytest
from rich.console import Console

from putget_bench import plot, report
from tests.bench.documents import contender, gpu_document

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "reference" / "bench_json.md"


def validate(document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(report.schema()).validate(document)


def printed(document: dict[str, Any], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.show(document, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_schema_is_a_schema_and_takes_a_report() -> None:
    jsonschema.Draft202012Validator.check_schema(report.schema())
    validate(gpu_document())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "putget.bench/1"),
        (("date",), "yesterday"),
        (("config", "device"), "tpu"),
        (("config", "extra"), 1),
        (("timing", "flush"), "cold"),
        (("ceiling", "write_gbps"), 0),
        (("results", 1, "checked"), "yes"),
        (("results", 1, "contenders"), []),
        (("results", 1, "contenders", 0, "pair", "latency_us"), 0),
        (("results", 1, "contenders", 0, "pair", "percentiles_us"), {"p50": 1.0}),
        (("results", 1, "bytes", "dispatch"), "many"),
        (("peers", 0, "status"), "maybe"),
    ],
)
def test_schema_refuses_what_is_not_a_report(path: tuple[str | int, ...], value: object) -> None:
    document: Any = gpu_document()
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def test_schema_asks_for_every_field() -> None:
    for name in gpu_document():
        document = gpu_document()
        del document[name]
        if name == "workspace":
            validate(document)
            continue
        with pytest.raises(jsonschema.ValidationError):
            validate(document)


def test_every_field_of_the_schema_is_documented() -> None:
    text = DOCUMENTATION.read_text(encoding="utf-8")

    def names(schema: dict[str, Any]) -> set[str]:
        found = set(schema.get("properties", ()))
        nested = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values(), *schema.get("oneOf", ())]
        if isinstance(schema.get("items"), dict):
            nested.append(schema["items"])
        return found.union(*(names(part) for part in nested))

    undocumented = {name for name in names(report.schema()) if f"`{name}`" not in text}
    assert not undocumented
    assert report.SCHEMA in text


def test_written_reports_are_rounded_and_valid(tmp_path: Path) -> None:
    document = gpu_document()
    document["timing"]["empty_us"] = 3.123456789
    report.write(document, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    validate(read)
    assert read["timing"]["empty_us"] == 3.12346


def test_tables_have_the_figures() -> None:
    text = printed(gpu_document())
    assert "8 ranks on cuda (8 x NVIDIA H200)" in text
    assert re.search(r"^ +1 +7\.5 +53\.3/46\.7 +13% +8\.2 ", text, re.MULTILINE)  # latency, rates, share of the ceiling
    assert re.search(r"^ +1 +nccl AG\+RS +15\.0 +0\.50 .* +5\.5% *$", text, re.MULTILINE)  # a peer, ratio, ceiling
    assert re.search(r"^ +64 +192 KiB +384 KiB +50% +768 KiB +75%", text, re.MULTILINE)  # bytes and what was saved
    assert re.search(r"^ +1 +putget dispatch +8\.5 +9\.5 +12\.5 ", text, re.MULTILINE)  # percentiles
    for name, mean in (("putget", r"5\.5"), (r"nccl AG\+RS", r"11\.0")):
        table = re.split(rf"^Kernels of a round of {name} on rank 0.*$", text, flags=re.MULTILINE)[1]
        assert re.search(rf"^ +1 +kernel of {name} <template>.*\.\.\. +20 +{mean}", table, re.MULTILINE)
    notes = " ".join(text.split())
    assert "343 GB/s written, 325 GB/s read" in notes
    assert "reads 3.0 us" in notes
    assert "1 MiB token-major (putget), 32 MiB expert-major" in notes
    assert "Peer deepep: absent (the Python package deep_ep is not installed)" in notes


def ablation_document() -> dict[str, Any]:
    document = gpu_document()
    document["config"]["ablate"] = ["combine_input", "exchange"]
    for size in document["results"]:
        staged, ids = contender("staged combine", 1.25), contender("ids by putget", 0.5)
        staged |= {"group": "combine_input", "changes": "combine(x) takes rows from outside"}
        ids |= {"group": "exchange", "changes": "counts and ids", "combine": None, "pair": None}
        ids["dispatch"]["wire_bytes"] = 35_000
        size["contenders"] = [contender("putget", 1), staged, ids]
    return document


def test_ablations_show_ratios_to_the_default_and_the_bytes_that_differ() -> None:
    document = ablation_document()
    validate(document)
    text = printed(document)
    assert re.search(r"^ +1 +staged combine +9\.4 +1\.25 +10\.3 +1\.25 +11\.4 +1\.25 +8\.8%", text, re.MULTILINE)
    assert re.search(r"^ +1 +ids by putget +3\.8 +0\.50 +- +- +- +- +27%", text, re.MULTILINE)
    moved = text.split("Bytes leaving a rank")[1].split("Slowest rank")[0]
    assert re.search(r"^ +1 +ids by putget +34\.2 KiB +0\.10 +- +-", moved, re.MULTILINE)
    assert not re.search(r"^ +1 +staged combine", moved, re.MULTILINE)  # the same bytes as the default
    assert "staged combine: combine(x) takes rows from outside." in text


@pytest.mark.parametrize("document", [gpu_document(), ablation_document()], ids=["peers", "ablations"])
def test_tables_fit_a_terminal_of_80_columns(document: dict[str, Any]) -> None:
    # Rich marks what it had to cut with an ellipsis.
    longest = document["results"][-1]["contenders"][-1]
    longest["name"] = "nccl all-to-all!"
    for phase in ("dispatch", "combine", "pair"):
        if longest[phase] is not None:
            longest[phase]["latency_us"] = 12345.6
            longest[phase]["percentiles_us"] = dict.fromkeys(longest[phase]["percentiles_us"], 12345.6)
    assert "…" not in printed(document, width=80)


def test_a_mismatch_is_printed_last() -> None:
    document = gpu_document()
    document["results"] = []
    document["mismatches"] = ["64 tokens a rank: rank 1: putget: combine differs"]
    validate(document)
    assert printed(document).rstrip().endswith("MISMATCH 64 tokens a rank: rank 1: putget: combine differs")


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """By label (the floor's is left out of the legend below): the points of every line."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_picture_has_every_contender_and_the_floor_in_every_panel(tmp_path: Path) -> None:
    document = gpu_document()
    document["results"][-1]["contenders"].append(contender("deepep LL", 3))  # at one size only
    figure = plot.make_figure(document)
    assert len(figure.axes) == 6
    for axes, phase in zip(figure.axes, ("dispatch", "combine", "pair") * 2, strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        drawn = lines(axes)
        assert {"putget", "nccl AG+RS", "deepep LL"} < set(drawn)
        assert len(drawn) == 4
        floor = next(points for name, points in drawn.items() if name not in ("putget", "nccl AG+RS", "deepep LL"))
        assert floor[0] == drawn["putget"][0] == [1, 64]
        assert drawn["deepep LL"][0] == [64]
        results = [size["contenders"][0][phase] for size in document["results"][1:]]
        if axes in figure.axes[:3]:
            assert drawn["putget"][1] == [found["latency_us"] for found in results]
            assert floor[1] == [found["floor_us"] for found in results]
        else:
            moved = [1024 + 2048, 64 * (1024 + 2048)] if phase == "pair" else None
            moved = moved or [size["bytes"][phase] for size in document["results"][1:]]
            rates = [num_bytes / found["latency_us"] / 1e3 for num_bytes, found in zip(moved, results, strict=True)]
            assert drawn["putget"][1] == pytest.approx(rates)
            assert floor[1] == pytest.approx([num_bytes / 4.0 / 1e3 for num_bytes in moved])
    path = tmp_path / "out.png"
    plot.draw(document, path)
    assert matplotlib.image.imread(path).shape[:2] == (1200, 2025)


def test_contenders_differ_in_colour_marker_and_dashes() -> None:
    document = gpu_document()
    for size in document["results"]:
        size["contenders"] += [contender(f"peer {i}", 2 + i) for i in range(4)]
    styles = [
        (line.get_color(), line.get_marker())
        for line in plot.make_figure(document).axes[0].get_lines()
        if not str(line.get_label()).startswith("floor")
    ]
    assert len(styles) == 6
    assert len({colour for colour, _ in styles}) == len({marker for _, marker in styles}) == 6


def test_picture_of_one_rank_has_no_floor(tmp_path: Path) -> None:
    document = gpu_document()
    for size in document["results"]:
        size["bytes"] |= {"dispatch": 0.0, "combine": 0.0}
        for found in size["contenders"]:
            for phase in ("dispatch", "combine", "pair"):
                found[phase] |= {"floor_us": None, "ceiling_fraction": None, "wire_bytes": 0, "wire_gbps": 0}
    validate(document)
    figure = plot.make_figure(document)
    assert set(lines(figure.axes[0])) == {"putget", "nccl AG+RS"}
    assert lines(figure.axes[3]) == {}
    assert figure.axes[3].texts[0].get_text() == "nothing leaves a rank"
    plot.draw(document, tmp_path / "out.png")
