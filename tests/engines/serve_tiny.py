"""Models trained on README.md, behind `putget serve` on four ranks: python -m tests.engines.serve_tiny FOLDER KIND...

FOLDER/found.json has for each kind the continuation of a prompt from README.md, and the texts of clients beside those
of the model alone: 1 to 64 at once that come at random, then one client whose rank has work while no other has. Trained
models stay in build/tiny for the next run.
"""

from __future__ import annotations

import functools
import http.client
import json
import multiprocessing
import random
import sys
from pathlib import Path
from typing import Any

from putget_serve.tiny import train
from tests.engines.serve_transformers import LETTERS, PATIENCE_S, Server, all_asked, answer_alone

ROOT = Path(__file__).parents[2]
RANKS = 4
README = ROOT / "README.md"
TRAINED = ROOT / "build" / "tiny"
PROMPT = {"prompt": "putget is the communication layer for", "max_tokens": 12, "stream": False}
AT_ONCE = (1, 2, 4, 8, 16, 32, 64)
BY_ONE = 12


def questions() -> list[dict[str, Any]]:
    """Half of the prompts are parts of README.md, the others are letters at random; half of the answers are streams."""
    rng, readme = random.Random(3), README.read_text()
    asked = []
    for number in range(sum(AT_ONCE) + BY_ONE):
        begin, length = rng.randrange(len(readme) - 200), rng.randint(1, 200)
        prompt = readme[begin : begin + length] if number % 2 else "".join(rng.choices(LETTERS, k=length // 4 + 1))
        asked.append({"prompt": prompt, "max_tokens": rng.randint(1, 40), "stream": rng.random() < 0.5})
    return asked


def asked_by_one(port: int, asked: list[dict[str, Any]]) -> list[str]:
    """A client that keeps its connection, so that one rank answers all."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    texts = []
    for question in asked:
        body = json.dumps({**question, "stream": False})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        texts.append(json.loads(connection.getresponse().read())["choices"][0]["text"])
    connection.close()
    return texts


def serve(folder: Path, *words: str) -> dict[str, Any]:
    server = Server(folder, *words, ranks=RANKS)
    asked = questions()
    texts: list[str] = []
    continuation = server.complete(PROMPT)
    for count in AT_ONCE:
        begin = len(texts)
        with all_asked(server, asked[begin : begin + count], gives_up=False) as found:
            pass
        texts += found
    texts += asked_by_one(server.port, asked[len(texts) :])
    metrics = server.ask("/metrics")[1].decode()
    return {"continuation": continuation, "texts": texts, "metrics": metrics, "exit": server.end()}


def main(folder: Path, kinds: list[str]) -> None:
    found = {}
    for kind in kinds:
        model = TRAINED / kind
        fork = multiprocessing.get_context("fork")
        learn = functools.partial(train, kind, model, README, prompt=PROMPT["prompt"])
        for step in (learn, functools.partial(answer_alone, model, questions())):
            process = fork.Process(target=step)
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{kind}: {step.func.__name__} ended with {process.exitcode}")
        alone = json.loads((model / "alone.json").read_text())
        found[kind] = {"alone": alone, "off": serve(model), "online": serve(model, "--balance=online")}
    folder.joinpath("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
