"""The tables of docs/performance/bounds.md, out of the reports.

    python benchmarks/tables.py FOLDER
    python benchmarks/tables.py --join REPORTS.json REPORT.json...
    python benchmarks/tables.py REPORTS.json

FOLDER has what putget roofline (roofline.json), series.py (ablate.json, distribution_*.json, and the profiles in ep*/),
overlap.py (overlap.json), and putget bench with and without deadlines (deadlines_with_*.json, deadlines_without_*.json)
wrote. What is not there is left out. With --join the reports of one table, profiles or deadlines, become one file by
their names, as benchmarks/results keeps them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PHASES = ("dispatch", "combine", "pair")
FLOORS = ("bytes and flags", "bytes, sent back")
Report = dict[str, Any]


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [list(map(str, row)) for row in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def us(value: float | None) -> str:
    """A latency."""
    return "" if value is None else f"{value:.1f}"


def latency(contender: Report | None, phase: str) -> float | None:
    """Latency of one phase in us; None where it was not timed."""
    found = None if contender is None else contender[phase]
    return None if found is None else float(found["latency_us"])


def by_name(size: Report) -> dict[str, Report]:
    """Contenders of a size."""
    return {contender["name"]: contender for contender in size["contenders"]}


def where(report: Report) -> str:
    """Commit, date and command."""
    gpus = report["machine"]["gpus"]
    names = {gpu["name"] for gpu in gpus}
    versions = report["versions"]
    command = " ".join(Path(word).name if word.startswith("/") else word for word in report["command"])
    machine = f"{len(gpus)} x {', '.join(sorted(names))}" if gpus else "CPU"
    said = f"{report['date'][:16]} UTC, {machine}, driver {report['machine']['driver']}, torch {versions['torch']}"
    return f"Commit {report['commit']}, {said}. `{command}`"


def roofline(report: Report) -> Iterator[str]:
    """Plain transfers by SMs, and rows to random peers."""
    sizes = sorted({rate["bytes_per_peer"] for rate in report["rates"]})
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for rate in report["rates"]:
        sms = "all" if rate["num_sms"] is None else str(rate["num_sms"])
        rows.setdefault((rate["kind"], sms), {})[rate["bytes_per_peer"]] = rate["gbps"]
    head = ["transfer, GB/s", "SMs", *(f"{size >> 10} KiB" for size in sizes)]
    yield table(head, ([*key, *(f"{found[size]:.0f}" for size in sizes)] for key, found in rows.items()))
    counts = sorted({rate["num_tokens"] for rate in report["row_rates"]})
    by_row: dict[tuple[str, int], dict[int, float]] = {}
    for rate in report["row_rates"]:
        by_row.setdefault((rate["kind"], rate["row_bytes"]), {})[rate["num_tokens"]] = rate["gbps"]
    head = ["rows to random peers, GB/s", "bytes each", *(f"{count} tokens" for count in counts)]
    yield table(head, ([*key, *(f"{found[count]:.0f}" for count in counts)] for key, found in by_row.items()))
    yield f"A round without tokens: {report['barrier_us']:.2f} us."


def ablation(report: Report) -> Iterator[str]:
    """Every variant: the pair with dispatch and combine, and over putget's."""
    sizes = [size["batch_size"] for size in report["results"]]
    names = list(by_name(report["results"][-1]))
    rows = []
    for name in names:
        cells = []
        for size in report["results"]:
            found = by_name(size).get(name)
            times = [latency(found, phase) for phase in PHASES]
            ours = latency(by_name(size)["putget"], "pair")
            over = "" if times[2] is None or ours is None else f" x{times[2] / ours:.2f}"
            cells.append(" / ".join(us(time) for time in times) + over)
        rows.append([name, *cells])
    yield table(["dispatch / combine / pair, us; the pair over putget's", *(f"{size} tokens" for size in sizes)], rows)


def bounds(report: Report) -> Iterator[str]:
    """Putget over the probes that move the same bytes and flags."""
    floors = [name for name in FLOORS if name in by_name(report["results"][-1])]
    if not floors:
        return
    rows = []
    for size in report["results"]:
        found = by_name(size)
        cells = []
        for phase in PHASES:
            ours = latency(found["putget"], phase)
            assert ours is not None
            cells.append(us(ours))
            for name in floors:
                floor = latency(found[name], phase)
                assert floor is not None
                cells += [us(floor), f"{ours / floor:.2f}"]
        rows.append([size["batch_size"], *cells])
    head = ["tokens"]
    for phase in PHASES:
        head += [phase, *(text for name in floors for text in (name, "ratio"))]
    yield table(head, rows)


def distribution(reports: Iterable[Report]) -> Iterator[str]:
    """Percentiles of putget's phases."""
    marks = ("p01", "p05", "p25", "p50", "p75", "p95", "p99", "max")
    rows = []
    for report in reports:
        for size in report["results"]:
            for phase in PHASES:
                found = size["contenders"][0][phase]
                spread = [us(found["percentiles_us"][mark]) for mark in marks]
                rows.append([size["batch_size"], phase, found["num_readings"], *spread])
    yield table(["tokens", "us", "readings", *marks], rows)


def read(paths: Iterable[Path]) -> dict[str, Report]:
    """Reports by their files' names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(paths)}


def profiles(reports: dict[str, Report]) -> Iterator[str]:
    """Pairs of putget and the peers by shape."""
    rows = []
    for name, report in sorted(reports.items()):
        config = report["config"]
        shape = f"{config['hidden_size']}/{config['top_k']}/{config['num_experts']} {config['quant']}"
        for size in report["results"]:
            found = by_name(size)
            ours = [latency(found["putget"], phase) for phase in PHASES]
            cells = []
            for peer in ("flashinfer", "nccl AG+RS", "nccl all-to-all"):
                theirs = latency(found.get(peer), "pair")
                cells.append("-" if theirs is None or ours[2] is None else f"{theirs:.1f} ({ours[2] / theirs:.2f})")
            rows.append([name, shape, size["batch_size"], *(us(time) for time in ours), *cells])
    head = ["profile", "hidden/top_k/experts", "tokens", "dispatch", "combine", "pair"]
    yield table([*head, "FlashInfer: pair (ratio)", "NCCL AG+RS", "NCCL all-to-all"], rows)


def kernels(report: Report) -> Iterator[str]:
    """The kernels of a round of each contender."""
    rows = []
    for size in report["results"]:
        for contender in size["contenders"]:
            for kernel in contender["kernels"] or ():
                name = kernel["name"].replace("(anonymous namespace)::", "")
                name = name.split("(")[0].split("<")[0].removeprefix("void ")[:60]
                time = kernel.get("median_us", kernel["mean_us"])  # older reports have the mean alone
                rows.append([size["batch_size"], contender["name"], name, kernel["calls"], us(time)])
    yield table(["tokens", "contender", "kernel", "calls", "median us"], rows)


def _combine_of(one: dict[str, Any]) -> str:
    return str(one["combine"] if "combine" in one else one["combine_direction"])  # of older reports


def overlap(report: Report) -> Iterator[str]:
    """A matrix product between the halves, and the halves alone."""
    ways = ("whole", "halves", "products", "products_leaving", "together")
    rows = []
    for one in report["overlap"]:
        case = [one["num_tokens"], _combine_of(one), one["num_sms"], one["product_rows"]]
        rows.append([*case, *(us(one["latency_us"][way]) for way in ways), f"{one['over_longer']:.3f}"])
    yield table(["tokens", "combine", "SMs", "rows of the product", *ways, "over the longer"], rows)
    names = ("dispatch_start", "dispatch_finish", "combine_start", "combine_finish")
    lines = []
    for one in report["gap"]:
        times = [us(one["latency_us"][name]) for name in names]
        lines.append([one["num_tokens"], _combine_of(one), one["num_sms"], *times])
    yield table(["tokens", "combine", "SMs", *names], lines)


def deadlines(reports: dict[str, Report]) -> Iterator[str]:
    """With deadlines over without: medians of the runs."""
    times: dict[tuple[str, int, str], list[float]] = {}
    for name, report in reports.items():
        way = name.split("_")[1]  # deadlines_with_1, deadlines_without_1
        for size in report["results"]:
            for phase in PHASES:
                found = latency(size["contenders"][0], phase)
                assert found is not None
                times.setdefault((way, size["batch_size"], phase), []).append(found)
    rows = []
    for size in sorted({size for _, size, _ in times}):
        cells = []
        for phase in PHASES:
            here, gone = (statistics.median(times[way, size, phase]) for way in ("with", "without"))
            cells.append(f"{here:.2f} / {gone:.2f} ({100 * (here / gone - 1):+.1f}%)")
        rows.append([size, *cells])
    yield table(["tokens", *(f"{phase}: with / without" for phase in PHASES)], rows)


def joined(reports: dict[str, Report]) -> str:
    """The table of a file that --join made."""
    return "\n".join((deadlines if all(name.startswith("deadlines_") for name in reports) else profiles)(reports))


def main() -> int:
    """Prints every table for which there is a report."""
    if sys.argv[1] == "--join":
        Path(sys.argv[2]).write_text(json.dumps(read(map(Path, sys.argv[3:])), indent=1) + "\n")
        return 0
    folder = Path(sys.argv[1])
    if folder.is_file():
        print(joined(json.loads(folder.read_text())))
        return 0

    def show(title: str, name: str, *makers: Any) -> None:
        if (folder / name).exists():
            report = json.loads((folder / name).read_text())
            print(f"\n### {title}\n\n{where(report)}\n")
            for maker in makers:
                print("\n\n".join(maker(report)) + "\n")

    show("Ceilings", "roofline.json", roofline)
    show("Ablations", "ablate.json", ablation)
    show("The bound", "ablate.json", bounds)
    show("The bound, an earlier run", "floor.json", bounds)
    spreads = [json.loads(path.read_text()) for path in sorted(folder.glob("distribution_*.json"))]
    if spreads:
        print(f"\n### Distributions\n\n{where(spreads[0])}\n")
        print("\n".join(distribution(spreads)))
    for ranks in sorted(folder.glob("ep*")):
        print(f"\n### Profiles, {ranks.name}\n")
        print("\n".join(profiles(read(ranks.glob("*.json")))))
        if (ranks / "deepseek_v3.json").exists():
            print("\n" + "\n".join(kernels(json.loads((ranks / "deepseek_v3.json").read_text()))))
    show("Overlap", "overlap.json", overlap)
    if list(folder.glob("deadlines_with_*.json")):
        print("\n### Deadlines\n")
        print("\n".join(deadlines(read(folder.glob("deadlines_*.json")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
