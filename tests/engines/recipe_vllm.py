"""All of putget in servers of vLLM at once: the recipe of docs/guides/engines/vllm.md on CPU ranks.

python -m tests.engines.recipe_vllm FOLDER REQUESTS: writes FOLDER/recipe.json. A prefill server, and a decode server of
two ranks of data and expert parallelism with a balancer, draft tokens (GLM4-MoE's own layer for them) and a stream
interval, behind the router. Texts are compared with those of one server without putget.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.engines.generate_vllm import preload
from tests.engines.kv_vllm_large import AT_ONCE, ends, streamed
from tests.engines.kv_vllm_serve import Servers
from tests.engines.models import save_glm4

NEW_TOKENS = 24
STOPPED_S = 10.0
"""How long a worker of the decode server stands still, in the middle of the requests."""
STREAM_INTERVAL = 5
DRAFT = {"method": "mtp", "num_speculative_tokens": 3}
BALANCER = {"window_size": 8, "step_interval": 8, "num_redundant_experts": 2, "use_async": False}
BALANCER |= {"communicator": "torch_gloo", "log_balancedness": False}
DRAFTS = ("--speculative-config", json.dumps(DRAFT))
RANKS = ("--data-parallel-size", 2, "--api-server-count", 1, "--enable-expert-parallel")
DECODE = (*RANKS, *DRAFTS, "--enable-eplb", "--eplb-config", json.dumps(BALANCER), "--stream-interval", STREAM_INTERVAL)


def workers(servers: Servers, name: str) -> list[psutil.Process]:
    """The processes of a server that hold the model's ranks."""
    found = [process for process in servers.tree(name) if "Worker" in "".join(process.cmdline())]
    return sorted(found, key=lambda process: process.pid)


def stand_still(servers: Servers, over: list[int], after: int, found: dict[str, Any]) -> None:
    """Stops one worker of the decode server once so many requests are over."""
    while len(over) < after:
        time.sleep(0.01)
    ranks = workers(servers, "decode")
    found["workers"] = len(ranks)
    ranks[-1].send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    ranks[-1].send_signal(signal.SIGCONT)


def speculation(servers: Servers) -> dict[str, int]:
    """Draft tokens of the decode server so far, and how many of them were right."""
    import httpx

    text = httpx.get(f"{servers.urls['decode']}/metrics").text
    names = {"drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    sums = {}
    for key, name in names.items():
        lines = re.findall(rf"^vllm:spec_decode_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
        sums[key] = int(sum(map(float, lines)))
    return sums


def recipe(servers: Servers, requests: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    over: list[int] = []

    def through(number: int) -> list[int]:
        try:
            return streamed(servers, "router", number)
        finally:
            over.append(number)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        servers.start("alone", "kv_both")
        servers.wait()
        found["alone"] = list(pool.map(lambda number: servers.tokens("alone", number), range(requests)))
        servers.end("alone")
        servers.start("prefill", "kv_producer", *DRAFTS)
        servers.start("decode", "kv_consumer", *DECODE, policy="recompute")
        servers.wait()
        servers.route("router", ["prefill"], "decode", "decode")
        servers.wait()
        stopping = threading.Thread(target=stand_still, args=(servers, over, requests // 2, found))
        stopping.start()
        found["routed"] = list(pool.map(through, range(requests)))
        stopping.join()
    found["ends"] = ends(servers)
    found["drafts"] = speculation(servers)
    return found


def main(folder: Path, requests: int) -> None:
    fork = preload()
    saver = fork.Process(target=save_glm4, args=(folder / "glm4",))
    saver.start()
    saver.join()
    if saver.exitcode:
        raise SystemExit(f"the model was not saved: {saver.exitcode}")
    import vllm.entrypoints.cli.main  # noqa: F401 - servers are forked with it
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.glm4_moe import Glm4MoeForCausalLM
    from vllm.model_executor.models.glm4_moe_mtp import Glm4MoeMTP

    ModelRegistry.register_model("Glm4MoeForCausalLM", Glm4MoeForCausalLM)  # else a process looks at each
    ModelRegistry.register_model("Glm4MoeMTPModel", Glm4MoeMTP)
    start = time.monotonic()
    with Servers(folder, fork, "glm4", NEW_TOKENS).running() as servers:
        found = recipe(servers, requests)
    found["seconds"] = time.monotonic() - start
    (folder / "recipe.json").write_text(json.dumps(found))
    print(f"recipe: {found['seconds']:.0f} s", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
