"""`vllm serve` on two expert-parallel ranks with putget, which answers while versions of its weights arrive.

FOLDER/8 is the model. Two trainer ranks send versions of it over HTTP: /pause?mode=keep, /start_weight_update,
/update_weights, /finish_weight_update, /resume. Writes FOLDER/weights.8: answers with the versions that they carry, and
what transformers generates with each version.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.engines.prompts import PROMPTS, free_port
from tests.engines.serve_vllm import wait_until_it_serves
from tests.engines.weights_answers import ASKED, NEW_TOKENS, OLD, TIMEOUT_S, VERSIONS, Asking, texts, weights_of

LOST = 3
"""A version in which a trainer rank fails: the server goes on with the one before."""
RANKS, TRAINERS = 2, 2


def serve(folder: Path, port: int) -> None:
    """Runs the command `vllm` with these arguments."""
    from vllm.entrypoints.cli.main import main

    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
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
        "--weight-transfer-config": json.dumps({"backend": "putget"}),
    }
    flags = ["--skip-tokenizer-init", "--enforce-eager", "--enable-expert-parallel", "--no-enable-prefix-caching"]
    flags += ["--enable-scale-out"]  # its answers carry the versions of weights
    words = [str(word) for option in options.items() for word in option]
    sys.argv = ["vllm", "serve", str(folder / "8"), *words, *flags]
    main()


def source_of(folder: Path, rank: int) -> Any:
    """Return a source of vLLM: matrices are divided by rows between the trainer ranks, vectors are whole on both."""
    from vllm.distributed.weight_transfer import ParamMeta, Shard, WeightSource

    class Source(WeightSource):
        version = 0

        @functools.cached_property
        def metadata(self) -> list[ParamMeta]:
            owners = tuple(range(TRAINERS))
            return [
                ParamMeta(
                    name,
                    tensor.dtype,
                    tuple(tensor.shape),
                    owners=owners,
                    placements=(Shard(0),) if tensor.dim() > 1 else None,
                )
                for name, tensor in weights_of(folder, 0).items()
            ]

        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            found = weights_of(folder, self.version)
            for number, meta in enumerate(self.metadata):
                if self.version == LOST and rank == TRAINERS - 1 and number > len(found) // 2:
                    raise RuntimeError("a trainer rank is lost")
                tensor = found[meta.name]
                yield meta.name, tensor.chunk(TRAINERS)[rank] if tensor.dim() > 1 else tensor

    return Source()


def asker(client: httpx.Client, model: Path) -> Callable[[int], tuple[list[int], list[Any]]]:
    """Return a function that asks for a prompt, and returns tokens and the versions that made them."""

    def ask(number: int) -> tuple[list[int], list[Any]]:
        asked = {
            "model": str(model),
            "token_ids": PROMPTS[ASKED[number]],
            "sampling_params": {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False},
        }
        answer = client.post("/inference/v1/generate", json=asked)
        (choice,) = answer.raise_for_status().json()["choices"]
        return choice["token_ids"], [
            [span["version"], span["start"], span["end"]] for span in choice["weight_versions"]
        ]

    return ask


def train(folder: Path, url: str, asking: Asking, control: httpx.Client) -> dict[str, Any]:
    """Send all versions, as two trainer ranks."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory

    from putget_transfer.adapters.vllm.weights import TrainerInit

    port = free_port()
    sources = [source_of(folder, rank) for rank in range(TRAINERS)]

    def begin(rank: int) -> Any:
        init = TrainerInit(
            num_workers=RANKS,
            num_trainers=TRAINERS,
            master_port=port,
            networks="host",
            deadline_s=TIMEOUT_S,
            rank=rank,
        )
        client = HTTPVLLMWeightSyncClient(url, timeout=TIMEOUT_S)
        return WeightTransferTrainerFactory.trainer_init(init, client=client, source=sources[rank])

    with ThreadPoolExecutor(TRAINERS) as pool:
        ranks = list(pool.map(begin, range(TRAINERS)))
        asking.wait(OLD)
        seconds = []
        for version in sorted((*VERSIONS, LOST)):
            for source in sources:
                source.version = version
            control.post("/pause", params={"mode": "keep"}).raise_for_status()
            sent = [pool.submit(rank.send_weights) for rank in ranks]
            errors = [one.exception() for one in sent]
            control.post("/resume").raise_for_status()
            if version == LOST:
                lost = [str(error) for error in errors]
                asking.wait(str(version - 1), again=True)
                continue
            seconds.append([one.result().seconds for one in sent])
            asking.wait(str(version))
        num_bytes = sum(one.result().num_bytes for one in sent)
        for rank in ranks:
            rank.shutdown()
    return {"seconds": seconds, "bytes": num_bytes, "lost": lost}


def main(folder: Path, fork: ForkContext) -> None:
    port = free_port()
    server = fork.Process(target=serve, args=(folder, port))
    server.start()
    url = f"http://127.0.0.1:{port}"
    client = httpx.Client(base_url=url, timeout=TIMEOUT_S)
    try:
        wait_until_it_serves(server, client)
        asking = Asking(asker(client, folder / "8"))
        try:
            found = train(folder, url, asking, client)
        finally:
            asking.end()
    finally:
        client.close()
        server.terminate()
        server.join(120)
    found.update(answers=asking.answers, texts=texts(folder))
    (folder / "weights.8").write_text(json.dumps({"tokens": {}, **found}))
