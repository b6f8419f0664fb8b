"""`python -m putget_transfer.kv`: what a request's transfer comes to, and how long it takes.

Neither `plan` nor `simulate` needs a GPU or a network. `bench` measures between two processes of this machine.
"""

from __future__ import annotations

import argparse
import sys

from putget_transfer.kv import _bench_command, _simulate_command
from putget_transfer.kv._models import Model, geometry
from putget_transfer.kv._native import plan

AT_LEAST_ONE = ("tokens", "layers", "kv_heads", "prefill_tp", "decode_tp", "prefill_page_tokens", "decode_page_tokens")


def _add_plan(command: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("tokens", 4096, "tokens of the prefill"),
        ("first_token", 0, "the first that the target does not have"),
        ("segment_tokens", 1024, "tokens that leave together"),
        ("layers", 61, "layers of the model"),
        ("kv_heads", 1, "heads of keys and values; 1 is a latent cache (MLA)"),
        ("head_bytes", 1152, "bytes of one head's token, for keys or values"),
        ("context_bytes", 0, "bytes that travel beside the pages"),
        ("prefill_tp", 1, "prefill ranks"),
        ("decode_tp", 1, "decode ranks"),
        ("prefill_page_tokens", 64, "tokens of a prefill page"),
        ("decode_page_tokens", 64, "tokens of a decode page"),
    ):
        command.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    command.add_argument("--prefill_layout", default="LBHNC", help="order of dimensions (default LBHNC)")
    command.add_argument("--decode_layout", default="LBHNC", help="order of dimensions (default LBHNC)")
    command.add_argument("--target", type=int, default=0, help="the decode rank to plan for (default 0)")
    command.add_argument("--request_id", default="request", help="the request's name (default request)")
    command.set_defaults(run=_show_plan)


def _show_plan(options: argparse.Namespace) -> None:
    for name in AT_LEAST_ONE:
        if getattr(options, name) < 1:
            raise ValueError(f"{name}: {getattr(options, name)} came; at least 1 is needed")
    if not 0 <= options.target < options.decode_tp:
        raise ValueError(f"target: {options.target} came; decode ranks are 0 to {options.decode_tp - 1} (decode_tp)")
    model = Model(
        layers=options.layers,
        kv_heads=options.kv_heads,
        head_bytes=options.head_bytes,
        context_bytes=options.context_bytes,
    )
    prefill = (options.prefill_tp, options.prefill_layout, options.prefill_page_tokens)
    sources = [geometry(model, options.tokens, rank, *prefill) for rank in range(options.prefill_tp)]
    decode = (options.decode_tp, options.decode_layout, options.decode_page_tokens)
    found = plan(
        sources,
        geometry(model, options.tokens, options.target, *decode),
        request_id=options.request_id,
        tokens=options.tokens,
        first_token=options.first_token,
        segment_tokens=options.segment_tokens,
    )
    sys.stdout.write(found.show())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m putget_transfer.kv", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    _add_plan(commands.add_parser("plan", help="print a request's plan"))
    simulate = "say when a prompt's cache is at the decoder, with layer-wise transfer and without"
    _simulate_command.add(commands.add_parser("simulate", help=simulate))
    bench = "time requests between two processes of this machine"
    _bench_command.add(commands.add_parser("bench", help=bench))
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    top = parser()
    options = top.parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        top.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
