"""Numbers that flags give, and errors of the library in the flags' words."""

from __future__ import annotations

import argparse
import math
import re

_MOST = (1 << 31) - 1
# Arguments of the library, and the flags that give them.
_FLAGS = {
    "num_replicas": "--slots",
    "num_gpus": "--ep_size",
    "num_tokens": "--tokens",
    **{
        name: f"--{name}"
        for name in (
            "num_groups",
            "num_nodes",
            "num_experts",
            "max_moves",
            "min_gain",
            "first_layer",
            "window",
            "decay",
            "cells",
            "ep_size",
            "domain_size",
            "top_k",
            "chunk_rows",
            "seed",
        )
    },
}
_WORDS = re.compile(rf"(?<![\w.'/-])({'|'.join(_FLAGS)})(?![\w.'/\]-])")


def check_numbers(args: argparse.Namespace, *names: str, low: float = 1, above: bool = False) -> None:
    """Numbers of flags that are given: finite, from `low` on, or above it, and no larger than 2^31 - 1, or any float.

    Raises:
        ValueError: One is not; the message names its flag.
    """
    for name in names:
        value = getattr(args, name)
        if value is None:
            continue
        is_right = math.isfinite(value) and (value > low if above else value >= low)
        if not is_right or (isinstance(value, int) and name not in _BYTES and value > _MOST):
            raise ValueError(f"--{name} is {value}, allowed are numbers {'above' if above else 'from'} {low:g} on")


_BYTES = ("expert_bytes", "most_bytes", "row_bytes")


def in_flags(message: str) -> str:
    """An error of the library, which names its arguments, with the names of flags."""
    words = _WORDS.sub(lambda found: _FLAGS[found.group(1)], message)
    return re.sub(r"^previous(?=[ :])", "--previous", words)
