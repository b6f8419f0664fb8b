"""Whole servers of SGLang with putget's backend: one for prompts, one that decodes, token for token against one server.

python -m tests.engines.kv_sglang FOLDER writes FOLDER/served.json. FOLDER/8 is the model. A server is SGLang's Engine,
with its scheduler and its bootstrap server, in a process of its own; a pipe takes the place of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from putget_transfer.adapters import options
from putget_transfer.adapters.sglang import NAME
from tests.engines.generate_sglang import engine
from tests.engines.prompts import free_port

START_S, ANSWER_S = 600.0, 300.0
TIMEOUT_S = 2.0
"""The silence after which a peer counts as down."""
NEW_TOKENS, REQUESTS, PAGE = 6, 8, 4


def prompt_of(number: int) -> list[int]:
    """Prompts have several chunks of 16 tokens. Their lengths differ, and most end inside of a page."""
    return [random.Random(number * 1000 + at).randrange(1, 128) for at in range(21 + 7 * number % 40)]


def serve(folder: Path, role: str | None, port: int, told: Connection) -> None:
    """A server: it takes requests and aborts, and says what they came to."""
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"  # NCCL comes with torch, and needs a GPU
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0"
    given = {"address": "127.0.0.1", "timeout_s": TIMEOUT_S, "confirm_s": TIMEOUT_S, "segment_tokens": 8}
    os.environ[options.VARIABLE] = json.dumps(given)
    chosen: dict[str, Any] = {"page_size": PAGE, "host": "127.0.0.1"}
    if role is not None:
        chosen |= {"disaggregation_mode": role, "disaggregation_transfer_backend": NAME}
        chosen["disaggregation_bootstrap_port"] = port
        # The pool that decode servers keep for requests which they put off is registered with CUDA.
        chosen["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    running = engine(folder / "8", **chosen)
    told.send(("ready", None))

    async def answer(name: str, number: int, room: int | None) -> None:
        wanted = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        where = {} if room is None else {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        try:
            output = await running.async_generate(
                input_ids=prompt_of(number), sampling_params=wanted, rid=name, **where
            )
            reason = output["meta_info"]["finish_reason"]
            told.send((name, reason if reason["type"] == "abort" else output["output_ids"]))
        except Exception as error:
            told.send((name, {"type": "abort", "message": str(error)}))

    async def listen() -> None:
        tasks = []
        while (word := await running.loop.run_in_executor(None, told.recv)) is not None:
            if word[0] == "abort":
                running.tokenizer_manager.abort_request(rid=word[1])
            else:
                tasks.append(asyncio.ensure_future(answer(*word[1:])))

    running.loop.run_until_complete(listen())


class Server:
    """A server's process, and what its requests came to."""

    def __init__(self, folder: Path, role: str | None, port: int) -> None:
        self.told, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=serve, args=(folder, role, port, theirs))
        self.process.start()
        theirs.close()
        self.found: dict[str, Any] = {}

    def ask(self, number: int, room: int | None = None) -> str:
        name = f"{number}-{room}-{len(self.found)}-{random.randrange(1 << 30)}"
        self.told.send(("ask", name, number, room))
        return name

    def abort(self, name: str) -> None:
        self.told.send(("abort", name))

    def wait(self, name: str, timeout_s: float = ANSWER_S) -> Any:
        """The outcome of a request."""
        end = time.monotonic() + timeout_s
        while name not in self.found:
            if not self.process.is_alive():
                raise SystemExit(f"a server ended with {self.process.exitcode}")
            if time.monotonic() > end:
                raise SystemExit(f"no answer to {name} in {timeout_s} s")
            if self.told.poll(0.2):
                at, what = self.told.recv()
                self.found[at] = what
        return self.found[name]

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


def both(prefill: Server, decoding: Server, numbers: range, first_room: int) -> list[Any]:
    """Ask both servers for some requests, as a router does."""
    rooms = {number: first_room + number for number in numbers}
    names = {number: (prefill.ask(number, room), decoding.ask(number, room)) for number, room in rooms.items()}
    found = []
    for at_prefill, at_decode in names.values():
        first = prefill.wait(at_prefill)
        tokens = decoding.wait(at_decode)
        assert isinstance(tokens, list), tokens
        assert first == tokens[:1], (first, tokens)
        found.append(tokens)
    return found


def aborts(prefill: Server, decoding: Server) -> dict[str, Any]:
    """Give up a request whose prompt never comes, and one at both servers at once."""
    lone = decoding.ask(0, 501)
    pair = prefill.ask(1, 502), decoding.ask(1, 502)
    decoding.abort(lone)
    decoding.abort(pair[1])
    prefill.abort(pair[0])
    prefill.wait(pair[0])
    decoding.wait(pair[1])
    return dict(decoding.wait(lone))


def a_stop(prefill: Server, decoding: Server) -> dict[str, Any]:
    """Stop the prefill server until a request of the decode server has failed; then it goes on."""
    waits = decoding.ask(0, 601)
    prefill.signal(signal.SIGSTOP)
    told = decoding.wait(waits)
    prefill.signal(signal.SIGCONT)
    return dict(told)


def a_death(prefill: Server, decoding: Server) -> dict[str, Any]:
    """Kill the prefill server while a request waits for it."""
    waits, start = decoding.ask(0, 701), time.monotonic()
    prefill.kill()
    return {**decoding.wait(waits), "seconds": time.monotonic() - start}


def main(folder: Path) -> None:
    alone = Server(folder, None, 0)
    alone.wait("ready", START_S)
    names = [alone.ask(number) for number in range(REQUESTS)]
    found: dict[str, Any] = {"alone": [alone.wait(name) for name in names]}
    alone.kill()
    port = free_port()
    prefill, decoding = Server(folder, "prefill", port), Server(folder, "decode", port)
    try:
        prefill.wait("ready", START_S)
        decoding.wait("ready", START_S)
        found["apart"] = both(prefill, decoding, range(REQUESTS), 100)
        found["aborted"] = aborts(prefill, decoding)
        found["after an abort"] = both(prefill, decoding, range(REQUESTS), 200)
        found["stopped"] = a_stop(prefill, decoding)
        found["after a stop"] = both(prefill, decoding, range(REQUESTS), 300)
        found["killed"] = a_death(prefill, decoding)
        # Another prefill server at the address takes its place.
        prefill = Server(folder, "prefill", port)
        prefill.wait("ready", START_S)
        found["after a death"] = both(prefill, decoding, range(REQUESTS), 400)
    finally:
        prefill.kill()
        decoding.kill()
    (folder / "served.json").write_text(json.dumps(found))
