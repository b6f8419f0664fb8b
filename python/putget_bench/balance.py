"""The flags of `putget balance` and its actions."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds plan, simulate, report and show."""
    parser.description = "Plans where experts lie from recorded routing, and shows what a plan is worth."
    actions = parser.add_subparsers(dest="action", required=True, metavar="{plan,simulate,report,show}")
    _add_plan(actions.add_parser("plan", help="plan a placement and write it", allow_abbrev=False))
    _add_simulate(actions.add_parser("simulate", help="no balancer, static and online", allow_abbrev=False))
    _add_report(actions.add_parser("report", help="what recorded routing is like", allow_abbrev=False))
    _add_show(actions.add_parser("show", help="what a placement is", allow_abbrev=False))


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_group(parser)
    add = parser.add_argument
    add("--task", metavar="NAME", help="the array of the routing file to plan from (all of them)")
    add("--previous", metavar="FILE", help="the placement in force: few experts move")
    add("--max_moves", type=int, metavar="N", help="most experts that ranks get in a layer; needs --previous")
    add("--min_gain", type=float, metavar="X", help="least gain of max/mean of a layer that moves; needs --previous")
    add("--output_file", metavar="FILE", help="write it: SGLang's .json or .pt, TensorRT-LLM's .yaml")
    add("--first_layer", type=int, default=0, metavar="N", help="the model's first layer with experts, for .yaml")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    _add_group(parser)
    add = parser.add_argument
    add("--tasks", metavar="LIST", help="arrays of the routing file in turn, comma-separated (all, by name)")
    add("--iterations", type=int, default=100, metavar="N", help="iterations of each task (%(default)s)")
    add("--tokens", type=int, default=1024, metavar="N", help="tokens of all ranks in an iteration (%(default)s)")
    add("--interval", type=int, default=10, metavar="N", help="iterations between online plans (%(default)s)")
    add("--window", type=int, metavar="N", help="iterations that online plans look at (all)")
    add("--decay", type=float, default=0.9, metavar="X", help="weight of an iteration in the next (%(default)s)")
    add("--max_moves", type=int, metavar="N", help="most experts that ranks get in a layer and plan (any)")
    add("--expert_bytes", type=int, default=44_040_192, metavar="N", help="bytes of an expert (%(default)s)")
    add(
        "--most_bytes",
        type=int,
        default=44_040_192,
        metavar="N",
        help="that a rank moves in an iteration (%(default)s)",
    )
    add("--cells", type=int, default=2, metavar="N", help="experts that come to a rank in a batch (%(default)s)")
    add("--row_bytes", type=int, default=7392, metavar="N", help="bytes of a token's row (%(default)s)")
    add("--link_gbps", type=float, default=400.0, metavar="X", help="GB/s into a rank (%(default)s)")
    add("--row_ns", type=float, default=50.0, metavar="X", help="time of the experts for a row (%(default)s)")
    add("--plot", metavar="FILE", help="draw max/mean and moves over iterations (.png, .svg, .pdf)")


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_group(parser)
    add = parser.add_argument
    add("--tasks", metavar="LIST", help="arrays of the routing file, comma-separated (all, by name)")
    add("--batches", default="64,256,1024", metavar="LIST", help="tokens of small batches (%(default)s)")
    add("--plot", metavar="FILE", help="draw experts' loads, layers and small batches (.png, .svg, .pdf)")


def _add_show(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="SGLang's .json or .pt, or TensorRT-LLM's .yaml")
    add("--ep_size", type=int, required=True, metavar="N", help="ranks")
    add("--num_experts", type=int, required=True, metavar="N", help="experts of a layer")
    add("--routing_file", metavar="FILE", help="score it: .npz of integer [layers, tokens, top_k]")


def _add_group(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--routing_file", required=True, metavar="FILE", help="recorded: .npz of integer [layers, tokens, top_k]")
    add("--ep_size", type=int, required=True, metavar="N", help="ranks")
    add("--slots", type=int, metavar="N", help="slots of all ranks (as many as experts)")
    add("--num_experts", type=int, metavar="N", help="experts of a layer (the largest id in the file, plus 1)")
    add("--num_groups", type=int, default=1, metavar="N", help="groups of experts (%(default)s)")
    add("--num_nodes", type=int, default=1, metavar="N", help="hosts (%(default)s)")
