"""`vllm serve` on CPU ranks with putget, and requests to it at once.

FOLDER/8 is the model. Writes FOLDER/serve.8, the tokens of each request, and ends the server. The server and its ranks
are forked from a process that has imported vLLM.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path

import httpx

from tests.engines.prompts import NEW_TOKENS, PROMPTS, free_port

NUM_REQUESTS = 7  # more than prompts: some come twice, at the same time
RANKS = 2
START_S = 900


def serve(folder: Path, port: int) -> None:
    """Runs the command `vllm` with these arguments."""
    from vllm.entrypoints.cli.main import main

    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": 64,
        "--max-num-seqs": 4,
        "--max-num-batched-tokens": 16,
        "--data-parallel-size": RANKS,
        "--api-server-count": 1,
        "--kv-cache-memory-bytes": 1 << 26,
        "--seed": 0,
    }
    flags = ["--skip-tokenizer-init", "--enforce-eager", "--enable-expert-parallel", "--no-enable-prefix-caching"]
    words = [str(word) for option in options.items() for word in option]
    sys.argv = ["vllm", "serve", str(folder / "8"), *words, *flags]
    main()


def wait_until_it_serves(server: ForkProcess, client: httpx.Client) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if not server.is_alive():
            raise SystemExit(f"vllm serve ended with {server.exitcode}")
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit(f"vllm serve does not answer after {START_S} s")


def tokens_of(client: httpx.Client, model: Path, request: int) -> list[int]:
    index = request % len(PROMPTS)
    asked = {
        "model": str(model),
        "prompt": PROMPTS[index],
        "max_tokens": NEW_TOKENS[index],
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    answer = client.post("/v1/completions", json=asked)
    if not answer.is_success:
        raise SystemExit(f"request {request}: {answer.status_code} {answer.text}")
    return list(answer.json()["choices"][0]["token_ids"])


def main(folder: Path, fork: ForkContext) -> None:
    port = free_port()
    server = fork.Process(target=serve, args=(folder, port))
    server.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            wait_until_it_serves(server, client)
            with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                found = list(pool.map(lambda number: tokens_of(client, folder / "8", number), range(NUM_REQUESTS)))
    finally:
        server.terminate()
        server.join(120)
    (folder / "serve.8").write_text(json.dumps({"tokens": {str(number): ids for number, ids in enumerate(found)}}))
