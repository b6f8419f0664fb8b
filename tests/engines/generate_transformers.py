"""transformers itself on CPU ranks, with putget and in one process: greedy tokens of tiny models, all in one run.

python -m tests.engines.generate_transformers FOLDER N...: FOLDER/N is a model with N experts, FOLDER/N.RANKS.RANK what
a rank of so many found. Ranks are forked, because importing transformers takes most of the time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

from putget.adapters import shared
from putget.adapters import transformers as putget_transformers
from tests.engines.models import save_models
from tests.engines.prompts import free_port

PROMPTS = [[3, 17, 41, 5, 96, 2], [77], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
NEW_TOKENS = 8


def load_model(folder: Path, ranks: int) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32}
    if ranks > 1:
        options["distributed_config"] = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation="putget")
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


def look_at(model: Any) -> dict[str, Any]:
    tokens = generate(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        generate(model)
    calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("putget_")}
    return {"tokens": tokens, "carried": carried(model), "calls": calls}


def run_rank(folder: Path, models: list[str], rank: int, ranks: int, port: int) -> None:
    """A rank of the group that torchrun would make, or the one process."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    for model in models:
        found = look_at(load_model(folder / model, ranks))
        folder.joinpath(f"{model}.{ranks}.{rank}").write_text(json.dumps(found))
    shared.close_shared()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main(folder: Path, models: list[str]) -> None:
    fork = multiprocessing.get_context("fork")
    save_models(folder, models)
    putget_transformers.register(max_tokens_per_rank=64)
    for ranks in (1, 2):
        port = free_port()
        processes = [fork.Process(target=run_rank, args=(folder, models, rank, ranks, port)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{ranks} ranks ended with {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
