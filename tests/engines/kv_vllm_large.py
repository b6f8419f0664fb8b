"""vLLM's servers under cancels and faults, and servers whose numbers of ranks differ.

python -m tests.engines.kv_vllm_large FOLDER CASE...: writes FOLDER/CASE.json. FOLDER/8 becomes the model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.engines.generate_vllm import preload
from tests.engines.kv_vllm_serve import ANSWER_S, TIMEOUT_S, Servers
from tests.engines.models import save_models

REQUESTS, AT_ONCE = 30, 6
CANCELLED = {4: 0, 11: 1, 17: 3, 26: 0}
"""Requests whose clients go away, and after how many tokens."""
KILLED_AFTER, STOPPED_AFTER = 8, 18
"""Requests that are over when a prefill server is killed, and when the decode server is stopped."""
RANKS = ("--data-parallel-size", 2, "--api-server-count", 1, "--enable-expert-parallel")
IDLE_S = 120.0
ROUNDS = 3
"""How often six more requests are sent when all is well again. A rank that stood still learns it with its first one."""


def streamed(servers: Servers, name: str, number: int, most: int | None = None) -> list[int]:
    """The tokens of a request as they come. With `most`, the client goes away after so many."""
    found: list[int] = []
    with httpx.stream(
        "POST", f"{servers.urls[name]}/v1/completions", json=servers.asked(number, stream=True), timeout=ANSWER_S
    ) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"request {number} at {name}: {answer.status_code} {answer.read()!r}")
        for event in events(answer) if most != 0 else ():
            if "error" in event:
                raise SystemExit(f"request {number} at {name}: {event}")
            found += event["choices"][0]["token_ids"]
            if most is not None and len(found) >= most:
                break
    return found


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, which has to end as such."""
    for line in answer.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise SystemExit("a stream broke off")


def faults(servers: Servers, over: list[int]) -> None:
    """Kill one prefill server; stop the decode server for two timeouts."""
    while len(over) < KILLED_AFTER:
        time.sleep(0.01)
    servers.end("one")
    while len(over) < STOPPED_AFTER:
        time.sleep(0.01)
    servers.signal("decode", signal.SIGSTOP)
    time.sleep(2 * TIMEOUT_S)
    servers.signal("decode", signal.SIGCONT)


def usage(servers: Servers, name: str) -> float:
    """How much of a server's cache is taken, or how many requests it has."""
    text = httpx.get(f"{servers.urls[name]}/metrics", timeout=ANSWER_S).text
    kinds = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(kinds))


def ends(servers: Servers) -> dict[str, int]:
    """How the decode server's receives have ended so far."""
    return {end: servers.count("decode", end) for end in ("arrived", "failed")}


def again(servers: Servers, pool: ThreadPoolExecutor, found: dict[str, Any]) -> dict[str, Any]:
    """Six more requests, and how their receives have ended."""
    before = ends(servers)
    texts = list(pool.map(lambda number: streamed(servers, "router", number), range(AT_ONCE)))
    end = time.monotonic() + IDLE_S
    while sum((now := ends(servers)).values()) < sum(before.values()) + AT_ONCE and time.monotonic() < end:
        # Counts come with a later step.
        time.sleep(0.1)
    return {"right": texts == found["alone"][:AT_ONCE], **{name: now[name] - before[name] for name in now}}


def large(servers: Servers) -> dict[str, Any]:
    servers.start("one", "kv_producer")
    servers.start("two", "kv_producer")
    servers.start("decode", "kv_consumer", *RANKS, policy="recompute")
    servers.wait()
    servers.route("router", ["one", "two"], "decode", "decode")
    servers.wait()
    over: list[int] = []
    found: dict[str, Any] = {}

    def through(number: int) -> list[int]:
        try:
            return streamed(servers, "router", number, CANCELLED.get(number))
        finally:
            over.append(number)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found["alone"] = list(pool.map(lambda number: servers.tokens("decode", number), range(REQUESTS)))
        breaking = threading.Thread(target=faults, args=(servers, over))
        breaking.start()
        found["routed"] = list(pool.map(through, range(REQUESTS)))
        breaking.join()
        found["ends"] = ends(servers)
        found["after"] = [again(servers, pool, found) for _ in range(ROUNDS)]
    end = time.monotonic() + IDLE_S
    found["busy"] = ["decode", "two"]
    while found["busy"] and time.monotonic() < end:
        found["busy"] = [name for name in ("decode", "two") if usage(servers, name) > 0]
        time.sleep(0.2)
    return found


TENSOR, PIPELINE = ("--tensor-parallel-size", 2), ("--pipeline-parallel-size", 2)
WIDTHS: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "one to two": ((), TENSOR),
    "two to one": (TENSOR, ()),
    "a pipeline of two to one": (PIPELINE, ()),
}
"""Prefill and decode servers' ranks."""


def widths(servers: Servers) -> dict[str, Any]:
    """Prompts between servers of unlike numbers of ranks, one pair after the other."""
    found: dict[str, Any] = {"arrived": {}}
    for name, (prefill, decode) in WIDTHS.items():
        servers.start("prefill", "kv_producer", *prefill)
        servers.start("decode", "kv_consumer", *decode)
        servers.wait()
        servers.route("router", ["prefill"], "decode", "decode")
        servers.wait()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found[name] = list(pool.map(lambda number: streamed(servers, "router", number), range(AT_ONCE)))
            found["arrived"][name] = servers.count("decode", "arrived")
            if decode == ():
                found["alone"] = list(pool.map(lambda number: servers.tokens("decode", number), range(AT_ONCE)))
        for server in ("router", "prefill", "decode"):
            servers.end(server)
    return found


CASES = {"large": large, "widths": widths}


def main(folder: Path, cases: list[str]) -> None:
    fork = preload()
    save_models(folder, ["8"])
    import vllm.entrypoints.cli.main  # noqa: F401 - servers are forked with it

    for case in cases:
        start = time.monotonic()
        with Servers(folder, fork).running() as servers:
            found = CASES[case](servers)
        found["seconds"] = time.monotonic() - start
        (folder / f"{case}.json").write_text(json.dumps(found))
        print(f"{case}: {found['seconds']:.0f} s", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
