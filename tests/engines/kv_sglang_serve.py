"""Whole servers of SGLang with putget's backend: one for prompts, one that decodes, token for token against one server.

python -m tests.engines.kv_sglang FOLDER writes FOLDER/served.json. FOLDER/8 is the model. SGLang's router is in front
where its package is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import requests

from putget_transfer.adapters import options
from putget_transfer.adapters.sglang import NAME
from tests.engines import kv_sglang_layers
from tests.engines.generate_sglang import arguments, free_ports
from tests.engines.prompts import free_port

START_S, ANSWER_S = 600.0, 300.0
TIMEOUT_S = 2.0
"""The silence after which a peer counts as down."""
NEW_TOKENS, REQUESTS, PAGE, CHUNK = 6, 8, 4, 16


def prompt_of(number: int) -> list[int]:
    """Prompts have several chunks of 16 tokens. Their lengths differ, and most end inside of a page."""
    return [random.Random(number * 1000 + at).randrange(1, 128) for at in range(21 + 7 * number % 40)]


def serve(folder: Path, role: str | None, port: int, bootstrap: int, timeout_s: float, more: dict[str, Any]) -> None:
    """Runs the command `sglang.launch_server` with these arguments, and `more`."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"  # NCCL comes with torch, and needs a GPU
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * more.get("tp_size", 1))
    given = {"address": "127.0.0.1", "timeout_s": timeout_s, "confirm_s": timeout_s, "segment_tokens": CHUNK}
    os.environ[options.VARIABLE] = json.dumps(given)
    chosen: dict[str, Any] = {"page_size": PAGE, "host": "127.0.0.1", "port": port, "chunked_prefill_size": CHUNK}
    chosen |= more
    if role is not None:
        chosen |= {"disaggregation_mode": role, "disaggregation_transfer_backend": NAME}
        chosen |= {"disaggregation_bootstrap_port": bootstrap}
        chosen.setdefault("enable_pd_role_switch", True)
        # The pool that decode servers keep for requests which they put off is registered with CUDA.
        chosen["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    if role == "prefill":
        kv_sglang_layers.watch(folder / "layers.json")
    run_server(ServerArgs(**arguments(folder / "8", **chosen)))


def route(prefill: str, bootstrap: int, decode: str, port: int) -> None:
    """Runs the router as the guide does."""
    from sglang_router.launch_router import main

    words = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", port, "--prefill", prefill, bootstrap]
    sys.argv = ["launch_router", *map(str, words), "--decode", decode]
    main()


class Program:
    """A process that answers over HTTP."""

    def __init__(self, port: int, target: Any, *given: Any) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.pool = ThreadPoolExecutor(2 * REQUESTS)
        self.process = multiprocessing.Process(target=target, args=given)
        self.process.start()

    def ready(self, path: str = "/health") -> None:
        """Wait until it serves."""
        end = time.monotonic() + START_S
        while True:
            if not self.process.is_alive():
                raise SystemExit(f"a server ended with {self.process.exitcode}")
            if time.monotonic() > end:
                raise SystemExit(f"{self.url} does not serve after {START_S} s")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}{path}", timeout=5).ok:
                    return
            time.sleep(0.2)

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=ANSWER_S)

    def ask(self, number: int, **more: Any) -> Future[Any]:
        """Ask for the tokens of a prompt; in place of them comes why there are none."""
        wanted = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        return self.pool.submit(self.answer, {"input_ids": prompt_of(number), "sampling_params": wanted, **more})

    def answer(self, body: dict[str, Any]) -> Any:
        try:
            answer = self.post("/generate", **body)
        except requests.RequestException as error:
            return {"type": "abort", "message": str(error)}
        if not answer.ok:
            return {"type": "abort", "message": answer.text}
        told = answer.json()
        reason = told["meta_info"]["finish_reason"]
        return reason if reason["type"] == "abort" else told["output_ids"]

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in (*parent.children(recursive=True), parent):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def kill(self) -> None:
        """End all of its processes at once."""
        self.signal(signal.SIGKILL)
        self.process.join(60)


class Server(Program):
    """One of SGLang's servers. Those of either role have a bootstrap server of their own, because roles change."""

    def __init__(
        self, folder: Path, role: str | None, bootstrap: int | None = None, timeout_s: float = TIMEOUT_S, **more: Any
    ) -> None:
        self.bootstrap, port = bootstrap or free_port(), free_ports()
        super().__init__(port, serve, folder, role, port, self.bootstrap, timeout_s, more)

    def abort(self, name: str) -> None:
        self.post("/abort_request", rid=name).raise_for_status()

    def become(self, role: str) -> None:
        """Change the role. It is refused while a request is there, whose client may have its answer already."""
        end = time.monotonic() + ANSWER_S
        while not (told := self.post("/pd_role_switch", new_role=role, decode_cuda_graph_memory_gb=0.0)).ok:
            if "idle" not in told.text or time.monotonic() > end:
                raise SystemExit(f"the role {role} is not taken: {told.text}")
            time.sleep(0.1)


class Pair:
    """A prefill and a decode server; each request goes to both."""

    def __init__(self, prefill: Server, decoding: Server) -> None:
        self.prefill, self.decoding = prefill, decoding

    def where(self, room: int) -> dict[str, Any]:
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap, "bootstrap_room": room}

    def both(self, numbers: range, first_room: int) -> list[Any]:
        """Ask both servers for some requests, as a router does."""
        rooms = [(number, self.where(first_room + number)) for number in numbers]
        asked = [(self.prefill.ask(number, **at), self.decoding.ask(number, **at)) for number, at in rooms]
        found = []
        for at_prefill, at_decode in asked:
            first, tokens = at_prefill.result(), at_decode.result()
            assert isinstance(tokens, list), tokens
            assert first == tokens[:1], (first, tokens)
            found.append(tokens)
        return found

    def aborts(self) -> dict[str, Any]:
        """Give up a request whose prompt never comes, and one at both servers at once."""
        lone = self.decoding.ask(0, rid="lone", **self.where(501))
        pair = [one.ask(1, rid="pair", **self.where(502)) for one in (self.prefill, self.decoding)]
        while not all(future.running() for future in (lone, *pair)):
            time.sleep(0.01)
        while not all(future.done() for future in (lone, *pair)):
            # A server may not have seen a request yet.
            self.decoding.abort("lone")
            self.decoding.abort("pair")
            self.prefill.abort("pair")
            time.sleep(0.1)
        return dict(lone.result())

    def a_stop(self) -> dict[str, Any]:
        """Stop the prefill server until a request of the decode server has failed; then it goes on."""
        waits = self.decoding.ask(0, **self.where(601))
        self.prefill.signal(signal.SIGSTOP)
        told = waits.result()
        self.prefill.signal(signal.SIGCONT)
        return dict(told)

    def a_death(self) -> dict[str, Any]:
        """Kill the prefill server while a request waits for it."""
        waits, start = self.decoding.ask(0, **self.where(701)), time.monotonic()
        self.prefill.kill()
        return {**waits.result(), "seconds": time.monotonic() - start}

    def switch(self) -> None:
        """Change both roles."""
        self.prefill.become("decode")
        self.decoding.become("prefill")
        self.prefill, self.decoding = self.decoding, self.prefill


def routed(pair: Pair, running: list[Program]) -> list[Any] | None:
    """The same through SGLang's router; None without its package."""
    if importlib.util.find_spec("sglang_router") is None:
        return None
    port = free_port()
    router = Program(port, route, pair.prefill.url, pair.prefill.bootstrap, pair.decoding.url, port)
    running.append(router)
    router.ready("/readiness")
    found = [future.result() for future in [router.ask(number) for number in range(REQUESTS)]]
    router.kill()
    return found


def main(folder: Path) -> None:
    alone = Server(folder, None)
    running: list[Program] = [alone]
    try:
        alone.ready()
        asked = [alone.ask(number) for number in range(REQUESTS)]
        found: dict[str, Any] = {"alone": [future.result() for future in asked]}
        alone.kill()
        pair = Pair(Server(folder, "prefill"), Server(folder, "decode"))
        running += [pair.prefill, pair.decoding]
        pair.prefill.ready()
        pair.decoding.ready()
        found["apart"] = pair.both(range(REQUESTS), 100)
        found["routed"] = routed(pair, running)
        found["watched"] = pair.both(range(3, 4), kv_sglang_layers.WATCHED - 3)
        found["aborted"] = pair.aborts()
        found["after an abort"] = pair.both(range(REQUESTS), 200)
        found["stopped"] = pair.a_stop()
        found["after a stop"] = pair.both(range(REQUESTS), 300)
        pair.switch()
        found["after a switch"] = pair.both(range(REQUESTS), 800)
        found["killed"] = pair.a_death()
        # Another prefill server at the address takes its place.
        pair.prefill = Server(folder, "prefill", pair.prefill.bootstrap)
        running.append(pair.prefill)
        pair.prefill.ready()
        found["after a death"] = pair.both(range(REQUESTS), 400)
    finally:
        for program in running:
            program.kill()
    (folder / "served.json").write_text(json.dumps(found))
