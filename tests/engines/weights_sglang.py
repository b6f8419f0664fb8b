"""SGLang on two expert-parallel ranks with putget, which answers while versions of its weights arrive.

python -m tests.engines.weights_sglang FOLDER: FOLDER/8 becomes the model. A trainer sends versions of it over HTTP.
Writes FOLDER/weights.8: answers with the versions that they carry, and what transformers generates with each version.

SGLang's HTTP server needs packages that its CPU environment does not have. So a small one passes requests to the same
methods of SGLang's tokenizer manager, as SGLang's own endpoints do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

from putget_transfer.adapters.sglang.weights import LOADER
from tests.engines.generate_sglang import EP2, engine, patch, preload
from tests.engines.models import save_models
from tests.engines.prompts import PROMPTS, free_port, kill_children
from tests.engines.weights_answers import ASKED, NEW_TOKENS, OLD, TIMEOUT_S, VERSIONS, Asking, texts, weights_of

RANKS, START_S = 2, 900.0


async def call(running: Any, path: str, body: dict[str, Any]) -> Any:
    """Carry out a request, as SGLang's endpoint of this path does."""
    from sglang.srt.managers import io_struct

    manager = running.tokenizer_manager
    if path == "/server_info":
        resolved = running.server_args.resolved_dict()  # as SGLang's own answer begins
        return {name: resolved[name] for name in ("custom_weight_loader", "enable_eplb")}
    if path == "/generate":
        return await running.async_generate(**body)
    kinds = {
        "/pause_generation": io_struct.PauseGenerationReqInput,
        "/continue_generation": io_struct.ContinueGenerationReqInput,
        "/begin_weight_update": io_struct.BeginWeightUpdateReqInput,
        "/update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput,
        "/end_weight_update": io_struct.EndWeightUpdateReqInput,
    }
    request, method = kinds[path](**body), getattr(manager, path[1:])
    if path.endswith("_generation"):
        return await method(request)
    success, message = await method(request, None)
    return {"success": success, "message": message}


def handler_of(running: Any) -> type[BaseHTTPRequestHandler]:
    """Return what passes requests on to the engine's event loop."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                coroutine = call(running, self.path, json.loads(body or "{}"))
                found = asyncio.run_coroutine_threadsafe(coroutine, running.loop).result(TIMEOUT_S)
                status, answer = 200, json.dumps(found, default=plain).encode()
            except Exception as error:
                status, answer = 500, repr(error).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_arguments: Any) -> None:
            pass

    return Handler


def plain(value: Any) -> Any:
    """Return a structure of SGLang as JSON has it."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)


def serve(folder: Path, port: int) -> None:
    """Serve until the process is ended."""
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"  # NCCL comes with torch, and needs a GPU
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * RANKS)
    running = engine(folder / "8", weight_version=OLD, custom_weight_loader=[LOADER], **EP2)
    server = ThreadingHTTPServer(("127.0.0.1", port), handler_of(running))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    running.loop.run_forever()


def wait_until_it_serves(server: Any, url: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if not server.is_alive():
            raise SystemExit(f"SGLang's server ended with {server.exitcode}")
        try:
            if requests.get(url + "/server_info", timeout=TIMEOUT_S).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.5)
    raise SystemExit(f"SGLang's server does not answer after {START_S} s")


def asker(url: str) -> Callable[[int], tuple[list[int], list[Any]]]:
    """Return a function that asks for a prompt, and returns tokens and the versions that made them."""

    def ask(number: int) -> tuple[list[int], list[Any]]:
        wanted = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body: Any = {"input_ids": PROMPTS[ASKED[number]], "sampling_params": wanted}
        answer = requests.post(url + "/generate", json=body, timeout=TIMEOUT_S)
        answer.raise_for_status()
        found = answer.json()
        meta = found["meta_info"]
        spans = [[span["version"], span["start"], span["end"]] for span in meta.get("weight_versions") or ()]
        return found["output_ids"], spans or [[meta["weight_version"], 0, NEW_TOKENS]]

    return ask


def train(folder: Path, url: str, asking: Asking) -> dict[str, Any]:
    """Send all versions."""
    from putget_transfer.adapters.sglang.weights import HTTPClient, Trainer, TrainerInit

    source = weights_of(folder, 0)
    init = TrainerInit(0, [RANKS], networks="host", deadline_s=TIMEOUT_S)
    trainer = Trainer(init, source, [HTTPClient(url, timeout_s=TIMEOUT_S)])
    asking.wait(OLD)
    seconds = []
    for version in VERSIONS:
        for name, tensor in weights_of(folder, version).items():
            source[name].copy_(tensor)
        report = trainer.send_weights(version)
        seconds.append(report.seconds)
        asking.wait(str(version))
    trainer.shutdown()
    return {"seconds": seconds, "bytes": report.num_bytes}


def main(folder: Path) -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    preload()
    patch()
    save_models(folder, ["8"])
    port = free_port()
    server = multiprocessing.Process(target=serve, args=(folder, port))
    server.start()
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_it_serves(server, url)
        asking = Asking(asker(url))
        try:
            found = train(folder, url, asking)
        finally:
            asking.end()
    finally:
        server.terminate()
        kill_children()
    found.update(answers=asking.answers, texts=texts(folder))
    (folder / "weights.8").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
