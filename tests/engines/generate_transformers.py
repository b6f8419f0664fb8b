"""A program for one rank of torchrun: greedy tokens of a tiny mixture-of-experts model, with putget or in one process.

python -m tests.engines.generate_transformers OUT MODEL, as one process or under torchrun; writes {case: tokens}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

from putget.adapters import shared
from putget.adapters import transformers as putget_transformers

PROMPTS = [[3, 17, 41, 5, 96, 2], [77], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
NEW_TOKENS = 8


def load_model(folder: Path) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32}
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        putget_transformers.register(max_tokens_per_rank=64)
        options["distributed_config"] = DistributedConfig(tp_size=size, ep_size=size, ep_implementation="putget")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def generate(model: Any) -> dict[str, list[int]]:
    """Each prompt alone; a prompt of one token leaves all but one rank without tokens, and so does every decode."""
    tokens = {}
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        tokens[str(index)] = output[0].tolist()
    return tokens


def carried(model: Any) -> int:
    """Layers whose experts putget reached."""
    found = 0
    for module in model.modules():
        for cell in getattr(getattr(module, "forward", None), "__closure__", None) or ():
            rounds = getattr(cell.cell_contents, "_rounds", None)
            found += rounds is not None
    return found


def main(out: Path, folder: Path) -> None:
    model = load_model(folder)
    tokens = generate(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        generate(model)
    calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("putget_")}
    result = {"tokens": tokens, "carried": carried(model), "calls": calls}
    out.with_suffix(f".{os.environ.get('RANK', '0')}").write_text(json.dumps(result))
    shared.close_shared()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
