"""The tables of the site are those of the reports, and benchmarks/results has no report that no page shows."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

from tests.project.checkout import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PERFORMANCE = ROOT / "docs" / "performance"


def load_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load_tables()


def report(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def phases(found: Any) -> Iterable[str]:
    """putget's part of each row of a comparison with peers."""
    for size in found["results"]:
        ours = tables.by_name(size)["putget"]
        yield " | ".join([f"| {size['batch_size']}", *(tables.us(tables.latency(ours, one)) for one in tables.PHASES)])


def overlaps(found: Any) -> Iterable[str]:
    """Without the number of tokens, which is one; products that are as short as a round are not shown."""
    shown = {**found, "overlap": [one for one in found["overlap"] if one["product_rows"] >= 2048]}
    return (text.replace("| 512 | ", "| ") for text in tables.overlap(shown))


@pytest.mark.parametrize(
    ("page", "name", "make"),
    [
        ("results", "2026-11-26_4xh200_ep4_random", phases),
        ("results", "2026-11-26_4xh200_ep4_perfect", phases),
        ("results", "2026-11-26_4xh200_ep4_fp8", phases),
        ("results", "2026-11-26_2xh200_ep2_random", phases),
        ("results", "2026-11-26_2xh200_ep2_perfect", phases),
        ("results", "2026-11-26_2xh200_ep2_fp8", phases),
        ("results", "2026-11-24_2xh100_ep2_random", phases),
        ("results", "2026-11-24_2xh100_ep2_perfect", phases),
        ("results", "2026-11-26_4xh200_profiles", tables.joined),
        ("results", "2026-11-26_2xh200_profiles", tables.joined),
        ("bounds", "2026-11-26_2xh200_roofline", tables.roofline),
        ("bounds", "2026-11-26_2xh200_floor", tables.bounds),
        ("bounds", "2026-11-24_2xh100_floor", tables.bounds),
        ("bounds", "2026-11-26_4xh200_floor", tables.bounds),
        ("bounds", "2026-11-26_2xh200_ablate", tables.ablation),
        ("bounds", "2026-11-26_2xh200_deadlines", tables.joined),
        ("bounds", "2026-11-26_2xh200_overlap", overlaps),
        ("bounds", "2026-11-26_4xh200_roofline", tables.roofline),
        ("bounds", "2026-11-26_4xh200_ablate", tables.ablation),
        ("bounds", "2026-11-26_4xh200_deadlines", tables.joined),
        ("bounds", "2026-11-26_4xh200_overlap", overlaps),
    ],
)
def test_tables_are_the_reports(page: str, name: str, make: Callable[[Any], str | Iterable[str]]) -> None:
    made = make(report(name))
    text = (PERFORMANCE / f"{page}.md").read_text()
    lines = (made if isinstance(made, str) else "\n".join(made)).splitlines()
    # A heading may use other words than the program.
    rows = [
        line
        for i, line in enumerate(lines)
        if line.startswith("|") and not "".join(lines[i + 1 : i + 2]).startswith("| ---")
    ]
    assert len(rows) >= 4
    missing = [row for row in rows if row not in text]
    assert not missing, "\n".join(missing)


def test_every_report_is_shown() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    unused = [path.name for path in RESULTS.glob("*.json") if f"results/{path.name})" not in pages]
    assert not unused, unused


def test_a_changed_report_is_noticed() -> None:
    changed = report("2026-11-26_2xh200_ep2_random")
    changed["results"][3]["contenders"][0]["pair"]["latency_us"] += 0.2
    text = (PERFORMANCE / "results.md").read_text()
    assert [row for row in phases(changed) if row not in text] != []
