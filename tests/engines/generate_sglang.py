"""SGLang itself on CPU ranks, with putget or in one process: greedy tokens of a tiny mixture-of-experts model.

python -m tests.engines.generate_sglang FOLDER CASE...: writes FOLDER/CASE, one engine after the other. A case is
its name and the number of the model's experts: FOLDER/8 is the model of ``ep2.8``.

What SGLang lacks for expert parallelism on a CPU stands here and in ``stubs/sglang``. Nothing else is changed:

- ``moe_forward_native`` knows no "no expert";
- its attention in torch has no value for the lengths of padding;
- its plan of two-batch overlap for prompts asks a GPU how many SMs it has, to leave some of them to DeepEP;
- its processes are forked, where SGLang spawns them, because importing SGLang takes most of the time.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from tests.engines.models import save_models
from tests.engines.prompts import NEW_TOKENS, PROMPTS, each_rank_on_a_host, free_port, kill_children

ZMQ_TCP_PORT_DELTA, FOLLOWING_PORTS = 233, 32  # sglang.srt.server_args has the first
ALONE: dict[str, Any] = {}
EP2 = {"tp_size": 2, "attn_dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "putget"}
CASES: dict[str, dict[str, Any]] = {
    "alone": ALONE,
    "ep2": EP2,
    "ep4": {**EP2, "tp_size": 4, "attn_dp_size": 4},
    "overlap": {**EP2, "enable_two_batch_overlap": True},
    "hosts": {**EP2, "nnodes": 2, "node_rank": 0},
    "killed": EP2,
    "eplb": {
        **EP2,
        "ep_num_redundant_experts": 2,
        "enable_eplb": True,
        "eplb_rebalance_num_iterations": 4,
        "eplb_rebalance_layers_per_chunk": 1,  # all at once is timed with a GPU's clock
        "expert_distribution_recorder_buffer_size": 4,
        "ep_dispatch_algorithm": "static",
    },
}


def patch() -> None:
    """The shim, in every process."""
    from sglang.srt.batch_overlap import operations_strategy, two_batch_overlap
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe import fused_moe_native

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    operations_strategy._is_hip = True  # the plan without a number of SMs for matrix products
    two_batch_overlap._is_hip = True
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=0)

    own = fused_moe_native.moe_forward_native

    def moe_forward_native(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        """Each choice by itself: the original counts an expert once for each token."""
        ids, weights = topk_output.topk_ids.flatten(), topk_output.topk_weights.flatten()
        nobody = ids < 0
        choices = topk_output._replace(
            topk_ids=ids.masked_fill(nobody, 0)[:, None], topk_weights=weights.masked_fill(nobody, 0.0)[:, None]
        )
        num_tokens, top_k = topk_output.topk_ids.shape
        rows = own(layer, x.repeat_interleave(top_k, 0), choices, config)
        return rows.view(num_tokens, top_k, -1).sum(1)

    fused_moe_native.moe_forward_native = moe_forward_native


def free_ports() -> int:
    """A port for an engine. Others follow from it, and SGLang does not look whether they are free.

    Not between 22000 and 29999, where SGLang takes one more at random.
    """
    following = (0, *range(ZMQ_TCP_PORT_DELTA, ZMQ_TCP_PORT_DELTA + FOLLOWING_PORTS))
    while True:
        first = random.randrange(10000, 21000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for more in following:
                probes.enter_context(socket.socket()).bind(("0.0.0.0", first + more))
            return first


def arguments(model: Path, **options: Any) -> dict[str, Any]:
    """The arguments of an engine or a server."""
    return {
        "port": free_ports(),
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "max_total_tokens": 1024,
        "max_running_requests": 16,
        "chunked_prefill_size": 16,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "skip_server_warmup": True,
        "log_level": "info",
        "random_seed": 0,
        **options,
    }


def engine(model: Path, **options: Any) -> Any:
    import sglang

    return sglang.Engine(**arguments(model, **options))


def tokens_of(running: Any, indices: Sequence[int]) -> dict[str, list[int]]:
    """Greedy tokens of requests that run together; each has its own number of tokens."""
    wanted = [{"temperature": 0, "max_new_tokens": NEW_TOKENS[index], "ignore_eos": True} for index in indices]
    outputs = running.generate(input_ids=[PROMPTS[index] for index in indices], sampling_params=wanted)
    return {str(index): output["output_ids"] for index, output in zip(indices, outputs, strict=True)}


def run_case(folder: Path, case: str) -> None:
    name, num_experts = case.split(".")
    ranks = CASES[name].get("tp_size", 1)
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"  # NCCL comes with torch, and needs a GPU
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * ranks)  # else SGLang wants a NUMA node for each rank
    start = time.monotonic()
    if name == "hosts":
        each_rank_on_a_host()
        CASES[name]["dist_init_addr"] = f"127.0.0.1:{free_port()}"
        multiprocessing.Process(target=other_node, args=(folder / num_experts, CASES[name])).start()
    running = engine(folder / num_experts, **CASES[name])
    ready = time.monotonic()
    tokens = tokens_of(running, range(len(PROMPTS)))
    assert tokens_of(running, [3])["3"] == tokens["3"]  # all ranks but one have no request
    if name == "ep2":
        running.start_profile(output_dir=str(folder / "traces" / case), activities=["CPU"])
        tokens_of(running, range(len(PROMPTS)))
        running.stop_profile()
    if name == "killed":
        kill_a_rank(folder / case, running)
    running.shutdown()
    kill_children()  # the other node serves on
    seconds = {"to start": ready - start, "to generate": time.monotonic() - ready}
    (folder / case).write_text(json.dumps({"tokens": tokens, "seconds": seconds}))


def run_case_or_end(folder: Path, case: str) -> None:
    """An error is told at once, and the engine's processes end: multiprocessing would wait for them first."""
    try:
        run_case(folder, case)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        kill_children()
        os._exit(1)


def other_node(model: Path, options: dict[str, Any]) -> None:
    """The second node's server, which serves until it is ended."""
    from sglang.srt import server_args

    # On a host of its own it would not meet the first node's ports, which are in use if that node is the faster one.
    server_args.wait_port_available = lambda *_, **__: True
    engine(model, **{**options, "node_rank": 1})


def kill_a_rank(out: Path, running: Any) -> None:
    """Kills one rank and asks for tokens; SGLang then ends this process and all of its own."""
    ranks = [child for child in psutil.Process().children(recursive=True) if "scheduler" in " ".join(child.cmdline())]
    out.write_text(json.dumps({"ranks": [rank.pid for rank in ranks], "killed at": time.monotonic()}))
    ranks[-1].kill()
    tokens_of(running, range(len(PROMPTS)))


def watch_the_killed(out: Path) -> None:
    """How long the ranks that were not killed lived on."""
    told = json.loads(out.read_text())
    while any(runs(pid) for pid in told["ranks"]):
        time.sleep(0.1)
    out.write_text(json.dumps({"seconds": time.monotonic() - told["killed at"], "ranks": len(told["ranks"])}))


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def preload() -> None:
    """The arguments that every process needs."""
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry

    del sglang


def main(folder: Path, cases: list[str]) -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    preload()
    patch()
    save_models(folder, {case.split(".")[1] for case in cases})
    for case in cases:
        # In one write: processes of the case before may still have something to say.
        print(f"\n=== {case}\n", end="", flush=True)
        process = multiprocessing.Process(target=run_case_or_end, args=(folder, case))
        process.start()
        process.join()
        if case.startswith("killed"):
            watch_the_killed(folder / case)
        elif process.exitcode:
            raise SystemExit(f"{case} ended with {process.exitcode}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
