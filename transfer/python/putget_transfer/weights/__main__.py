"""`python -m putget_transfer.weights`: simulate an update of a large model, or draw the report of one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from putget_transfer._files import check_places
from putget_transfer.weights._plot import draw, read
from putget_transfer.weights._simulate import PUBLISHED_S, Model, Row, simulate

COLUMNS = ("replicas", "ranks", "send", "receive", "host", "point to point", "one rank, BF16", "one rank, FP8")


def _line(row: Row) -> list[str]:
    seconds = (row.send_s, row.receive_s, row.host_s, row.point_to_point_s, row.one_rank_bf16_s, row.one_rank_fp8_s)
    return [str(row.replicas), str(row.replica_size), *(f"{one:.2f}" for one in seconds)]


def _run(options: argparse.Namespace) -> None:
    for name in ("trainers", "targets", "layers", "experts"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}: {getattr(options, name)} came; at least 1 is needed")
    for replicas in options.replicas:
        if replicas < 1 or options.targets % replicas:
            raise ValueError(f"replicas: {replicas} came; replicas divide targets, {options.targets}")
    for name in ("gbit", "host_gbyte_s"):
        if not getattr(options, name) > 0:
            raise ValueError(f"{name}: {getattr(options, name)} came; more than 0 is needed")
    model = replace(Model(), layers=options.layers, experts=options.experts)
    rows = [
        simulate(
            model,
            trainer_ranks=options.trainers,
            replicas=replicas,
            replica_size=options.targets // replicas,
            gbit=options.gbit,
            host_gbyte_s=options.host_gbyte_s,
        )[0]
        for replicas in options.replicas
    ]
    if options.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")
        return
    table = [list(COLUMNS), *map(_line, rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    sys.stdout.write(f"{model.parameters:,} parameters, seconds at least:\n")
    for line in table:
        sys.stdout.write("  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) + "\n")
    sys.stdout.write(f"published for Kimi-K2: {PUBLISHED_S} s; the number of replicas is not\n")


def _plot(options: argparse.Namespace) -> None:
    check_places(options, "picture")
    draw(read(options.report), options.picture)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m putget_transfer.weights", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("plot", help="an update's report as a picture: stages over time, bytes by rank")
    command.add_argument("report", type=Path, help="what `Update.to_json` or `Report.to_json` returned")
    command.add_argument("picture", type=Path, help="the suffix gives the format (needs matplotlib)")
    command.set_defaults(run=_plot)
    command = commands.add_parser("simulate", help="an update's times, by the real planner")
    command.add_argument("--trainers", type=int, default=256, help="trainer ranks (default 256)")
    command.add_argument("--targets", type=int, default=128, help="rollout ranks of all replicas (default 128)")
    command.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], help="replicas (default 1 2 4 8)")
    command.add_argument("--layers", type=int, default=61, help="layers (default 61, as Kimi-K2)")
    command.add_argument("--experts", type=int, default=384, help="experts of a layer (default 384, as Kimi-K2)")
    command.add_argument("--gbit", type=float, default=400.0, help="Gbit/s of a rank's NIC (default 400)")
    command.add_argument("--host_gbyte_s", type=float, default=50.0, help="GB/s from host memory (default 50)")
    command.add_argument("--json", action="store_true", help="print rows as JSON")
    command.set_defaults(run=_run)
    options = parser.parse_args(words)
    try:
        options.run(options)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
