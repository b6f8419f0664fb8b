"""A worker of a server dies, or stands still for ever, while thirty streams run: when clients hear, and what stays.

python -m tests.engines.deaths vllm|sglang FOLDER HOW: prints one line of JSON. HOW is ``kill`` or ``stop``. With
PUTGET_ENGINE_TIMEOUT_S as a server would have it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

STREAMS, LIMIT_S, HEALTH_S = 30, 180.0, 2.0


def watch(
    stream: Callable[[int], Any], health: str, tree: list[psutil.Process], worker: psutil.Process, how: str
) -> dict[str, Any]:
    """Runs streams until each has failed. All times are seconds since the worker died, or stood still.

    Args:
        stream: Asks for a request's text; raises where there is none.
        health: The address that says whether the server serves.
        tree: The server's processes.
        worker: Which of them dies.
        how: ``kill`` or ``stop``.
    """
    failed: list[float] = []
    whole = [0]

    def streams(number: int) -> None:
        try:
            while True:
                stream(number)
                whole[0] += 1
        except (Exception, SystemExit):
            failed.append(time.monotonic())

    threads = [threading.Thread(target=streams, args=(number,), daemon=True) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    while whole[0] < STREAMS:
        time.sleep(0.01)
    worker.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    start = time.monotonic()
    told: dict[str, Any] = {"how": how, "whole before": whole[0]}
    while time.monotonic() < start + LIMIT_S and not {"unhealthy", "gone", "last client"} <= told.keys():
        if failed and "first client" not in told:
            told["first client"] = min(failed) - start
        if len(failed) == STREAMS:
            told.setdefault("last client", max(failed) - start)
        if not serves(health):
            told.setdefault("unhealthy", time.monotonic() - start)
        if not any(is_there(process) for process in tree):
            told.setdefault("gone", time.monotonic() - start)
        time.sleep(0.05)
    told["left"] = sum(map(is_there, tree))
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in told.items()}


def serves(url: str) -> bool:
    try:
        return httpx.get(url, timeout=HEALTH_S).is_success
    except httpx.HTTPError:
        return False


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def of_vllm(folder: Path, how: str) -> dict[str, Any]:
    from tests.engines.generate_vllm import preload
    from tests.engines.kv_vllm_large import RANKS, streamed
    from tests.engines.kv_vllm_serve import Servers
    from tests.engines.models import save_models
    from tests.engines.recipe_vllm import workers

    fork = preload()
    save_models(folder, ["8"])
    import vllm.entrypoints.cli.main  # noqa: F401 - servers are forked with it

    with Servers(folder, fork, new_tokens=24).running() as servers:
        servers.start("one", "kv_both", *RANKS)
        servers.wait()
        health = f"{servers.urls['one']}/health"
        tree = servers.tree("one")
        return watch(lambda number: streamed(servers, "one", number), health, tree, workers(servers, "one")[-1], how)


def of_sglang(folder: Path, how: str) -> dict[str, Any]:
    import importlib
    import multiprocessing

    from tests.engines.generate_sglang import EP2, patch, preload
    from tests.engines.kv_sglang_serve import Server
    from tests.engines.models import save_models
    from tests.engines.recipe_sglang import streamed

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    preload()
    patch()
    save_models(folder, ["8"])
    importlib.import_module("sglang.srt.entrypoints.http_server")
    server = Server(folder, None, **EP2)
    try:
        server.ready()
        tree = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        worker = [process for process in tree if "scheduler" in " ".join(process.cmdline())][-1]
        return watch(lambda number: streamed(server, number), f"{server.url}/health", tree, worker, how)
    finally:
        server.kill()


def main(engine: str, folder: Path, how: str) -> None:
    told = {"vllm": of_vllm, "sglang": of_sglang}[engine](folder, how)
    print("\n" + json.dumps({"engine": engine, **told}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
