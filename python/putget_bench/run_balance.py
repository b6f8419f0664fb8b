"""`putget balance`: plan, simulate, report, show."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from putget.balancer import LoadHistory, Placement, formats
from putget_bench.balance_report import CHOICES, report
from putget_bench.balance_simulation import WAYS, Cost, Group, Ids, Mover, Phase, count, simulate
from putget_bench.flags import check_numbers, in_flags
from putget_bench.outputs import PICTURES, check_writable
from putget_bench.routing import read_tasks

_SGLANG, _YAML = (".json", ".pt"), (".yaml", ".yml")
_COUNTS = (
    "ep_size",
    "slots",
    "num_experts",
    "num_groups",
    "num_nodes",
    "iterations",
    "tokens",
    "interval",
    "window",
    "expert_bytes",
    "most_bytes",
    "cells",
    "row_bytes",
)


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Runs one action; the exit code is 0.

    Raises:
        ValueError: A flag or a file is wrong.
    """
    actions: dict[str, Callable[[argparse.Namespace], None]] = {
        "plan": _plan,
        "simulate": _simulate,
        "report": _report,
        "show": _show,
    }
    _check_flags(args)
    try:
        actions[args.action](args)
    except ValueError as error:
        raise ValueError(in_flags(str(error))) from error
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """The checks of flags that need no file.

    Raises:
        ValueError: A number is out of range, flags do not go together, or a file cannot be written.
    """
    given = vars(args)
    check_numbers(args, *(name for name in _COUNTS if name in given))
    check_numbers(args, *(name for name in ("max_moves", "first_layer", "min_gain", "row_ns") if name in given), low=0)
    check_numbers(args, *(name for name in ("link_gbps",) if name in given), low=0, above=True)
    for name in ("max_moves", "min_gain"):
        if args.action == "plan" and given[name] is not None and args.previous is None:
            raise ValueError(f"--{name} is given without --previous: there is nothing to move from")
    if "output_file" in given and given["output_file"] is not None:
        is_yaml = Path(args.output_file).suffix in _YAML
        check_writable("--output_file", args.output_file, (*_SGLANG, *_YAML), "yaml" if is_yaml else None)
    check_writable("--plot", given.get("plot"), PICTURES, "matplotlib")


def _plan(args: argparse.Namespace) -> None:
    tasks = _tasks(args, [args.task] if args.task else None)
    group = _group(args, tasks)
    load = sum(count(ids, group.num_experts) for ids in tasks.values())
    previous = _read(Path(args.previous), group.num_experts) if args.previous else None
    placement = group.plan(load, previous=previous, max_moves=args.max_moves, min_gain=args.min_gain)
    rows = {"contiguous": group.contiguous(placement.num_layers), "planned": placement}
    if previous is not None:
        rows = {"previous": previous, "planned": placement}
        moves = placement.moves_from(previous, group.ep_size)
        _print(f"{int(moves.sum())} experts move, at most {int(moves.max())} in a layer")
    _print(_scores(rows, load, group.ep_size))
    if args.output_file:
        path = Path(args.output_file)
        if path.suffix in _YAML:
            formats.write_tensorrt_llm(path, placement, first_layer=args.first_layer)
        else:
            formats.write_sglang(path, placement)
        _print(f"wrote {path}")


def _simulate(args: argparse.Namespace) -> None:
    history = LoadHistory(window=args.window, decay=args.decay)
    tasks = _tasks(args, args.tasks.split(",") if args.tasks else None)
    group = _group(args, tasks)
    cost = Cost(args.row_bytes, args.link_gbps, args.row_ns)
    phases = simulate(
        tasks,
        group,
        iterations=args.iterations,
        tokens=args.tokens,
        interval=args.interval,
        history=history,
        mover=Mover(args.expert_bytes, args.most_bytes, args.cells),
        max_moves=args.max_moves,
        cost=cost,
    )
    num_layers = next(iter(tasks.values())).shape[0]
    _print(_phases(phases, cost, args.expert_bytes, num_layers))
    _print(
        "step us = rows of the hottest rank * (row_bytes / link_gbps + row_ns) / 1000, mean over layers, and online "
        "the bytes that its experts move / link_gbps; "
        f"row_bytes {cost.row_bytes}, link_gbps {cost.link_gbps:g}, row_ns {cost.row_ns:g}"
    )
    _print(
        f"experts move by {args.most_bytes / 1e6:.1f} MB of a rank in an iteration, at most {args.cells} to a rank "
        "in a batch"
    )
    if args.plot:
        from putget_bench.balance_plot import draw

        draw(phases, Path(args.plot))
        _print(f"wrote {args.plot}")


def _report(args: argparse.Namespace) -> None:
    sizes = args.batches.split(",")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"--batches is {args.batches!r}, expected numbers from 1 on, comma-separated")
    tasks = _tasks(args, args.tasks.split(",") if args.tasks else None)
    reports = report(tasks, _group(args, tasks), tuple(map(int, sizes)))
    table = _table("task", "tokens", "hottest expert / mean", "contiguous", *(f"plan of {task}" for task in tasks))
    for found in reports:
        scores = (f"{ratio.mean():.3f}" for ratio in (found.contiguous, *found.planned.values()))
        table.add_row(found.task, str(found.tokens), f"{found.hottest:.1f}", *scores)
    _print(table)
    small = _table("task", "tokens of a batch", *CHOICES)
    for found in reports:
        for size in found.batches[CHOICES[0]]:
            small.add_row(found.task, str(size), *(f"{found.batches[how][size]:.3f}" for how in CHOICES))
    _print(small)
    _print("max/mean of the ranks' loads, mean over layers; small batches with the plan of their task")
    if args.plot:
        from putget_bench.balance_report_plot import draw

        draw(reports, Path(args.plot))
        _print(f"wrote {args.plot}")


def _show(args: argparse.Namespace) -> None:
    path = Path(args.file)
    tasks = read_tasks(Path(args.routing_file)) if args.routing_file else {}
    placement = _read(path, args.num_experts)
    loads = placement.rank_loads(np.ones((placement.num_layers, placement.num_experts)), args.ep_size)
    number = placement.replica_count
    _print(
        f"{path}: {placement.num_layers} layers, {placement.num_experts} experts, {placement.num_replicas} slots, "
        f"{placement.num_replicas // loads.shape[1]} on each of {args.ep_size} ranks"
    )
    _print(f"experts with replicas: {float((number > 1).sum(axis=1).mean()):.1f} a layer, at most {number.max()} slots")
    for task, ids in tasks.items():
        _require_layers(ids, placement, task)
        load = count(ids, placement.num_experts)
        _print(_scores({f"{path.name}, {task}": placement}, load, args.ep_size))


def _tasks(args: argparse.Namespace, names: list[str] | None) -> dict[str, Ids]:
    found = read_tasks(Path(args.routing_file))
    for name in names or ():
        if name not in found:
            raise ValueError(f"--routing_file {args.routing_file} has no array {name!r}; it has {', '.join(found)}")
    chosen = {name: found[name] for name in names} if names else found
    layers = {name: ids.shape[0] for name, ids in chosen.items()}
    if len(set(layers.values())) != 1:
        raise ValueError(f"--routing_file {args.routing_file}: arrays differ in layers: {layers}")
    return chosen


def _group(args: argparse.Namespace, tasks: dict[str, Ids]) -> Group:
    num_experts = args.num_experts
    if num_experts is None:
        num_experts = 1 + max(int(ids.max()) for ids in tasks.values())
        if num_experts == 0:
            raise ValueError(
                f"--routing_file {args.routing_file} names no expert, only -1: --num_experts says how many"
            )
    slots = num_experts if args.slots is None else args.slots
    if slots < num_experts:
        raise ValueError(f"--slots {slots} is less than --num_experts {num_experts}: every expert needs a slot")
    if slots % args.ep_size:
        raise ValueError(f"--slots {slots} is not a multiple of --ep_size {args.ep_size}")
    return Group(num_experts, slots, args.num_groups, args.num_nodes, args.ep_size)


def _read(path: Path, num_experts: int) -> Placement:
    if path.suffix in _YAML:
        return formats.read_tensorrt_llm(path, num_experts).placement
    if path.suffix not in _SGLANG:
        raise ValueError(f"{path} ends in {path.suffix!r}, allowed are {', '.join(_SGLANG)}, {' and '.join(_YAML)}")
    return formats.read_sglang(path, num_experts)


def _require_layers(ids: Ids, placement: Placement, task: str) -> None:
    if ids.shape[0] != placement.num_layers:
        raise ValueError(f"array {task!r} has {ids.shape[0]} layers, the placement {placement.num_layers}")


def _scores(rows: dict[str, Placement], load: Any, ep_size: int) -> Table:
    table = _table("placement", "max/mean", "worst layer", "its max/mean")
    for name, placement in rows.items():
        ratio = placement.imbalance(load, ep_size)
        worst = int(ratio.argmax())
        table.add_row(name, f"{ratio.mean():.3f}", str(worst), f"{ratio[worst]:.3f}")
    return table


def _phases(phases: list[Phase], cost: Cost, expert_bytes: int, num_layers: int) -> Table:
    table = _table("task", *(f"{way}, max/mean" for way in WAYS), "own plan, whole task", "online, whole task")
    for way in WAYS:
        table.add_column(f"{way}, step us", justify="right")
    table.add_column("moved", justify="right")
    for phase in phases:
        table.add_row(
            phase.task,
            *(f"{np.mean(phase.ratios[way]):.3f}" for way in WAYS),
            f"{phase.own:.3f}",
            f"{phase.fits[-1]:.3f}",
            *(f"{_step_us(phase, cost, way, num_layers):.1f}" for way in WAYS),
            f"{sum(phase.moves)} experts, {sum(phase.moves) * expert_bytes / 1e9:.1f} GB",
        )
    return table


def _step_us(phase: Phase, cost: Cost, way: str, num_layers: int) -> float:
    """Time of a layer in us; moves of an iteration are spread over its layers."""
    moved = float(np.mean(phase.moved_bytes)) / num_layers if way == "online" else 0.0
    return cost.step_us(float(np.mean(phase.hottest[way])), moved)


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _print(what: str | Table) -> None:
    Console(width=None if isinstance(what, str) else 160, soft_wrap=isinstance(what, str), highlight=False).print(what)
