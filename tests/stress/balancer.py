"""Experts that move for a long time: python -m tests.stress.balancer --ranks 8 --iterations 20000 (on the CPU).

Every iteration has 2 or 4 rounds of 0 to 5 tokens on each rank, each held against what it must be; all ranks must have
had the same placements. CI runs the same for a short time (tests/balancer/test_online.py).
"""

from __future__ import annotations

import argparse
import time

from tests.balancer.online import serve_many
from tests.harness import fresh_ranks

# A window an iteration: all loads travel in one.
OPTIONS = {"interval": 1, "num_stats": 26}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds")
    args = parser.parse_args()
    since = time.monotonic()
    with fresh_ranks(args.ranks) as ranks:
        bodies = ranks.call(serve_many, args.iterations, args.seed, OPTIONS, timeout=args.timeout)
    found = list(bodies.values())
    moving = min(one.pop("moving") for one in found)  # hosts plan in their own time
    assert all(one == found[0] for one in found), "ranks differ"
    assert found[0]["right"], "a slot has another expert than the placement says"
    print(
        f"{args.ranks} ranks, {args.iterations} iterations, {3 * args.iterations} rounds: "
        f"{found[0]['windows']} windows, {found[0]['moves']} moves, "
        f"a plan or experts on their way in {moving} iterations, "
        f"{time.monotonic() - since:.0f} s"
    )


if __name__ == "__main__":
    main()
