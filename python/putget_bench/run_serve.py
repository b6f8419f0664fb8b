"""`putget serve`: from words to ranks that answer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from putget_bench.flags import check_numbers
from putget_serve.ranks import serve
from putget_serve.settings import Settings

_CPU_RANKS = 2


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Serves until a signal comes.

    Raises:
        ValueError: A setting is wrong.
        PutgetError: A rank did not come to answer.
    """
    del words
    count = torch.cuda.device_count()
    device = ("cuda" if count > 1 else "cpu") if args.device == "auto" else args.device
    ep_size = args.ep_size if args.ep_size is not None else count if device == "cuda" else _CPU_RANKS
    args.ep_size = ep_size
    check_numbers(args, "ep_size", "max_tokens_per_rank", "stream_interval")
    check_numbers(args, "timeout_s", "setup_timeout_s", low=0, above=True)
    for name in ("cache_tokens", "num_slots"):
        if getattr(args, name) is not None:
            check_numbers(args, name)
    return serve(
        Settings(
            path=args.path,
            ep_size=ep_size,
            device=device,
            host=args.host,
            port=args.port,
            dtype=args.dtype,
            max_tokens_per_rank=args.max_tokens_per_rank,
            cache_tokens=args.cache_tokens,
            stream_interval=args.stream_interval,
            num_slots=args.num_slots,
            balance=args.balance,
            timeout_s=args.timeout_s,
            setup_timeout_s=args.setup_timeout_s,
        )
    )
