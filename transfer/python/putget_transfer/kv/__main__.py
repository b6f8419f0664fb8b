"""`python -m putget_transfer.kv plan`: what a request's transfer comes to, without a GPU or a network."""

from __future__ import annotations

import argparse
import sys

from putget_transfer.kv import Geometry, Region, plan, strides


def _heads(rank: int, tp: int, heads: int) -> tuple[int, int]:
    """Return the heads of a rank: some each, or one of which several ranks have a copy."""
    if tp >= heads:
        head = rank * heads // tp
        return head, head + 1
    return rank * heads // tp, (rank + 1) * heads // tp


def geometry(options: argparse.Namespace, rank: int, tp: int, layout: str, page_tokens: int) -> Geometry:
    """Return the geometry of one rank of a model that is described by options."""
    heads = _heads(rank, tp, options.kv_heads)
    held, planes = heads[1] - heads[0], 1 if options.kv_heads == 1 else 2
    pages = -(-options.tokens // page_tokens)
    content = planes * options.head_bytes
    layers, page, head, token = strides(layout, (options.layers, pages, held, page_tokens, content))
    regions = [
        Region(
            name=f"layer{layer}",
            layer=layer,
            num_pages=pages,
            page_tokens=page_tokens,
            num_heads=options.kv_heads,
            heads=heads,
            head_bytes=options.head_bytes,
            page_stride=page,
            token_stride=token,
            head_stride=head,
            planes=planes,
            plane_stride=options.head_bytes if planes == 2 else 0,
            offset=layer * layers,
        )
        for layer in range(options.layers)
    ]
    memory = [options.layers * pages * held * page_tokens * content]
    return Geometry("plan", regions, memory, rank=rank, context_bytes=options.context_bytes)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m putget_transfer.kv", description=__doc__)
    command = top.add_subparsers(dest="command", required=True).add_parser("plan", help="print a request's plan")
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
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    top = parser()
    options = top.parse_args(arguments)
    try:
        if min(options.prefill_tp, options.decode_tp, options.layers, options.kv_heads) < 1:
            raise ValueError("prefill_tp, decode_tp, layers and kv_heads: each is at least 1")
        if min(options.tokens, options.prefill_page_tokens, options.decode_page_tokens) < 1:
            raise ValueError("tokens, prefill_page_tokens and decode_page_tokens: each is at least 1")
        prefill = (options.prefill_tp, options.prefill_layout, options.prefill_page_tokens)
        sources = [geometry(options, rank, *prefill) for rank in range(options.prefill_tp)]
        target = geometry(options, options.target, options.decode_tp, options.decode_layout, options.decode_page_tokens)
        found = plan(
            sources,
            target,
            request_id=options.request_id,
            tokens=options.tokens,
            first_token=options.first_token,
            segment_tokens=options.segment_tokens,
        )
    except ValueError as error:
        top.error(str(error))
    sys.stdout.write(found.show())
    return 0


if __name__ == "__main__":
    sys.exit(main())
