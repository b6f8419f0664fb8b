"""`putget demo`: a DeepSeek-V3-shaped layer on the ranks that this machine offers, checked, with a table and a plot.

Behind it one prompt goes through `putget serve`, where this process starts the ranks itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from putget import hardware
from putget_bench import demo_serve, launch, plot, report
from putget_bench.demo_layer import INTERMEDIATE_SIZE, TOLERANCE, run_layer
from putget_bench.outputs import PICTURES, check_writable
from putget_bench.parser import build_parser
from putget_bench.progress import RunProgress, make_console
from putget_bench.report import new_table
from putget_bench.settings import Settings, resolve, share_gpus
from putget_bench.traffic import readable

_CPU_RANKS = 8
_RANKS_OF_A_GPU = 4  # where there is one
_SIZES = ("-b", "1", "-e", "64", "-f", "4")


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Runs the demo.

    Returns:
        0, or 1 if a result was wrong.

    Raises:
        ValueError: if a flag is wrong, before anything starts.
    """
    check_writable("--plot", args.plot, PICTURES, needs="matplotlib")
    settings = _settings(args)
    console = make_console(quiet=not launch.is_reporter())
    document = report.new_document(settings, command, ())
    console.print(_introduction(settings))
    shared = share_gpus(settings.device, settings.ep_size)
    if shared is not None:
        console.print(shared, soft_wrap=True)
    with RunProgress(console, "putget demo", len(settings.batches)) as progress:
        progress.stage(f"starting {settings.ep_size} ranks")

        def on_event(event: dict[str, Any]) -> None:
            if event["kind"] == "stage":
                progress.stage(event["text"])
            elif event["kind"] == "ceiling":
                document["ceiling"] = event["ceiling"]
            elif event["kind"] == "mismatch":
                document["mismatches"].append(event["text"])
                progress.line(f"MISMATCH {event['text']}")
            elif event["kind"] == "size":
                size = event["size"]
                document["results"].append(size)
                progress.line(
                    f"{size['batch_size']} tokens a rank: every byte as the oracle has it; relative error against the "
                    f"dense layer {size['relative_error']:.2g}"
                )
                progress.advance()

        exit_code = launch.run(run_layer, settings, settings.ep_size, settings.device, on_event)
    if not launch.is_reporter():
        return exit_code
    if document["results"]:
        console.print("\nLatency in us by tokens a rank: median of the slowest rank", style="bold")
        console.print(_table(document))
        for line in _conclusions(document):
            console.print(line)
        path = Path(args.plot)
        plot.draw(document, path)
        console.print(f"Plot: {path.resolve()}", soft_wrap=True)
    if exit_code:
        console.print("FAILED: see MISMATCH above.")
        return exit_code
    return exit_code if launch.world_size() is not None else demo_serve.run(console)


def _settings(args: argparse.Namespace) -> Settings:
    """The bench's settings for this run: on the GPUs that there are, or 8 CPU ranks. Four ranks share a single GPU."""
    world_size = launch.world_size()
    num_gpus = len(hardware.gpus())
    device, ep_size = args.device, args.ep_size
    if device == "auto":
        device = "cuda" if num_gpus > 0 and hardware.why_no_cuda() is None else "cpu"
    if ep_size is None and world_size is None:
        ep_size = (num_gpus if num_gpus > 1 else _RANKS_OF_A_GPU) if device == "cuda" else _CPU_RANKS
    flags = ["bench", "--profile", "deepseek_v3", "--device", device, *_SIZES, "--iters", "8", "--warmup", "2"]
    if ep_size is not None:
        flags += ["--ep_size", str(ep_size)]
    return resolve(build_parser().parse_args(flags), world_size)


def _introduction(settings: Settings) -> str:
    return (
        f"A DeepSeek-V3-shaped layer on {settings.ep_size} {settings.device} ranks: hidden {settings.hidden_size}, "
        f"{settings.num_experts} experts (gated FFN, intermediate size {INTERMEDIATE_SIZE} here), "
        f"top_k {settings.top_k}, FP8 rows with block scales out, BF16 rows back.\n"
        "Every size is checked twice: bit for bit against the oracle, and "
        f"against a dense float32 layer without parallelism (relative error of every token at most {TOLERANCE:.4f})."
    )


def _table(document: dict[str, Any]) -> Table:
    table = new_table("tokens", "dispatch", "experts", "combine", "pair", "GB/s", "ceil", "oracle", "dense error")
    for size in document["results"]:
        ours = size["contenders"][0]
        fraction = ours["pair"]["ceiling_fraction"]
        table.add_row(
            str(size["batch_size"]),
            f"{ours['dispatch']['latency_us']:.0f}",
            f"{size['experts_us']:.0f}",
            f"{ours['combine']['latency_us']:.0f}",
            f"{ours['pair']['latency_us']:.0f}",
            f"{ours['pair']['wire_gbps']:.3g}",
            "-" if fraction is None else f"{fraction * 100:.0f}%",
            "equal",
            f"{size['relative_error']:.5f}",
        )
    return table


def _conclusions(document: dict[str, Any]) -> list[str]:
    moved = document["results"][-1]["bytes"]
    tokens = document["results"][-1]["batch_size"]
    mine = moved["dispatch"] + moved["combine"]
    pairs = moved["dispatch_per_pair"] + moved["combine_per_pair"]
    collective = moved["all_gather"] + moved["reduce_scatter"]
    lines = [
        "pair: dispatch and combine back to back, without experts. GB/s: what leaves a rank in a pair, over its time; "
        "ceil: of what plain copies between the ranks reach in this run. dense error: largest of all tokens.",
        f"At {tokens} tokens each rank sends {readable(mine)} a round. One put per (token, expert) would be "
        f"{readable(pairs)}: {_saved(mine, pairs)} saved. All-gather and reduce-scatter would be "
        f"{readable(collective)}: {_saved(mine, collective)} saved.",
        f"Memory of a rank: {readable(moved['token_major_memory'])} token-major, where expert-major would take "
        f"{readable(moved['expert_major_memory'])}.",
    ]
    if document["config"]["device"] == "cpu":
        cores = document["machine"]["cores"]
        ranks = document["config"]["ep_size"]
        lines.append(f"{ranks} ranks share {cores} cores here: the times show that it works, not how fast a GPU is.")
    return lines


def _saved(mine: float, other: float) -> str:
    return f"{(1 - mine / other) * 100:.0f}%" if other else "nothing"
