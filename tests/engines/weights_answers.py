"""Versions of a model's weights, what each of them says, and threads that ask a server for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.engines.prompts import PROMPTS

VERSIONS = (1, 2, 4, 5, 6)
NEW_TOKENS = 12
ASKED = (0, 1, 3, 4)
"""Prompts that are asked for again and again, each by a thread of its own."""
TIMEOUT_S = 120.0
OLD = "default"
"""The version that the server has loaded."""


def weights_of(folder: Path, version: int) -> dict[str, torch.Tensor]:
    """Return a version of the checkpoint: 0 is the one that the server loads."""
    from safetensors.torch import load_file

    found = load_file(folder / "8" / "model.safetensors")
    made = torch.Generator().manual_seed(version)
    if version:
        for name in sorted(found):
            found[name] = found[name] + 0.25 * torch.randn(found[name].shape, generator=made)
    return found


def texts(folder: Path) -> dict[str, list[list[int]]]:
    """Return what transformers generates with each version."""
    import transformers

    found = {}
    for version in (0, *VERSIONS):
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder / "8", dtype=torch.float32)
        if version:
            place = folder / f"version {version}"
            model.config.save_pretrained(place)
            from safetensors.torch import save_file

            save_file(weights_of(folder, version), place / "model.safetensors", {"format": "pt"})
            model = transformers.Qwen3MoeForCausalLM.from_pretrained(place, dtype=torch.float32)
        rows = []
        for index in ASKED:
            prompt = torch.tensor([PROMPTS[index]])
            made = model.generate(
                prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
            )
            rows.append(made[0, prompt.shape[1] :].tolist())
        found[str(version) if version else OLD] = rows
    return found


class Asking:
    """Threads that ask a server, until they are told to stop."""

    def __init__(self, ask: Callable[[int], tuple[list[int], list[Any]]]) -> None:
        """Take a function that asks for a prompt, and returns tokens and the versions that made them."""
        self.answers: list[dict[str, Any]] = []
        self.came = threading.Condition()
        self.stopped = False
        self.pool = ThreadPoolExecutor(len(ASKED))
        self.running = [self.pool.submit(self._ask, ask, number) for number in range(len(ASKED))]

    def _ask(self, ask: Callable[[int], tuple[list[int], list[Any]]], number: int) -> None:
        try:
            while not self.stopped:
                tokens, spans = ask(number)
                with self.came:
                    self.answers.append({"prompt": number, "tokens": tokens, "spans": spans})
                    self.came.notify_all()
        finally:
            with self.came:
                self.stopped = True
                self.came.notify_all()

    def whole(self, version: str) -> int:
        """How many answers carry this version alone."""
        return sum(len(answer.get("spans", [])) == 1 and answer["spans"][0][0] == version for answer in self.answers)

    def wait(self, version: str, again: bool = False) -> None:
        """Wait for two answers of a version; `again`: for two more."""
        with self.came:
            wanted = 2 + self.whole(version) * again
            done = self.came.wait_for(lambda: self.stopped or self.whole(version) >= wanted, TIMEOUT_S)
        if not done or self.stopped:
            raise SystemExit(f"no two answers of version {version}: {self.answers[-3:]}")

    def end(self) -> None:
        self.stopped = True
        for one in self.running:
            one.result(TIMEOUT_S)


def check_answers(told: dict[str, Any]) -> None:
    """Each answer equals the text of the version that it carries; those under way keep their first tokens."""
    texts = told["texts"]
    assert set(texts) == {OLD, *map(str, VERSIONS)}
    assert len({str(text) for text in texts.values()}) == len(texts)
    whole = [answer for answer in told["answers"] if len(answer["spans"]) == 1]
    for version in texts:
        found = [answer for answer in whole if answer["spans"][0][0] == version]
        assert len(found) >= 2
        assert all(answer["tokens"] == texts[version][answer["prompt"]] for answer in found)
    for answer in told["answers"]:
        version, _, end = answer["spans"][0]
        assert answer["tokens"][:end] == texts[version][answer["prompt"]][:end]
