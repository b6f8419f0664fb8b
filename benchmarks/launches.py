"""Launches of one's own beside the rule's, on the links of all ranks: how the constants of native/choose.cpp are found.

    python benchmarks/launches.py --combine senders=24 --combine senders=28,threads=768 -- --ep_size 4 --batches 2048

Each --dispatch and --combine is a line of the table: fields of ``putget.tuning.Launch``; the rule chooses the others.
Behind `--` stand the arguments of `putget ablate`, whose timing and checks these are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from putget.tuning import Launch, Tuning
from putget_bench.ablation import Bench, Variant, group
from putget_bench.cli import main as putget
from putget_bench.contender import Putget
from putget_bench.settings import Settings

_FLAGS = {"no": False, "yes": True}


def launch_of(text: str) -> Launch:
    """``senders=24,sentinel_rows=yes`` as a launch."""
    fields = dict(field.split("=", 1) for field in text.split(","))
    return Launch(**{name: _FLAGS[value] if value in _FLAGS else int(value) for name, value in fields.items()})


def read(words: list[str]) -> argparse.Namespace:
    """The command line, in every process: `rest` is for putget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatch", action="append", default=[], metavar="FIELDS", help="blocks=48,threads=512")
    parser.add_argument("--combine", action="append", default=[], metavar="FIELDS", help="senders=24")
    parser.add_argument("rest", nargs="*", help="arguments of `putget ablate`, behind --")
    args = parser.parse_args(words)
    for text in (*args.dispatch, *args.combine):
        try:
            launch_of(text)
        except (TypeError, ValueError) as error:
            parser.error(f"{text!r} is no launch: {error}")
    return args


# Ranks import this file too, and find the same words there.
@group("launches")
def launches(settings: Settings) -> Iterator[Variant]:
    """A line for each launch that the command line names."""
    args = read(sys.argv[1:])
    for phase in ("dispatch", "combine"):
        for text in getattr(args, phase):
            tuning = Tuning(**{phase: launch_of(text)})

            def build(bench: Bench, tuning: Tuning = tuning) -> Putget:
                return Putget(*bench, tuning=tuning)

            yield Variant(f"{phase} {text}", "a launch from the command line", settings, build)


def main() -> int:
    """The command line."""
    return putget(["ablate", "--only", "launches", *read(sys.argv[1:]).rest])


if __name__ == "__main__":
    sys.exit(main())
