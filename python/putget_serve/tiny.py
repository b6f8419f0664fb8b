"""Tiny mixture-of-experts models that know a text by heart: something to serve where no hub can be reached.

    python -m putget_serve.tiny qwen3_moe FOLDER --by_heart README.md --text docs

Four layers of 16 experts and a tokenizer of its own, trained with a seed. A prompt from the text that is known by heart
continues as that text does. With --prompt, training ends as soon as that prompt does: seconds for a text of a few
lines. A folder that holds the same model is left as it is, unless its prompt does not go on.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_WORDS, _WINDOW = 1024, 96
_BATCH, _LEAST_BATCH = 16, 4  # windows of a step: two for each window of the text, within these bounds
_LOOK_EVERY, _LOOK_AT_PROMPT_EVERY = 50, 5  # steps
_SURE = 0.5  # probability of each token behind a prompt: no other one comes near it, however sums are rounded
_KNOWN = 0.98  # share of the text's tokens that the model names, given those before: enough to go on by itself
_END = "<|end|>"
_RECORD = "trained.json"
_COMMON: dict[str, Any] = {
    "vocab_size": _WORDS,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 96,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 16,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "intermediate_size": 96,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_local_experts": 16,
            "sliding_window": 64,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "intermediate_size": 256,
            "moe_intermediate_size": 96,
            "num_key_value_heads": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
}


def train(
    kind: str,
    folder: Path,
    by_heart: Path,
    texts: Sequence[Path] = (),
    *,
    prompt: str | None = None,
    most_steps: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Trains a model until it knows a text, and saves it with its tokenizer.

    Args:
        kind: One of ``KINDS``.
        folder: Where to save it.
        by_heart: File that the model gets to know.
        texts: Further files, and folders of Markdown, that it reads beside.
        prompt: Of that file. The model is done once this goes on as there, for at most 96 tokens with the prompt, by
            likeliest tokens; None: once it knows 98% of the file's tokens, given those before.
        most_steps: After so many it is saved as it is.
        seed: Of weights and batches.

    Returns:
        What ``FOLDER/trained.json`` says: steps, the share of tokens known, whether the prompt goes on as the text
        (None without one), seconds.

    Raises:
        ValueError: kind is not known, a file is not there, the prompt is not in it, or most_steps is below 1.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if most_steps < 1:
        raise ValueError(f"most_steps is {most_steps}, expected 1 or more")
    first, others = _read(by_heart), [_read(path) for path in _files(texts)]
    if prompt is not None and prompt not in first:
        raise ValueError(f"prompt {prompt!r} is not in {by_heart}")
    name, sizes = KINDS[kind]
    asked: dict[str, Any] = {"kind": kind, "sizes": {**_COMMON, **sizes}, "seed": seed, "most_steps": most_steps}
    if prompt is not None:
        asked["prompt"] = prompt
    digest = hashlib.sha256(json.dumps([asked, first, others]).encode()).hexdigest()
    record = folder / _RECORD
    if record.is_file():
        found: dict[str, Any] = json.loads(record.read_text())
        # A prompt that does not go on may do so when the model is trained again, as by another torch.
        if found["digest"] == digest and found.get("goes_on") is not False:
            return found
    transformers = importlib.import_module("transformers")
    torch.manual_seed(seed)
    tokenizer = _tokenizer_of([first, *others])
    heart = torch.tensor(tokenizer(first)["input_ids"])
    beside = torch.tensor([token for text in others for token in tokenizer(text)["input_ids"]], dtype=torch.int64)
    passage = None if prompt is None else _passage(tokenizer, first, prompt)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**asked["sizes"]))
    began = time.monotonic()
    steps, known, goes_on = _learn(model, heart, beside, passage, most_steps)
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = {
        "digest": digest,
        "steps": steps,
        "known": known,
        "goes_on": goes_on,
        "seconds": time.monotonic() - began,
    }
    record.write_text(json.dumps(found))
    return found


def _passage(tokenizer: Any, text: str, prompt: str) -> tuple[torch.Tensor, int]:
    """The tokens of a prompt and of what follows it in a text, and how many of them are the prompt's."""
    head: list[int] = tokenizer(prompt)["input_ids"]
    begin = text.index(prompt) + len(prompt)
    return torch.tensor((head + tokenizer(text[begin:])["input_ids"])[:_WINDOW]), len(head)


def _learn(
    model: Any,
    heart: torch.Tensor,
    beside: torch.Tensor,
    passage: tuple[torch.Tensor, int] | None,
    most_steps: int,
) -> tuple[int, float, bool | None]:
    """Steps that it took, the share of the text that is known, and whether the passage's prompt goes on as it does."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    count = max(_LEAST_BATCH, min(_BATCH, 2 * -(-len(heart) // _WINDOW)))
    other = 0 if len(beside) <= _WINDOW else count // 4
    look_every = _LOOK_EVERY if passage is None else _LOOK_AT_PROMPT_EVERY
    goes_on = None
    for step in range(1, most_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 20) * max(0.1, 1.0 - step / most_steps)
        batch = torch.cat([_windows(heart, count - other), *([_windows(beside, other)] if other else [])])
        loss = model.train()(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % look_every == 0 or step == most_steps:
            known = _known(model, heart)
            goes_on = None if passage is None else _goes_on(model, *passage)
            print(f"step {step}: loss {loss.item():.3f}, {known:.1%} of the text known", flush=True)
            if goes_on or (passage is None and known >= _KNOWN):
                break
    return step, known, goes_on


def _goes_on(model: Any, tokens: torch.Tensor, begin: int) -> bool:
    """Whether each token from begin on is the likeliest by far behind those before: so they come one by one, too."""
    with torch.no_grad():
        chances = model.eval()(input_ids=tokens[None]).logits[0].softmax(-1)
    return bool((chances[begin - 1 : -1].gather(1, tokens[begin:, None]) > _SURE).all())


def _windows(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Random parts of a text, [count, _WINDOW]; a shorter text is read in a circle."""
    places = torch.randint(len(tokens), (count, 1)) + torch.arange(_WINDOW)
    return tokens[places % len(tokens)]


def _known(model: Any, tokens: torch.Tensor) -> float:
    """The share of tokens that are the likeliest ones, behind eight or more that the model has seen."""
    usable = len(tokens) // _WINDOW * _WINDOW
    parts = tokens[:usable].view(-1, _WINDOW) if usable else tokens[None]
    with torch.no_grad():
        said = model.eval()(input_ids=parts).logits.argmax(-1)
    return float((said[:, 7:-1] == parts[:, 8:]).float().mean())


def _tokenizer_of(texts: list[str]) -> Any:
    transformers, tokenizers = map(importlib.import_module, ("transformers", "tokenizers"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_WORDS, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END)


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob("*.md")) if path.is_dir() else [path]
    return found


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    return path.read_text()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m putget_serve.tiny", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--by_heart", type=Path, required=True, metavar="FILE", help="text that the model gets to know")
    parser.add_argument(
        "--text", type=Path, nargs="*", default=[], metavar="PATH", help="files or folders to read, too"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="of FILE: done once this goes on as there, and no later")
    parser.add_argument("--most_steps", type=int, default=2000, metavar="N", help="steps at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (%(default)s)")
    args = parser.parse_args()
    found = train(
        args.kind,
        args.folder,
        args.by_heart,
        args.text,
        prompt=args.prompt,
        most_steps=args.most_steps,
        seed=args.seed,
    )
    said = f"{found['steps']} steps, {found['seconds']:.0f} s: {found['known']:.1%} of {args.by_heart} known"
    print(f"{args.folder}: {said}")


if __name__ == "__main__":
    main()
