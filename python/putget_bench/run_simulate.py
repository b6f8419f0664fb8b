"""`putget simulate domains`: groups that span hosts, in virtual time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from putget_bench.domains import AGENTS, BACK_ROW_BYTES, NETWORKS, ROUTES, Network, Round, Times, published, simulate
from putget_bench.flags import check_numbers, in_flags
from putget_bench.outputs import check_writable

FIRST_WRITE_US, IN_DOMAIN_US = 15.0, 5.0
SCHEMA = "putget.domains/1"


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Simulates each group on each network; the exit code is 0.

    Raises:
        ValueError: A flag is wrong.
        BackendUnavailable: The library of probes is not there.
    """
    check_writable("--output_file", args.output_file)
    _check_flags(args)
    networks = NETWORKS.values() if args.network == "all" else [NETWORKS[args.network]]
    sizes = _sizes(args.ep_size)
    try:
        results = [_result(args, network, size) for network in networks for size in sizes]
    except ValueError as error:
        raise ValueError(in_flags(str(error))) from error
    console = Console(width=130, highlight=False)
    console.print(_table(results))
    console.print(
        "us from launch until the median rank has its rows, dispatch / combine. Line: "
        f"{FIRST_WRITE_US:g} us to the first write, a byte's latency, bytes / rate, {IN_DOMAIN_US:g} us in the domain.",
        soft_wrap=True,
    )
    if args.output_file:
        document = {"schema": SCHEMA, "command": list(command), "results": results}
        Path(args.output_file).write_text(json.dumps(document, indent=2) + "\n")
        console.print(f"wrote {args.output_file}", soft_wrap=True)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Numbers that no group has; the library of probes knows the rest."""
    check_numbers(args, "domain_size", "tokens", "num_experts", "top_k")
    check_numbers(args, "chunk_rows", "seed", low=0)


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--ep_size is {text!r}, expected numbers with commas between them") from None


def _result(args: argparse.Namespace, network: Network, ep_size: int) -> dict[str, Any]:
    shape = Round(ep_size, args.domain_size, args.tokens, args.num_experts, args.top_k)
    common = {"first_write_us": FIRST_WRITE_US, "in_domain_us": IN_DOMAIN_US, "seed": args.seed}
    back_row_bytes = BACK_ROW_BYTES[args.combine_dtype]
    sent = replace(shape, back_row_bytes=back_row_bytes)
    ours = simulate(sent, network, AGENTS, chunk_rows=args.chunk_rows, **common)
    paper = simulate(shape, network, ROUTES, **common)
    known = published(shape, network)
    return {
        "network": asdict(network),
        "round": asdict(shape),
        "putget": asdict(ours) | {"line_us": _line(shape, network, ours), "back_row_bytes": back_row_bytes},
        "paper": asdict(paper) | {"published_us": known},
    }


def _line(shape: Round, network: Network, times: Times) -> tuple[float, float]:
    around = FIRST_WRITE_US + network.latency_us + IN_DOMAIN_US
    bytes_of_rank = (moved / shape.ep_size for moved in (times.dispatch_bytes, times.combine_bytes))
    dispatch, combine = (around + moved / network.gbps / 1000 for moved in bytes_of_rank)
    return dispatch, combine


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("network")
    for name in ("ranks", "putget", "its line", "KB a token", "writes", "paper's", "published", "KB a token", "writes"):
        table.add_column(name, justify="right")
    for result in results:
        shape = result["round"]
        ours, paper = result["putget"], result["paper"]
        table.add_row(
            result["network"]["name"],
            str(shape["ep_size"]),
            _pair((ours["dispatch_us"], ours["combine_us"])),
            _pair(ours["line_us"]),
            *_moved(ours, shape),
            _pair((paper["dispatch_us"], paper["combine_us"])),
            _pair(paper["published_us"]),
            *_moved(paper, shape),
        )
    return table


def _pair(times: Sequence[float] | None) -> str:
    return "-" if times is None else f"{times[0]:.0f} / {times[1]:.0f}"


def _moved(times: dict[str, Any], shape: dict[str, Any]) -> tuple[str, str]:
    """KB of a token out and back, and writes of a rank."""
    tokens = shape["ep_size"] * shape["num_tokens"] * 1000
    moved = f"{times['dispatch_bytes'] / tokens:.1f} / {times['combine_bytes'] / tokens:.0f}"
    writes = (times[name] / shape["ep_size"] for name in ("dispatch_writes", "combine_writes"))
    return moved, " / ".join(f"{one:.0f}" for one in writes)
