"""The share of putget's Python in a decode step, inside of SGLang, vLLM and transformers on two CPU ranks.

    make engines
    python benchmarks/host_shares.py --output_file host_shares.json

Each engine runs in its own environment (build/engines), with the tiny model of the engines' tests: two layers, hidden
64, eight experts. The smaller a model, the larger putget's share of a step. Each rank decodes 1 request, then 8.

Clocks stand around the calls of the adapter, around the native call inside of them, and around the engine's experts
where the adapter calls these. So time is the engine's, the native call's (copies, and the wait for the other rank), or
Python's of putget with all torch operations that it calls. A step is the time from one first layer to the next, with
everything that the engine does between; the clocks themselves take a microsecond or two of each call. Steps of another
number of tokens, of prompts and of ranks without requests, do not count. Medians, because other work takes the cores
away in the middle of a step.

A profiler would not do: cProfile makes Python slower than torch, and torch's profiler knows no Python without doing so.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "putget.host_shares/1"
ENGINES = ("vllm", "sglang", "transformers")
RANKS, LAYERS, EXPERTS = 2, 2, 8
BATCHES = (1, 8)
NEW_TOKENS = 60
WARM_UPS, TURNS = 1, 3  # generations, of which the first ones do not count
LIMIT_S = 280.0
ENGINE, PUTGET, NATIVE = range(3)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PUTGET_ENGINES": "1",
    "PUTGET_ENGINE_TIMEOUT_S": "120",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.engines.sglang_models",
}


class Clock:
    """Time by kind, in the thread that runs the model. Ranks are forks of the process that made it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._totals, self._kinds, self._since = [0, 0, 0], [ENGINE], time.perf_counter_ns()
        self._rounds: list[tuple[int, ...]] = []

    def of(self, kind: int, function: Callable[..., Any], rows: int | None = None) -> Callable[..., Any]:
        """The function, whose time is of that kind. The argument at the place `rows` has a row for each token."""

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            now = time.perf_counter_ns()
            self._totals[self._kinds[-1]] += now - self._since
            self._since = now
            if rows is not None:
                self._note(now, len(args[rows] if len(args) > rows else next(iter(options.values()))))
            self._kinds.append(kind)
            try:
                return function(*args, **options)
            finally:
                now = time.perf_counter_ns()
                self._totals[kind] += now - self._since
                self._since = now
                self._kinds.pop()

        return timed

    def _note(self, now: int, num_tokens: int) -> None:
        self._rounds.append((now, num_tokens, *self._totals))
        if len(self._rounds) == 64:
            with (self._folder / f"rounds.{os.getpid()}").open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in self._rounds)
            self._rounds.clear()
            self._since = time.perf_counter_ns()

    def watch(self, kind: type, calls: tuple[str, ...], first: str) -> None:
        """Takes these calls of a class for putget's; the first one of a round has rows."""
        for name in calls:
            setattr(kind, name, self.of(PUTGET, getattr(kind, name), 1 if name == first else None))

    def watch_native(self) -> None:
        """Takes the native calls of all rounds for what they are."""
        kind = importlib.import_module("putget.core.native_object").NativeObject
        own = kind.__init__

        def init(native: Any, *args: Any, **options: Any) -> None:
            own(native, *args, **options)
            native._functions = {name: self.of(NATIVE, call) for name, call in native._functions.items()}

        kind.__init__ = init


def prompts(rank: int, batch: int) -> list[list[int]]:
    """Prompts of one token, so that each step has as many tokens as requests."""
    return [[1 + (rank * batch + number) % 120] for number in range(batch)]


def run_vllm(folder: Path, clock: Clock) -> None:
    """Two ranks of data and expert parallelism, each with an engine of its own."""
    from tests.engines.generate_vllm import join_or_end, meet_at, preload
    from tests.engines.prompts import free_port

    from putget.adapters.vllm.prepare_finalize import PrepareFinalizeRounds

    fork = preload()
    clock.watch(PrepareFinalizeRounds, ("prepare", "finalize", "allocate_fused_expert_output"), "prepare")

    def run(rank: int, port: int) -> None:
        from vllm import LLM, SamplingParams

        meet_at(port, rank, RANKS)
        engine = LLM(
            str(folder / str(EXPERTS)),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=64,
            enable_expert_parallel=True,
            kv_cache_memory_bytes=1 << 26,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )
        wanted = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        for batch in BATCHES:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts(rank, batch)]
            for _ in range(WARM_UPS + TURNS):
                engine.generate(asked, wanted, use_tqdm=False)

    port = free_port()
    processes = [fork.Process(target=run, args=(rank, port)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    join_or_end("vllm", processes)


def run_sglang(folder: Path, clock: Clock) -> None:
    """Two ranks of attention data parallelism and expert parallelism of one engine."""
    import multiprocessing

    from tests.engines import generate_sglang
    from tests.engines.prompts import kill_children

    from putget.adapters.sglang.dispatcher import DispatcherRounds

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    generate_sglang.preload()
    generate_sglang.patch()
    clock.watch(DispatcherRounds, ("dispatch", "combine"), "dispatch")
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * RANKS)
    running = generate_sglang.engine(
        folder / str(EXPERTS), **{**generate_sglang.EP2, "chunked_prefill_size": 64, "log_level": "warning"}
    )
    for batch in BATCHES:
        asked = [prompt for rank in range(RANKS) for prompt in prompts(rank, batch)]
        for _ in range(WARM_UPS + TURNS):
            running.generate(
                input_ids=asked,
                sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            )
    running.shutdown()
    kill_children()


def run_transformers(folder: Path, clock: Clock) -> None:
    """Two ranks with batches of their own: a spread model, and `generate` inside of `Spread.together`."""
    import multiprocessing

    from tests.engines.prompts import free_port

    from putget.adapters.transformers import Spread
    from putget.adapters.transformers.spreading import SpreadExperts

    clock.watch(SpreadExperts, ("__call__",), "__call__")
    clock.watch(Spread, ("begin", "end_pass"), "")

    def run(rank: int, port: int) -> None:
        import torch
        import transformers

        import putget
        from putget.adapters.transformers import spread

        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
        path = folder / str(EXPERTS)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        spread_model = spread(model, putget.Communicator(), max_tokens_per_rank=64)
        for layer in spread_model.layers:
            layer.experts_forward = clock.of(ENGINE, layer.experts_forward)  # type: ignore[attr-defined]
        with torch.no_grad(), spread_model.together():
            for batch in BATCHES:
                asked = torch.tensor(prompts(rank, batch))
                for _ in range(WARM_UPS + TURNS):
                    model.generate(asked, max_new_tokens=NEW_TOKENS, do_sample=False)
        spread_model.end()

    port = free_port()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run, args=(rank, port)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in processes]}")


def steps_of(rounds: list[list[int]], batch: int) -> list[list[int]]:
    """Time of each decode step of a rank by kind: from a round of the first layer to the next step's.

    Rounds come in turn of layers. Times of steps that others lie between, and of the first generations, are left out.
    """
    firsts = [(number, one) for number, one in enumerate(rounds[::LAYERS]) if one[1] == batch]
    steps = [
        [after[2 + kind] - before[2 + kind] for kind in range(3)]
        for (number, before), (next_number, after) in itertools.pairwise(firsts)
        if next_number == number + 1
    ]
    return steps[WARM_UPS * NEW_TOKENS :]


def summary(engine: str, folder: Path) -> list[dict[str, Any]]:
    """A line for each batch: medians of all steps of both ranks."""
    lines = []
    files = sorted(folder.glob("rounds.*"))
    if len(files) != RANKS:
        raise SystemExit(f"{engine}: {len(files)} processes have rounds, expected {RANKS}")
    for batch in BATCHES:
        steps = []
        for file in files:
            steps += steps_of([json.loads(line) for line in file.read_text().splitlines()], batch)
        if len(steps) < NEW_TOKENS:
            raise SystemExit(f"{engine}: {len(steps)} steps of {batch} tokens, expected {NEW_TOKENS} or more")
        engine_us, putget_us, native_us = (statistics.median(step[kind] for step in steps) / 1e3 for kind in range(3))
        whole = statistics.median(map(sum, steps)) / 1e3
        lines.append(
            {
                "engine": engine,
                "requests_a_rank": batch,
                "steps": len(steps),
                "step_us": round(whole, 1),
                "engine_us": round(engine_us, 1),
                "native_us": round(native_us, 1),
                "putget_python_us": round(putget_us, 1),
                "share": round(putget_us / whole, 4),
                "share_without_native": round(putget_us / (engine_us + putget_us), 4),
            }
        )
    return lines


def run_engine(engine: str, folder: Path) -> None:
    """In the engine's own environment."""
    from tests.engines.models import save_models

    save_models(folder, [str(EXPERTS)])
    clock = Clock(folder)
    clock.watch_native()
    {"vllm": run_vllm, "sglang": run_sglang, "transformers": run_transformers}[engine](folder, clock)


def measured(engine: str) -> list[dict[str, Any]]:
    """The lines of an engine, run in its own environment."""
    paths = (ROOT, ROOT / "python", ROOT / "transfer" / "python", ROOT / "tests" / "engines" / "stubs" / engine)
    settings = {**ENVIRONMENT, **os.environ, "PYTHONPATH": ":".join(map(str, paths))}
    python = ROOT / "build" / "engines" / engine / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{engine} is not installed: make engines")
    with tempfile.TemporaryDirectory(prefix="putget_shares_") as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            done = subprocess.run(
                [python, __file__, "--inside", engine, folder],
                cwd=ROOT,
                env=settings,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"{engine} ended with {done.returncode}:\n{log.read_text()[-4000:]}")
        return summary(engine, Path(folder))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="%(default)s")
    parser.add_argument("--output_file", type=Path, help="write the result as JSON")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        run_engine(options.inside[0], Path(options.inside[1]))
        return
    rows = []
    print("engine        requests a rank   step us   native us   putget's Python us   share   without native")
    for engine in options.engines:
        for row in measured(engine):
            rows.append(row)
            print(
                f"{engine:14}{row['requests_a_rank']:15}{row['step_us']:10.0f}{row['native_us']:12.0f}"
                f"{row['putget_python_us']:21.0f}{row['share']:8.1%}{row['share_without_native']:17.1%}",
                flush=True,
            )
    if options.output_file:
        where = {"host": socket.gethostname(), "machine": platform.machine(), "cores": os.cpu_count()}
        result = {"schema": SCHEMA, **where, "load": os.getloadavg(), "results": rows}
        options.output_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
