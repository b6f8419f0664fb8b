"""All of putget in servers of SGLang at once: the recipe of docs/guides/engines/sglang.md on CPU ranks.

python -m tests.engines.recipe_sglang FOLDER REQUESTS: writes FOLDER/recipe.json. A prefill server, and a decode server
of two ranks of attention data parallelism and expert parallelism with a balancer and a stream interval, behind SGLang's
router. SGLang has no draft tokens beside attention data parallelism. Texts are compared with those of one server
without putget.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import requests

from putget_transfer.adapters import sglang
from tests.engines.generate_sglang import CASES, patch, preload
from tests.engines.kv_sglang_serve import Pair, Program, Server, prompt_of, route
from tests.engines.models import save_models
from tests.engines.prompts import free_port

NEW_TOKENS = 24
AT_ONCE, ANSWER_S = 6, 60.0
STOPPED_S = 10.0
"""How long a worker of the decode server stands still, in the middle of the requests."""
PATIENCE_S = 40.0
"""The silence after which a peer counts as down: longer than that."""
STREAM_INTERVAL = 5
# Each rank has the whole head: on a CPU there is no all-to-all of logits.
DECODE = {
    **CASES["eplb"],
    "enable_dp_lm_head": True,
    "stream_interval": STREAM_INTERVAL,
    "enable_pd_role_switch": False,
}


def streamed(program: Program, number: int) -> tuple[list[int], int]:
    """The tokens of a request as they come, and in how many events."""
    wanted = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt_of(number), "sampling_params": wanted, "stream": True}
    tokens: list[int] = []
    events = 0
    with requests.post(f"{program.url}/generate", json=body, timeout=ANSWER_S, stream=True) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line == b"data: [DONE]":
                return tokens, events
            if line:
                told = json.loads(line.removeprefix(b"data: "))
                if "error" in told:
                    raise SystemExit(f"request {number}: {told}")
                tokens, events = told["output_ids"], events + 1
    raise SystemExit(f"the stream of request {number} broke off")


def stand_still(server: Server, over: list[int], after: int, found: dict[str, Any]) -> None:
    """Stops one worker of a server once so many requests are over."""
    while len(over) < after:
        time.sleep(0.01)
    children = psutil.Process(server.process.pid).children(recursive=True)
    ranks = [child for child in children if "scheduler" in " ".join(child.cmdline())]
    found["workers"] = len(ranks)
    ranks[-1].send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    ranks[-1].send_signal(signal.SIGCONT)


def recipe(folder: Path, number: int, running: list[Program]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    over: list[int] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        alone = Server(folder, None)
        running.append(alone)
        alone.ready()
        found["alone"] = [tokens for tokens, _ in pool.map(lambda at: streamed(alone, at), range(number))]
        alone.kill()
        pair = Pair(
            Server(folder, "prefill", timeout_s=PATIENCE_S, enable_pd_role_switch=False),
            Server(folder, "decode", timeout_s=PATIENCE_S, **DECODE),
        )
        running += [pair.prefill, pair.decoding]
        pair.prefill.ready()
        pair.decoding.ready()
        port = free_port()
        router = Program(port, route, pair.prefill.url, pair.prefill.bootstrap, pair.decoding.url, port)
        running.append(router)
        router.ready("/readiness")

        def through(at: int) -> tuple[list[int], int]:
            try:
                return streamed(router, at)
            finally:
                over.append(at)

        stopping = threading.Thread(target=stand_still, args=(pair.decoding, over, number // 2, found))
        stopping.start()
        routed = list(pool.map(through, range(number)))
        stopping.join()
    found["routed"] = [tokens for tokens, _ in routed]
    found["events"] = [events for _, events in routed]
    return found


def main(folder: Path, number: int) -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    preload()
    patch()
    sglang.install()
    save_models(folder, ["8"])
    importlib.import_module("sglang.srt.entrypoints.http_server")  # servers are forked with it
    start = time.monotonic()
    running: list[Program] = []
    try:
        found = recipe(folder, number, running)
    finally:
        for program in running:
            program.kill()
    found["seconds"] = time.monotonic() - start
    (folder / "recipe.json").write_text(json.dumps(found))
    print(f"recipe: {found['seconds']:.0f} s", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
