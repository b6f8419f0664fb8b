r"""The engine beside libfabric alone, NIXL and Mooncake: the same sizes, on one machine, by turns in one run.

    cargo build --release -p putget_transfer_bench
    python bench/compare.py --program target/release/putget-transfer --peers_python python \
        --output_file compare.json --plot compare.png

Every contender measures all sizes for a moment, then the next one does, and so on for `--repeats` rounds; what is
reported is the median over the rounds. So a busy machine hits all of them alike. The engine's share of libfabric alone
is the median of what each round gives, with the least and the largest beside it. Over host there is the floor, too: one
process that copies what another one has, by memcpy (`floor.c`), and the engine's share of it. `--processors 0-3`
keeps all on the same few processors. An interrupt ends the last round, and what has been measured is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENGINE = "putget_transfer"
ALONE, FLOOR = "libfabric_alone", "memcpy_alone"
PROVIDERS = ["tcp", "net", "host"]
WINDOW = 16  # the default of the program
PEERS = {"nixl_tcp": "tcp", "nixl_shm": "host", "mooncake_tcp": "tcp"}
METRICS = ["gbit_per_s", "ops_per_s", "p50_us", "p99_us"]

# (network, contender), and the rows of each round: (kind, bytes) to metrics.
Rounds = dict[tuple[str, str], list[dict[tuple[str, int], dict[str, float]]]]


def command(network: str, contender: str, options: argparse.Namespace) -> list[str]:
    """Say what measures a contender."""
    common = ["--seconds", str(options.seconds), "--smallest", str(options.smallest), "--largest", str(options.largest)]
    if options.sizes:
        common += ["--sizes", options.sizes]
    if contender in PEERS:
        return [options.peers_python, str(HERE / "peers.py"), contender, *common]
    mode = {ENGINE: [], f"{ENGINE}_busy_poll": ["--busy_poll"], ALONE: ["--bare"]}[contender]
    return [str(options.program.resolve()), "bench", "--provider", network, *mode, *common]


def floor(options: argparse.Namespace) -> dict[tuple[str, int], dict[str, float]] | None:
    """Measure memcpy between two processes; None if it cannot be compiled or run."""
    sizes = [options.smallest << power for power in range(64) if options.smallest << power <= options.largest]
    if options.sizes:
        sizes = [size for size in sizes if size in map(int, options.sizes.split(","))]
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "floor")
        words = [program, str(options.seconds), str(WINDOW), *map(str, sizes)]
        try:
            subprocess.run(
                ["cc", "-O2", str(HERE / "floor.c"), "-o", program], check=True, capture_output=True, text=True
            )
            ran = subprocess.run(words, check=True, capture_output=True, text=True, timeout=options.timeout_s)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{FLOOR}: {getattr(error, 'stderr', '') or error}", file=sys.stderr)
            return None
    rows = (map(float, line.split()) for line in ran.stdout.splitlines())
    return {
        ("single", int(size)): dict(zip(METRICS, (gbit, gbit * 1.25e8 / size, p50, p99), strict=True))
        for size, gbit, p50, p99 in rows
    }


def run(network: str, contender: str, options: argparse.Namespace) -> dict[tuple[str, int], dict[str, float]] | None:
    """Measure one contender once; None if it cannot run here."""
    if contender == FLOOR:
        return floor(options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        words = [*command(network, contender, options), "--output_file", str(file)]
        try:
            ran = subprocess.run(words, capture_output=True, text=True, timeout=options.timeout_s)
        except subprocess.TimeoutExpired:
            print(f"{network} {contender}: nothing after {options.timeout_s} s", file=sys.stderr)
            return None
        if ran.returncode != 0 or not file.exists():
            print(f"{network} {contender}: {ran.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return None
        rows = json.loads(file.read_text())["rows"]
    return {(row["kind"], row["bytes"]): {metric: row[metric] for metric in METRICS} for row in rows}


def processors(text: str) -> set[int]:
    """Read a list of processors such as 0-3,8."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def shares(rounds: Rounds, network: str, size: tuple[str, int], other: str) -> list[float]:
    """Give the engine's rate over another contender's in each round, in the mode whose median is the better one."""
    alone = rounds.get((network, other), [])
    found = []
    for mode in (ENGINE, f"{ENGINE}_busy_poll"):
        both = zip(rounds.get((network, mode), []), alone, strict=False)
        found.append([ours[size]["gbit_per_s"] / bare[size]["gbit_per_s"] for ours, bare in both if size in bare])
    return sorted(max((mode for mode in found if mode), key=statistics.median, default=[]))


def medians(rounds: Rounds) -> list[dict[str, Any]]:
    """One row for each network, contender and size."""
    rows = []
    for (network, contender), found in rounds.items():
        sizes = [size for size in found[0] if all(size in one for one in found)] if found else []
        for kind, size in sizes:
            row: dict[str, Any] = {"network": network, "contender": contender, "kind": kind, "bytes": size}
            for metric in METRICS:
                row[metric] = statistics.median(one[kind, size][metric] for one in found)
            for name, other in [("share", ALONE), ("share_of_memcpy", FLOOR)]:
                if contender == ENGINE and (share := shares(rounds, network, (kind, size), other)):
                    row[name] = [share[0], statistics.median(share), share[-1]]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Gbit/s of every contender, and the engine's shares: median, least and largest of the rounds."""
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        here = [row for row in rows if row["network"] == network]
        contenders = list(dict.fromkeys(row["contender"] for row in here))
        lines.append(
            f"\n{network}, Gbit/s\n{'kind':7}{'bytes':>10}"
            + "".join(f"{name:>27}" for name in contenders)
            + "   shares (least, largest)"
        )
        for kind, size in dict.fromkeys((row["kind"], row["bytes"]) for row in here):
            rate = {row["contender"]: row["gbit_per_s"] for row in here if (row["kind"], row["bytes"]) == (kind, size)}
            same = [row for row in here if (row["kind"], row["bytes"]) == (kind, size)]
            found = [row[name] for name in ("share", "share_of_memcpy") for row in same if name in row]
            share = "".join(f"{median:8.0%} ({least:.0%}, {largest:.0%})" for least, median, largest in found)
            cells = "".join(f"{rate[name]:27.2f}" if name in rate else f"{'-':>27}" for name in contenders)
            lines.append(f"{kind:7}{size:10}{cells}{share}")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw rate over size, a panel for each network and kind."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure, panels = plt.subplots(len(networks), 2, figsize=(11, 3.4 * len(networks)), squeeze=False)
    for line, network in zip(panels, networks, strict=True):
        for panel, kind in zip(line, ["single", "paged"], strict=True):
            here = [row for row in rows if (row["network"], row["kind"]) == (network, kind)]
            for contender in dict.fromkeys(row["contender"] for row in here):
                points = [(row["bytes"], row["gbit_per_s"]) for row in here if row["contender"] == contender]
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=contender.replace("_", " "))
            panel.set(title=f"{network}, {kind} writes", xlabel="bytes", ylabel="Gbit/s", xscale="log", yscale="log")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run everything by turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--peers_python", help="a Python that has NIXL and Mooncake; without it they are left out")
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--contenders", help="only these, such as memcpy_alone,putget_transfer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--smallest", type=int, default=64 << 10)
    parser.add_argument("--largest", type=int, default=32 << 20)
    parser.add_argument("--sizes", help="only these, in bytes, such as 65536,131072")
    parser.add_argument("--processors", type=processors, help="run everything on these, such as 0-3")
    parser.add_argument("--timeout_s", type=float, default=180.0)
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.processors:
        os.sched_setaffinity(0, options.processors)
    pairs = [
        (network, contender)
        for network in options.providers.split(",")
        for contender in (ALONE, ENGINE, f"{ENGINE}_busy_poll", *([FLOOR] if network == "host" else []))
    ]
    if options.peers_python:
        pairs += [(network, peer) for peer, network in PEERS.items() if network in options.providers.split(",")]
    if options.contenders:
        pairs = [pair for pair in pairs if pair[1] in options.contenders.split(",")]
    rounds: Rounds = {pair: [] for pair in pairs}
    try:
        for number in range(options.repeats):
            # The contender that comes first changes from round to round.
            for network, contender in pairs if number % 2 == 0 else pairs[::-1]:
                found = run(network, contender, options)
                if found is not None:
                    rounds[network, contender].append(found)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    rows = medians({pair: found for pair, found in rounds.items() if found})
    print(table(rows))
    if options.output_file:
        about = {
            "schema": 1,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "repeats": options.repeats,
            "seconds": options.seconds,
            "processors": sorted(os.sched_getaffinity(0)),
            "rows": rows,
        }
        options.output_file.write_text(json.dumps(about, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
