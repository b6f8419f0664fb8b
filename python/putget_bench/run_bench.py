"""`putget bench` and `putget ablate` on the side of the user: starts the ranks, shows progress, writes the report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from putget_bench import launch, peers, report
from putget_bench.contender import PHASES
from putget_bench.measure import measure
from putget_bench.outputs import PICTURES, check_writable
from putget_bench.progress import RunProgress, make_console
from putget_bench.settings import resolve, share_gpus, why_cpu


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Runs the bench, or the ablations.

    Args:
        args: the parsed flags.
        command: the command line, for the report.

    Returns:
        0, or 1 if a result was wrong.

    Raises:
        ValueError: if a flag is wrong, before anything starts.
    """
    check_writable("--output_file", args.output_file)
    check_writable("--plot", args.plot, PICTURES, needs="matplotlib")
    settings = resolve(args, launch.world_size())
    statuses = [peers.find(name, settings.device) for name in settings.peers]
    console = make_console(quiet=not launch.is_reporter())
    warning = why_cpu(args.device, settings.device, settings.ep_size) or share_gpus(settings.device, settings.ep_size)
    if warning is not None:
        console.print(warning, soft_wrap=True)
    document = report.new_document(settings, command, statuses, args.commit)
    with RunProgress(console, f"putget {args.command}", len(settings.batches)) as progress:
        progress.stage(f"starting {settings.ep_size} ranks on {settings.device}")
        listen = listener(document, progress)
        exit_code = launch.run(measure, settings, settings.ep_size, settings.device, listen)
    if not launch.is_reporter():
        return exit_code
    report.show(document, console)
    if args.output_file is not None:
        report.write(document, Path(args.output_file))
        console.print(f"report: {args.output_file}", soft_wrap=True)
    if args.plot is not None and document["results"]:
        from putget_bench import plot

        plot.draw(document, Path(args.plot))
        console.print(f"plot: {args.plot}", soft_wrap=True)
    return exit_code


def listener(document: report.Document, progress: RunProgress) -> launch.Emit:
    """Takes the events of a run into its report and shows them."""

    def on_event(event: launch.Event) -> None:
        if event["kind"] == "stage":
            progress.stage(event["text"])
        elif event["kind"] == "network":  # hosts that nobody named
            document["config"]["network"] = event["network"]
        elif event["kind"] == "ceiling":
            document["ceiling"] = event["ceiling"]
            document["timing"]["empty_us"] = event["empty_us"]
        elif event["kind"] == "peers":
            document["peers"] = event["peers"]
        elif event["kind"] == "workspace":
            document["workspace"] = event["map"]
        elif event["kind"] == "mismatch":
            document["mismatches"].append(event["text"])
            progress.line(f"MISMATCH {event['text']}")
        elif event["kind"] == "size":
            document["results"].append(event["size"])
            progress.line(size_line(event["size"]))
            progress.advance()

    return on_event


def size_line(size: dict[str, Any]) -> str:
    """One size in one line, as it comes in."""
    parts = []
    for contender in size["contenders"]:
        timed = [phase for phase in PHASES if contender[phase] is not None]
        times = ", ".join(f"{phase} {contender[phase]['latency_us']:.1f}" for phase in timed)
        parts.append(f"{contender['name']} {times} us")
    found = "correct" if size["checked"] else "NOT CHECKED"
    return f"{size['batch_size']} tokens a rank: {found}; {'; '.join(parts)}"
