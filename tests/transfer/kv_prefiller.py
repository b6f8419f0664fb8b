"""A prefill rank in a process of its own, driven by lines on its standard input; it answers each with a line."""

from __future__ import annotations

import sys
import time

import numpy as np

import putget_transfer as pt
from putget_transfer import kv

LAYERS, PAGES, TOKENS, BYTES = 4, 64, 4, 4096
HEARTBEAT_S = (0.1, 4.0)
"""A peer that lives may get no processor for seconds."""
LEASE_S = 6.0
GIVEN_UP = ("cancelled", "expired")
"""How pages come back that their decoder has given up; expired: its cancel came before the prefill began."""


def engine(network: str) -> pt.Engine:
    """Return an engine that notices lost peers in a few seconds."""
    group = pt.DeviceGroup.host(1) if network == "host" else pt.DeviceGroup.tcp(["127.0.0.1"])
    builder = pt.Engine.builder().group(group).heartbeat(*HEARTBEAT_S).connect_timeout(5.0).grace(0.3)
    return builder.build()


def cache(owner: pt.Engine, num_pages: int = PAGES) -> tuple[np.ndarray, kv.KvCache]:
    """Return pages and the cache of a rank."""
    pages = np.zeros([LAYERS, num_pages, TOKENS, BYTES], dtype=np.uint8)
    common = {"layout": "LBNC", "page_tokens": TOKENS, "num_kv_heads": 1, "packed": False, "context_bytes": 8}
    return pages, kv.KvCache(owner, {"model": pages}, **common)


def main() -> None:
    """Carry out lines: `begin`, `layers`, `finish` and `released`."""
    own = engine(sys.argv[1])
    memory, described = cache(own)
    prefiller = kv.Prefiller(described, lease_s=LEASE_S)
    print(prefiller.source().hex(), flush=True)
    step, pages, ended = 0, {}, []
    for line in sys.stdin:
        command, name, *number = line.split()
        if command == "begin":
            step, value, count = step + 1, int(number[0]), int(number[1])
            pages[name] = list(range(count))
            memory[:, pages[name]] = value
            prefiller.begin_step(step, [(name, count * TOKENS, [pages[name]])])
        elif command == "layers":
            prefiller.layer_done(int(number[0]) - 1)
        elif command == "finish":
            prefiller.finish(name, b"first")
        elif command == "released":
            while name not in dict(ended):
                ended += prefiller.poll()
                time.sleep(0.001)
        print(dict(ended).get(name, "done"), flush=True)
    own.close()


if __name__ == "__main__":
    main()
