"""Three architectures spread over CPU ranks: python -m tests.engines.spread_transformers FOLDER.

FOLDER/alone.json has the tokens of one process without putget, FOLDER/rank.N.json those of each rank: by ``generate``,
by continuous batching, by ``generate`` with the draft layer of a DeepSeek-V3 model, and by ``generate`` while the kind
of prompts changes and a balancer moves experts.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import putget
from putget.adapters import transformers as putget_transformers
from putget.balancer import PlanOptions
from tests.engines.models import model_config, other_configs, save_architecture, save_drafts
from tests.engines.prompts import free_port

RANKS = 2
DRAFTS = "Drafts"
CHANGE = "Change"
KINDS, TURNS, LONG, LENGTH = ((3, 17, 41), (96, 77, 64)), 6, 30, 8
PROMPTS = [[3, 17, 41, 5, 96, 2], [77], [9, 8, 7, 6, 5, 4, 3, 2, 1], [5, 5, 5, 2], [64, 3]]


def configs() -> dict[str, Any]:
    return {"Qwen3Moe": model_config(10), **other_configs()}


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def length(number: int) -> int:
    """Tokens to generate: ranks end at different times."""
    return 4 + 3 * number


def generate(model: Any, number: int, **options: Any) -> list[int]:
    prompt = PROMPTS[number]
    with torch.no_grad():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=length(number), do_sample=False, **options)
    return list(output[0].tolist()[len(prompt) :])


def batch(manager: Any, own: list[int]) -> dict[int, Any]:
    """All of a rank's prompts at once; a rank may have none."""
    manager.start()
    requests = {manager.add_request(PROMPTS[number], max_new_tokens=length(number)): number for number in own}
    found = {}
    while len(found) < len(own):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise SystemExit(f"the loop has ended: {manager.background_thread_status.fatal_error}")
        if result is not None and result.is_finished():
            found[requests[result.request_id]] = result.generated_tokens
    manager.stop()
    return found


def answer_alone(folder: Path) -> None:
    for name, config in configs().items():
        save_architecture(folder, name, config)
    save_drafts(folder / DRAFTS)
    found = {}
    for name in (*configs(), DRAFTS):
        model = load(folder / name)
        found[name] = {number: generate(model, number) for number in range(len(PROMPTS))}
    model = load(folder / "Qwen3Moe")
    found[CHANGE] = [[answer(model, of_kind(words, rank)) for words in KINDS] for rank in range(RANKS)]
    folder.joinpath("alone.json").write_text(json.dumps(found))


def draft(model: Any, comm: Any, own: list[int], balance: str) -> dict[str, Any]:
    """Tokens with drafts, how often the model ran for each prompt, and this rank's experts of each layer."""
    spread = putget_transformers.spread(
        model, comm, use_mtp=True, balance=balance, max_tokens_per_rank=64, check_layers=True
    )
    tokens, runs = {}, {}
    forward, count = model.forward, [0]

    @functools.wraps(forward)
    def counted(*args: Any, **options: Any) -> Any:
        count[0] += 1
        return forward(*args, **options)

    model.forward = counted
    with spread.together():
        for number in own:
            count[0] = 0
            tokens[number] = generate(model, number, use_mtp=True)
            runs[number] = count[0]
    held = [experts.num_local_experts for experts in spread.layers]
    passes = [spread.lockstep.number, spread.lockstep.idle_passes]
    spread.end()
    return {"tokens": tokens, "runs": runs, "held": held, "passes": passes}


def kind(words: tuple[int, ...], rank: int, turn: int) -> list[int]:
    """A prompt that has these words alone, so that it keeps a few experts busy."""
    return [words[(place * (1 + rank) + turn) % len(words)] for place in range(LONG)]


def of_kind(words: tuple[int, ...], rank: int) -> list[list[int]]:
    return [kind(words, rank, turn) for turn in range(TURNS)]


def answer(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt's tokens, one prompt after the other."""
    found = []
    for prompt in prompts:
        with torch.no_grad():
            output = model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False)
        found.append(output[0].tolist()[len(prompt) :])
    return found


def change(model: Any, comm: Any) -> dict[str, Any]:
    """Tokens of both kinds of prompts, and how many experts have moved before, between and behind them."""
    plan = PlanOptions(interval=4, in_thread=False)
    spread: Any = putget_transformers.spread(
        model, comm, balance="online", plan=plan, max_tokens_per_rank=64, check_layers=True
    )
    tokens, moves, placements = [], [0], []
    for words in KINDS:
        with spread.together():
            tokens.append(answer(model, of_kind(words, comm.rank)))
        moves.append(spread.balancer.num_moves)
        placements.append(spread.balancer.placement.physical_to_logical.tolist())
    spread.end()
    return {"tokens": tokens, "moves": moves, "placements": placements}


def run_rank(folder: Path, rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    comm = putget.Communicator()
    own = [number for number in range(len(PROMPTS)) if number % RANKS == rank]
    found: dict[str, Any] = {}
    for name in configs():
        model = load(folder / name)
        spread = putget_transformers.spread(model, comm, max_tokens_per_rank=64, check_layers=True)
        with spread.together():
            found[name] = {"generate": {number: generate(model, number) for number in own}}
        found[name]["passes"] = [spread.lockstep.number, spread.lockstep.idle_passes]
        config = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=32)
        for kind, asked in (("batch", own), ("some", own if rank else [])):
            manager = putget_transformers.batching_manager(model, spread, continuous_batching_config=config)
            found[name][kind] = batch(manager, asked)
        spread.end()
    found[DRAFTS] = [draft(load(folder / DRAFTS), comm, own, balance) for balance in ("off", "online")]
    found[CHANGE] = change(load(folder / "Qwen3Moe"), comm)
    folder.joinpath(f"rank.{rank}.json").write_text(json.dumps(found))
    comm.close()
    dist.destroy_process_group()


def main(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    port = free_port()
    for programs in ([(answer_alone, folder)], [(run_rank, folder, rank, port) for rank in range(RANKS)]):
        processes = [fork.Process(target=program[0], args=program[1:]) for program in programs]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"ended with {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
