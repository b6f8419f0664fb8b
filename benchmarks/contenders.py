"""One line for each size of `putget bench` reports: every contender's dispatch, combine and pair in us.

    python benchmarks/contenders.py REPORT.json...

Reports that are missing are named and left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PHASES = ("dispatch", "combine", "pair")


def times(contender: dict[str, Any]) -> str:
    """The three phases; a dash where one was not timed."""
    told = [contender.get(phase) for phase in PHASES]
    return " / ".join("-" if phase is None else f"{phase['latency_us']:.1f}" for phase in told)


def lines(path: Path) -> list[str]:
    """A heading, and a line for each size."""
    report = json.loads(path.read_text(encoding="utf-8"))
    found = [f"{path.stem}: EP{report['config']['ep_size']}, {report['machine']['gpus'][0]['name']}"]
    for result in report["results"]:
        state = "" if result["checked"] else " UNCHECKED"
        told = "  ".join(f"{one['name']} {times(one)}" for one in result["contenders"])
        found.append(f"  {result['batch_size']:>5}{state}  {told}")
    return [*found, *(f"  MISMATCH {one}" for one in report["mismatches"])]


def main(paths: list[str]) -> int:
    """Prints the reports; 1 where one is missing or a result was wrong."""
    exit_code = 0
    for path in map(Path, paths):
        if not path.is_file():
            print(f"{path}: missing")
            exit_code = 1
            continue
        told = lines(path)
        print("\n".join(told))
        exit_code = max(exit_code, int(any("MISMATCH" in line for line in told)))
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
