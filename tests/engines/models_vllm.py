"""Several models in vLLM on two expert-parallel CPU ranks, and in one process: greedy tokens of each.

python -m tests.engines.models_vllm FOLDER: writes FOLDER/MODEL.DTYPE.RANKS.RANK. DeepSeek-V3 is not among them: on a
CPU its attention in vLLM depends on the batch, with or without putget.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.engines.generate_vllm import join_or_end, meet_at, preload, requests_of, tokens_of
from tests.engines.models import other_configs, save_architecture, save_glm4, save_model
from tests.engines.prompts import free_port

MODELS = ("Qwen3Moe.8", "Qwen3Moe.60", "Glm4Moe", "GptOss")
DTYPES = ("float32", "bfloat16")
MOST_TOKENS = 2048
"""Tokens of a step of a rank at most: as users set it, not as tests do."""


def save(folder: Path) -> None:
    for count in (8, 60):
        save_model(folder / f"Qwen3Moe.{count}", count)
    save_glm4(folder / "Glm4Moe")
    save_architecture(folder, "GptOss", other_configs()["GptOss"])


def run_rank(folder: Path, model: str, dtype: str, rank: int, ranks: int, port: int) -> None:
    from vllm import LLM

    meet_at(port, rank, ranks)
    engine = LLM(
        str(folder / model),
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=MOST_TOKENS,
        enable_expert_parallel=ranks > 1,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    found = tokens_of(engine, requests_of(rank, ranks), 8)
    (folder / f"{model}.{dtype}.{ranks}.{rank}").write_text(json.dumps(found))


def main(folder: Path) -> None:
    fork = preload()
    saver = fork.Process(target=save, args=(folder,))
    saver.start()
    join_or_end("saving", [saver])
    for model in MODELS:
        for dtype in DTYPES:
            for ranks in (1, 2):
                print(f"\n=== {model} {dtype} {ranks}\n", end="", flush=True)
                given = (folder, model, dtype)
                port = free_port()
                processes = [fork.Process(target=run_rank, args=(*given, rank, ranks, port)) for rank in range(ranks)]
                for process in processes:
                    process.start()
                join_or_end(f"{model} {dtype}", processes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
