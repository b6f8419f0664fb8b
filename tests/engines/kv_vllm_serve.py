"""Prefill and decode servers of vLLM with putget's connector, and its router in front of them.

python -m tests.engines.kv_vllm_serve FOLDER CASE...: writes FOLDER/CASE.json. FOLDER/8 is the model. Servers are forked
from a process that has imported vLLM.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

import httpx
import psutil

from putget_transfer.adapters import router
from putget_transfer.adapters.vllm import NAME
from tests.engines import kv_vllm_stages
from tests.engines.prompts import free_port

START_S, ANSWER_S = 600.0, 300.0
TIMEOUT_S = 3.0
"""The silence after which a peer counts as down."""
NEW_TOKENS = 6
STREAMED = 3
"""Requests whose stages are noted, in each order."""


def prompt_of(number: int) -> list[int]:
    """Longer than a block of 32 tokens; their lengths differ."""
    return [random.Random(number * 1000 + at).randrange(1, 128) for at in range(35 + 7 * number % 60)]


def serve(model: Path, port: int, role: str, policy: str, more: tuple[object, ...]) -> None:
    """Runs the command `vllm` with these arguments, and `more` behind them."""
    from vllm.entrypoints.cli.main import main

    transfer = {
        "kv_connector": NAME,
        "kv_connector_module_path": "putget_transfer.adapters.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "address": "127.0.0.1",
            "timeout_s": TIMEOUT_S,
            "confirm_s": TIMEOUT_S,
            "lease_s": 60,
            "deadline_s": 120,
            "segment_tokens": 32,
        },
    }
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--block-size": 32,
        "--max-model-len": 128,
        "--max-num-seqs": 4,
        "--max-num-batched-tokens": 64,
        "--kv-cache-memory-bytes": 1 << 22,
        "--seed": 0,
        "--kv-transfer-config": json.dumps(transfer),
    }
    flags = ["--skip-tokenizer-init", "--enforce-eager", "--no-enable-prefix-caching"]
    words = [str(word) for option in options.items() for word in option]
    sys.argv = ["vllm", "serve", str(model), *words, *flags, *map(str, more)]
    main()


class Servers:
    """Servers of a model by name, and the router's processes."""

    def __init__(self, folder: Path, fork: ForkContext, model: str = "8", new_tokens: int = NEW_TOKENS) -> None:
        self.model, self.fork, self.new_tokens = folder / model, fork, new_tokens
        self.processes: dict[str, ForkProcess] = {}
        self.urls: dict[str, str] = {}

    def start(self, name: str, role: str, *more: object, policy: str = "fail") -> None:
        port = free_port()
        self.processes[name] = self.fork.Process(target=serve, args=(self.model, port, role, policy, more))
        self.urls[name] = f"http://127.0.0.1:{port}"
        self.processes[name].start()

    def route(self, name: str, prefill: list[str], decode: str, order: str) -> None:
        port = free_port()
        words = [word for one in prefill for word in ("--prefill", self.urls[one])]
        words += ["--decode", self.urls[decode], "--order", order, "--port", str(port)]
        self.processes[name] = self.fork.Process(target=router.main, args=(words,))
        self.urls[name] = f"http://127.0.0.1:{port}"
        self.processes[name].start()

    def wait(self) -> None:
        """Wait until each serves."""
        end = time.monotonic() + START_S
        for name, url in self.urls.items():
            while True:
                if not self.processes[name].is_alive():
                    raise SystemExit(f"{name} ended with {self.processes[name].exitcode}")
                if time.monotonic() > end:
                    raise SystemExit(f"{name} does not serve after {START_S} s")
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health").is_success:
                        break
                time.sleep(0.2)

    def tree(self, name: str) -> list[psutil.Process]:
        process = psutil.Process(self.processes[name].pid)
        return [process, *process.children(recursive=True)]

    def signal(self, name: str, number: int) -> None:
        """Send a signal to all processes of a server."""
        for process in self.tree(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end(self, name: str) -> None:
        """Kill all processes of a server."""
        if not self.processes[name].is_alive():
            return
        self.signal(name, signal.SIGKILL)
        self.processes[name].join(60)
        del self.urls[name]

    @contextlib.contextmanager
    def running(self) -> Iterator[Servers]:
        try:
            yield self
        finally:
            for name in list(self.processes):
                with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                    self.end(name)

    def asked(self, number: int, **more: Any) -> dict[str, Any]:
        """A client's request for a prompt."""
        return {
            "model": str(self.model),
            "prompt": prompt_of(number),
            "max_tokens": self.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            **more,
        }

    def tokens(self, name: str, number: int) -> list[int]:
        answer = httpx.post(f"{self.urls[name]}/v1/completions", json=self.asked(number), timeout=ANSWER_S)
        if not answer.is_success:
            raise SystemExit(f"request {number} at {name}: {answer.status_code} {answer.text}")
        return list(answer.json()["choices"][0]["token_ids"])

    def count(self, name: str, end: str) -> int:
        """How many requests of a server ended so, of all its ranks."""
        text = httpx.get(f"{self.urls[name]}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(f"vllm:putget_kv_{end}_total")]
        return int(sum(float(line.split()[-1]) for line in lines))


def small(servers: Servers) -> dict[str, Any]:
    """One prefill and one decode server, in either order."""
    servers.start("prefill", "kv_producer")
    servers.start("decode", "kv_consumer")
    servers.wait()
    for order in router.ORDERS:
        servers.route(f"{order} first", ["prefill"], "decode", order)
    servers.wait()
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(6) as pool:
        for name in ("decode", "decode first", "prefill first"):
            found[name] = list(pool.map(lambda number, name=name: servers.tokens(name, number), range(6)))
    found["arrived"] = servers.count("decode", "arrived")
    # One by one, so that each stage is one request's.
    for order in router.ORDERS:
        bodies = [servers.asked(number, request_id=f"{order}-{number}") for number in range(STREAMED)]
        url = servers.urls[f"{order} first"]
        found[f"streamed {order} first"] = [asdict(kv_vllm_stages.ask(url, body)) for body in bodies]
    return found


CASES = {"small": small}


def main(folder: Path, cases: list[str]) -> None:
    import vllm.entrypoints.cli.main  # noqa: F401 - servers are forked with it

    fork = multiprocessing.get_context("fork")
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
