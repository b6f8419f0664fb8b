"""A decode rank in a process of its own, driven by lines on its standard input; it answers each with a line."""

from __future__ import annotations

import sys
import time

import numpy as np

from putget_transfer import kv
from tests.transfer import kv_prefiller
from tests.transfer.kv_process import WAIT_S


def end(memory: np.ndarray, pages: list[int], receive: kv.Receive) -> str:
    """Wait for a request; return how it ended: "arrived" with the values of its pages, or "failed" with the reason."""
    try:
        receive.wait(WAIT_S)
    except kv.ReceiveFailed as error:
        return f"failed {error}"
    return f"arrived {np.unique(memory[:, pages]).tolist()}"


def main() -> None:
    """Carry out lines: `ask`, `accepted`, `cancel` and `end`."""
    own = kv_prefiller.engine(sys.argv[1])
    memory, described = kv_prefiller.cache(own)
    decoder = kv.Decoder(described, max_requests=16, confirm_s=1.0)
    print("ready", flush=True)
    receives: dict[str, tuple[list[int], kv.Receive]] = {}
    for line in sys.stdin:
        command, name, *more = line.split()
        answer = "done"
        if command == "ask":
            pages = list(range(int(more[1])))
            sources = decoder.sources([bytes.fromhex(more[0])])
            tokens = len(pages) * kv_prefiller.TOKENS
            receive = decoder.request(sources, name, [pages], tokens=tokens, segment_tokens=32, deadline_s=600)
            receives[name] = pages, receive
        elif command == "accepted":
            while receives[name][1].state == "asked":
                time.sleep(0.001)
        elif command == "cancel":
            receives[name][1].cancel()
        elif command == "end":
            answer = end(memory, *receives[name])
        print(answer.replace("\n", " "), flush=True)
    own.close()


if __name__ == "__main__":
    main()
