"""vLLM itself on CPU ranks, with putget or in one process: greedy tokens of a tiny mixture-of-experts model.

python -m tests.engines.generate_vllm FOLDER CASE...: writes FOLDER/CASE.RANK, one case after the other. A case is its
name and the number of the model's experts: FOLDER/8 is the model of ``dp2.8``. ``serve``, ``weights`` and
``dbo`` have programs of their own.

``vllm_shim`` has what vLLM's experts lack on a CPU. Ranks are forked, because importing vLLM takes most of the time.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

import psutil

from tests.engines import overlap_vllm, serve_vllm, vllm_shim, weights_vllm
from tests.engines.models import save_models
from tests.engines.prompts import NEW_TOKENS, PROMPTS, each_rank_on_a_host, free_port, kill_children

# Ranks that take requests of their own, and ranks of tensor parallelism in each.
CASES = {"alone": (1, 1), "dp2": (2, 1), "dp3": (3, 1), "tp2dp2": (2, 2), "hosts": (2, 1), "killed": (2, 1)}


def requests_of(rank: int, ranks: int) -> list[int]:
    """Which prompts a rank has: unequal numbers, and of three ranks the last has one."""
    return [index for index in range(len(PROMPTS)) if min(index // 2, ranks - 1) == rank]


def tokens_of(engine: Any, indices: list[int], most: int) -> dict[int, list[int]]:
    from vllm import SamplingParams

    wanted = [
        SamplingParams(temperature=0, max_tokens=min(NEW_TOKENS[index], most), ignore_eos=True, detokenize=False)
        for index in indices
    ]
    prompts = [{"prompt_token_ids": PROMPTS[index]} for index in indices]
    outputs = engine.generate(prompts, wanted, use_tqdm=False)
    return {index: list(output.outputs[0].token_ids) for index, output in zip(indices, outputs, strict=True)}


def profiled(traces: Path | None) -> dict[str, Any]:
    """Arguments of an engine that can write traces."""
    return {} if traces is None else {"profiler_config": {"profiler": "torch", "torch_profiler_dir": str(traces)}}


def meet_at(port: int, rank: int, ranks: int) -> None:
    """Has this process's engine be a rank of data parallelism, if there are several."""
    if ranks > 1:
        os.environ.update(
            VLLM_DP_RANK=str(rank),
            VLLM_DP_RANK_LOCAL=str(rank),
            VLLM_DP_SIZE=str(ranks),
            VLLM_DP_MASTER_IP="127.0.0.1",
            VLLM_DP_MASTER_PORT=str(port),
        )


def run_rank(folder: Path, case: str, rank: int, port: int) -> None:
    from vllm import LLM

    name, num_experts = case.split(".")
    ranks, tensor_ranks = CASES[name]
    most = 8 if tensor_ranks == 1 else 2  # vLLM's tensor parallelism on a CPU waits busily: seconds a step on two cores
    meet_at(port, rank, ranks)
    if name == "hosts":
        each_rank_on_a_host()
    start = time.monotonic()
    engine = LLM(
        str(folder / num_experts),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,  # longer prompts come in chunks
        tensor_parallel_size=tensor_ranks,
        enable_expert_parallel=ranks * tensor_ranks > 1,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **profiled(folder / "traces" / f"{case}.{rank}" if name == "dp2" else None),
    )
    ready = time.monotonic()
    tokens = tokens_of(engine, requests_of(rank, ranks), most)
    if name == "dp2":
        engine.start_profile()
        tokens_of(engine, requests_of(rank, ranks), most)
        engine.stop_profile()
    if name == "killed":
        if rank == 1:
            for worker in psutil.Process().children():
                worker.kill()
        tokens_of(engine, requests_of(rank, ranks), most)  # raises, on both ranks
    seconds = {"to start": ready - start, "to generate": time.monotonic() - ready}
    folder.joinpath(f"{case}.{rank}").write_text(json.dumps({"tokens": tokens, "seconds": seconds}))


def preload() -> ForkContext:
    """Imports what every process needs, and has vLLM fork its workers, where on a CPU it spawns them."""
    vllm_shim.patch()  # before modules take the functions' names
    import vllm.entrypoints.llm
    import vllm.v1.engine.coordinator
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.worker.cpu_worker
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
    from vllm.v1.executor import multiproc_executor

    ModelRegistry.register_model("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM)  # else a process looks at it
    fork = multiprocessing.get_context("fork")
    for module in (multiproc_executor, vllm.v1.engine.coordinator, vllm.v1.engine.utils):
        module.get_mp_context = lambda: fork
    return fork


def processes_of(case: str, folder: Path, fork: ForkContext) -> list[ForkProcess]:
    name = case.split(".")[0]
    if name == "serve":
        return [fork.Process(target=serve_vllm.main, args=(folder, fork))]
    if name == "weights":
        return [fork.Process(target=weights_vllm.main, args=(folder, fork))]
    if name == "dbo":
        return [fork.Process(target=overlap_vllm.main)]
    port = free_port()
    return [fork.Process(target=run_rank, args=(folder, case, rank, port)) for rank in range(CASES[name][0])]


def join_or_end(case: str, processes: list[ForkProcess]) -> None:
    """Waits for all of them. The first that fails ends the case: others may wait for it, up to half an hour."""
    running: dict[Any, ForkProcess] = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                kill_children()
                raise SystemExit(f"a rank of {case} ended with {process.exitcode}")


def main(folder: Path, cases: list[str]) -> None:
    fork = preload()
    save_models(folder, {case.split(".")[1] for case in cases})
    for case in cases:
        # In one write: processes of the case before may still have something to say.
        print(f"\n=== {case}\n", end="", flush=True)
        start = time.monotonic()
        processes = processes_of(case, folder, fork)
        for process in processes:
            process.start()
        if case.startswith("killed"):
            for process in processes:
                process.join()
            codes = [process.exitcode for process in processes]
            (folder / case).write_text(json.dumps({"codes": codes, "seconds": time.monotonic() - start}))
        else:
            join_or_end(case, processes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
