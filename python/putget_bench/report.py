"""The bench's report: the JSON document (docs/reference/bench_json.md) and the tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from putget_bench import environment
from putget_bench.contender import PHASES
from putget_bench.peers import PeerStatus
from putget_bench.profiles import dispatch_row_bytes
from putget_bench.settings import Settings
from putget_bench.traffic import readable

SCHEMA = "putget.bench/2"
_KERNEL_WIDTH = 50
_DIGITS = 6  # significant digits of a figure in the report: more than any clock here is worth
Document = dict[str, Any]


def schema() -> Document:
    """The JSON schema of the report."""
    text = (files("putget_bench") / "schema" / "bench-2.schema.json").read_text(encoding="utf-8")
    loaded: Document = json.loads(text)
    return loaded


def new_document(
    settings: Settings, command: Sequence[str], peers: Sequence[PeerStatus], commit: str | None = None
) -> Document:
    """The report before any size was measured; see `environment.describe` for the commit."""
    config = asdict(settings)
    config["batches"] = list(settings.batches)
    config["peers"] = list(settings.peers)
    config["ablate"] = list(settings.ablate)
    return {
        "schema": SCHEMA,
        **environment.describe(commit),
        "command": list(command),
        "config": config,
        "row_bytes": {
            "dispatch": dispatch_row_bytes(settings.payloads(), settings.top_k),
            "combine": settings.output().row_bytes,
        },
        "timing": {
            "clock": "cuda events" if settings.device == "cuda" else "perf_counter",
            "statistic": "median over iterations of the slowest rank",
            "cuda_graph": settings.cuda_graph,
            "flush": settings.flush,
            "empty_us": None,
        },
        "peers": [asdict(peer) for peer in peers],
        "ceiling": None,
        "results": [],
        "mismatches": [],
    }


def write(document: Document, path: Path) -> None:
    """Writes the report as JSON."""
    path.write_text(json.dumps(_rounded(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def show(document: Document, console: Console) -> None:
    """Prints the report's tables."""
    console.print(_headline(document))
    config = document["config"]
    if document["results"]:
        if config["ablate"]:
            title = "Latency in us, over putget's as it is by default (x), share of the link's ceiling"
            _print(console, title, _variant_table(document))
            _print(console, "Bytes leaving a rank in one round, mean over ranks", _variant_bytes(document))
        else:
            title = "Latency in us, GB/s by algorithm/on the wire, share of the link's ceiling"
            _print(console, title, _latency_table(document))
            if len(_names(document)) > 1:
                title = "Peers in the same run: latency in us, and putget's over theirs (below 1: putget is faster)"
                _print(console, title, _peer_table(document))
            _print(console, "Bytes leaving a rank in one round, mean over ranks", _bytes_table(document))
        if config["iter_stats"]:
            _print(console, "Slowest rank of each iteration, us", _percentile_table(document))
        if config["kernel_breakdown"] and config["device"] == "cuda":
            for name in _names(document):
                title = f"Kernels of a round of {name} on rank 0, by torch's profiler"
                _print(console, title, _kernel_table(document, name))
    for note in _notes(document):
        console.print(note)


def new_table(*columns: str, left: int = 0) -> Table:
    """An empty table of right-aligned columns.

    Args:
        columns: their headings.
        left: index of a column that is text and so aligned to the left; 0 is never.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if left and index == left else "right", no_wrap=True)
    return table


def _print(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)


def _headline(document: Document) -> str:
    config, machine = document["config"], document["machine"]
    where = f"{len(machine['gpus'])} x {machine['gpus'][0]['name']}" if config["device"] == "cuda" else machine["cpu"]
    return (
        f"putget {document['versions']['putget']}: {config['ep_size']} ranks on {config['device']} ({where}); "
        f"{config['profile']}: hidden {config['hidden_size']}, top_k {config['top_k']}, {config['num_experts']} "
        f"experts; {config['quant']} rows of {document['row_bytes']['dispatch']} bytes out, {config['combine_dtype']} "
        f"rows of {document['row_bytes']['combine']} bytes back; {config['router']} routing{_domains(config)}"
    )


def _domains(config: dict[str, Any]) -> str:
    if config.get("network") is None:
        return ""
    size = "the ranks of a host" if config["domain_size"] is None else f"{config['domain_size']}"
    return f"; domains of {size} over {config['network']}"


def _latency_table(document: Document) -> Table:
    columns = ("tokens", "dispatch", "alg/wire", "ceil", "combine", "alg/wire", "ceil", "pair", "ceil")
    table = new_table(*columns)
    for result in document["results"]:
        ours = result["contenders"][0]
        cells = [str(result["batch_size"])]
        for phase in ("dispatch", "combine"):
            found = ours[phase]
            rates = f"{_rate(found['algorithm_gbps'])}/{_rate(found['wire_gbps'])}"
            cells += [_us(found["latency_us"]), rates, _percent(found["ceiling_fraction"])]
        table.add_row(*cells, _us(ours["pair"]["latency_us"]), _percent(ours["pair"]["ceiling_fraction"]))
    return table


def _peer_table(document: Document) -> Table:
    table = new_table("tokens", "peer", "dispatch", "ratio", "combine", "ratio", "pair", "ratio", "ceil", left=1)
    for result in document["results"]:
        for peer in result["contenders"][1:]:
            cells = [str(result["batch_size"]), peer["name"]]
            for phase in PHASES:
                cells += [_us(peer[phase]["latency_us"]), f"{peer[phase]['ratio']:.2f}"]
            table.add_row(*cells, _percent(peer["pair"]["ceiling_fraction"]))
    return table


def _variant_table(document: Document) -> Table:
    table = new_table("tokens", "variant", "dispatch", "x", "combine", "x", "pair", "x", "ceil", left=1)
    for result in document["results"]:
        for contender in result["contenders"]:
            cells = [str(result["batch_size"]), contender["name"]]
            for phase in PHASES:
                found = contender[phase]
                cells += ["-", "-"] if found is None else [_us(found["latency_us"]), f"{1 / found['ratio']:.2f}"]
            last = contender["pair"] or contender["dispatch"]
            table.add_row(*cells, _percent(last["ceiling_fraction"]))
        table.add_section()
    return table


def _variant_bytes(document: Document) -> Table:
    """Only of variants that move other bytes than putget by default."""
    table = new_table("tokens", "variant", "dispatch", "x", "combine", "x", left=1)
    for result in document["results"]:
        ours = result["contenders"][0]
        for contender in result["contenders"]:
            cells, differs = [str(result["batch_size"]), contender["name"]], contender is ours
            for phase in ("dispatch", "combine"):
                if contender[phase] is None:
                    cells += ["-", "-"]
                    continue
                moved, own = contender[phase]["wire_bytes"], ours[phase]["wire_bytes"]
                differs = differs or moved != own
                cells += [readable(moved), f"{moved / own:.2f}" if own else "-"]
            if differs:
                table.add_row(*cells)
        table.add_section()
    return table


def _bytes_table(document: Document) -> Table:
    table = new_table("tokens", "put+get", "per (token, k)", "saved", "AG+RS", "saved")
    for result in document["results"]:
        moved = result["bytes"]
        mine = moved["dispatch"] + moved["combine"]
        pairs = moved["dispatch_per_pair"] + moved["combine_per_pair"]
        collective = moved["all_gather"] + moved["reduce_scatter"]
        table.add_row(
            str(result["batch_size"]),
            readable(mine),
            readable(pairs),
            _percent(1 - mine / pairs if pairs else None),
            readable(collective),
            _percent(1 - mine / collective if collective else None),
        )
    return table


def _percentile_table(document: Document) -> Table:
    marks = ("p01", "p05", "p50", "p95", "p99", "max")
    table = new_table("tokens", "contender, phase", *marks, left=1)
    for result in document["results"]:
        for contender in result["contenders"]:
            for phase in PHASES:
                if contender[phase] is None:
                    continue
                found = contender[phase]["percentiles_us"]
                cells = [_us(found[mark]) for mark in marks]
                table.add_row(str(result["batch_size"]), f"{contender['name']} {phase}", *cells)
    return table


def _kernel_table(document: Document, name: str) -> Table:
    table = new_table("tokens", "kernel", "calls", "median us", left=1)
    for result in document["results"]:
        for contender in result["contenders"]:
            for kernel in (contender["kernels"] or ()) if contender["name"] == name else ():
                cells = (_shortened(kernel["name"]), str(kernel["calls"]), _us(kernel["median_us"]))
                table.add_row(str(result["batch_size"]), *cells)
    return table


def _names(document: Document) -> list[str]:
    """The contenders of any size, in order."""
    return list(dict.fromkeys(c["name"] for result in document["results"] for c in result["contenders"]))


def _notes(document: Document) -> list[str]:
    notes = []
    ceiling, timing, config = document["ceiling"], document["timing"], document["config"]
    if ceiling is not None and ceiling["write_gbps"] is not None:
        notes.append(
            f"Ceiling of this run: {ceiling['write_gbps']:.3g} GB/s written, {ceiling['read_gbps']:.3g} GB/s read by "
            f"each rank, all at once; a barrier takes {_us(ceiling['barrier_us'])} us."
        )
    if config.get("network") is not None:
        notes.append("The ceiling is that of memory that ranks share; between domains a network carries.")
    if timing["empty_us"] is not None:
        notes.append(
            f"Latency: {timing['statistic']}; the clock around nothing reads {_us(timing['empty_us'])} us, which is "
            f"part of dispatch and combine. The pair is timed back to back, without barriers."
        )
    if config["ablate"] and document["results"]:
        for contender in document["results"][-1]["contenders"]:
            if contender["changes"] is not None:
                notes.append(f"{contender['name']}: {contender['changes']}.")
    elif document["results"]:
        moved = document["results"][-1]["bytes"]
        notes.append(
            f"Memory of a rank at {config['max_tokens_per_rank']} tokens: {readable(moved['token_major_memory'])} "
            f"token-major (putget), {readable(moved['expert_major_memory'])} expert-major."
        )
    if config["device"] == "cpu":
        notes.append("Ranks on the CPU share its cores: the times show that it works, not how fast a GPU is.")
        if config["kernel_breakdown"]:
            notes.append("--kernel_breakdown: there are no kernels on the CPU.")
    elif config["ep_size"] > len(document["machine"]["gpus"]):
        notes.append("Ranks share a GPU: results are right, times are those of taking turns.")
    for peer in document["peers"]:
        notes.append(f"Peer {peer['name']}: {peer['status']} ({peer['detail']}).")
    notes += [f"MISMATCH {text}" for text in document["mismatches"]]
    return notes


def _shortened(kernel: str) -> str:
    return kernel if len(kernel) <= _KERNEL_WIDTH else kernel[: _KERNEL_WIDTH - 3] + "..."


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 0.1 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction * 100:.0f}%" if fraction >= 0.095 else f"{fraction * 100:.1f}%"
