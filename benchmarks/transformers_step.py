"""A decode step of a transformers model with its experts under putget, and under transformers' own implementations.

    python benchmarks/transformers_step.py --output_file step.json
    torchrun --nproc_per_node 2 benchmarks/transformers_step.py       # each rank has requests of its own

The model has the shape of Qwen3-30B-A3B and random BF16 weights. A step is one token of each request, over a static
cache, captured in a CUDA graph. On one GPU the peers are transformers' "grouped_mm" and "batched_mm", in the same
process. With several ranks they are its "all_reduce", where every rank has the requests of all, and its "all_to_all",
where each has its own: there the host reads sizes in each layer, so nothing can be captured. Outputs of some expert
layers for the same tokens are compared first: logits of a random model are no measure, because a token whose experts
differ by one rounding is another token some layers later. Medians of the slowest rank, in us. For some batches the
kernels of a step are shown by kind, and an eager step runs with host synchronisation forbidden.
On the CPU (--device cpu, with small sizes) nothing is captured: that checks this program.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers_peers import SPREAD, Upstream

import putget
from putget.adapters.transformers import spread

PEERS = ("grouped_mm", "batched_mm")
_ROUNDS = 25
_COMPARED_LAYERS = 3
_TOLERANCE = 2.0**-6  # of an output's norm: BF16, rounded in another order
# The work of kernels, by parts of their names.
_KINDS = {
    "round": ("dispatch_kernel", "combine_kernel", "combine_bulk"),
    "rows by expert": ("count_kernel", "place_kernel", "finalize_kernel"),
    "experts": ("activation_kernel", "GroupProblemShape", "grouped"),
    "collectives": ("nccl",),
    "attention": ("flash", "fmha", "attention", "mha"),
    "dense products": ("nvjet", "gemm", "cublas"),
}


def config_of(given: argparse.Namespace) -> Any:
    """The model's; sizes of Qwen3-30B-A3B unless others are given."""
    return transformers.Qwen3MoeConfig(
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        intermediate_size=3 * given.hidden_size,
        moe_intermediate_size=given.intermediate_size,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=max(1, given.heads // 8),
        head_dim=128,
        num_experts=given.num_experts,
        num_experts_per_tok=given.top_k,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )


def make_model(given: argparse.Namespace, device: torch.device) -> Any:
    """Random weights, the same on all ranks, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.Qwen3MoeForCausalLM._from_config(config_of(given))
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.02)
    return model.eval()


class Step:
    """One token of each request."""

    def __init__(self, model: Any, batch: int, context: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = model
        self.ids = torch.randint(model.config.vocab_size, (batch, 1), generator=generator).to(device)
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=context)
        self.context = context
        self.position = torch.full((batch, 1), context - 2, device=device)
        self.graph: Any = None

    @torch.no_grad()
    def run(self) -> None:
        """Eagerly; the cache's length is the same for each call."""
        for layer in self.cache.layers:  # before the first call there is none
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, torch.Tensor):
                length.fill_(self.context - 2)
            elif length is not None:
                layer.cumulative_length = self.context - 2
        self.model(input_ids=self.ids, cache=self.cache, position_ids=self.position)

    def prepare(self, *, captures: bool) -> None:
        """Runs it, and captures it where there is a GPU."""
        self.run()
        torch.manual_seed(self.ids.shape[0])
        for layer in self.cache.layers:  # of the tokens before the step's
            layer.keys.normal_()
            layer.values.normal_(0.0, 0.1)
        self.run()
        if self.ids.is_cuda and captures:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()

    def __call__(self) -> None:
        """As captured."""
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()


def meet() -> None:
    """Waits for all ranks."""
    dist.all_reduce(torch.zeros(1))


def microseconds(step: Callable[[], None], device: torch.device) -> float:
    """The median of the slowest rank."""
    taken = []
    for _ in range(_ROUNDS + 3):
        meet()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - begin) * 1e6)
    slowest = torch.tensor(taken[3:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(statistics.median(slowest.tolist()), 1)


def kinds_of(step: Callable[[], None]) -> dict[str, float]:
    """Microseconds of a step's kernels by kind; those that run side by side count both."""
    meet()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    found = dict.fromkeys([*_KINDS, "others"], 0.0)
    for event in profile.key_averages():
        kind = next((kind for kind, parts in _KINDS.items() if any(part in event.key for part in parts)), "others")
        found[kind] += event.self_device_time_total / 5
    return {kind: round(value, 1) for kind, value in found.items()}


def refuses_synchronisation(step: Step) -> str | None:
    """Why an eager step waits for the device, or None."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    except RuntimeError as error:
        return str(error).split("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


@torch.no_grad()
def outputs_of(model: Any, batch: int, device: torch.device, *ranks: int) -> torch.Tensor:
    """[_COMPARED_LAYERS, batch, hidden_size]: what the experts of some layers make of the ranks' random tokens."""
    made = [torch.Generator().manual_seed(rank * 1009 + batch) for rank in ranks]
    x = (
        torch.cat([torch.randn(batch, 1, model.config.hidden_size, generator=one) for one in made])
        .bfloat16()
        .to(device)
    )
    layers = model.model.layers
    found = [layers[place * (len(layers) - 1) // (_COMPARED_LAYERS - 1)].mlp(x) for place in range(_COMPARED_LAYERS)]
    return torch.stack([one[0] if isinstance(one, tuple) else one for one in found]).view(_COMPARED_LAYERS, len(x), -1)


def measure(
    name: str, model: Any, given: argparse.Namespace, device: torch.device, rank: int, known: dict[int, torch.Tensor]
) -> dict[str, Any]:
    """All batches with one implementation; `known` has the outputs that the first one gave."""
    ranks = dist.get_world_size()
    together = ranks if name == "all_reduce" else 1  # the ranks whose requests each rank has
    line: dict[str, Any] = {"experts": name, "us": {}, "kinds": {}, "error": {}}
    for batch in given.batches:
        if name == "batched_mm" and batch > given.most_batched:
            continue
        step = Step(model, batch * together, given.context, device, seed=batch if together > 1 else rank * 1009 + batch)
        step.prepare(captures=name != "all_to_all")
        meet()
        got = outputs_of(model, batch, device, *(range(ranks) if together > 1 else [rank]))
        if together > 1:
            got = got[:, rank * batch : (rank + 1) * batch]
        want = known.setdefault(batch, got).float()
        line["error"][batch] = round(float(((got.float() - want).norm(dim=2) / want.norm(dim=2)).max()), 5)
        if not line["error"][batch] <= _TOLERANCE:
            raise SystemExit(f"{name}, {batch} requests: outputs of experts differ by {line['error'][batch]}")
        line["us"][batch] = microseconds(step, device)
        if device.type == "cuda" and batch in given.shown:
            line["kinds"][batch] = kinds_of(step)
        if device.type == "cuda" and name == "putget" and batch == given.batches[0]:
            line["waits_for_the_device"] = refuses_synchronisation(step)
        del step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return line


def numbers(text: str) -> list[int]:
    """The numbers of a list like 1,8,32."""
    return [int(part) for part in text.split(",") if part]


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the model's sizes, which are Qwen3-30B-A3B's."""
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden_size", type=int, default=2048)
    parser.add_argument("--intermediate_size", type=int, default=768)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--num_experts", type=int, default=128)
    parser.add_argument("--top_k", type=int, default=8)
    parser.add_argument("--vocab_size", type=int, default=151936)


def main() -> None:
    """Measures, prints a line for each implementation, and writes the JSON."""
    parser = argparse.ArgumentParser(description="A decode step of Qwen3-30B-A3B's shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128, 512])
    parser.add_argument("--shown", type=numbers, default=[1, 32, 512], help="batches whose kernels are shown by kind")
    add_sizes(parser)
    parser.add_argument("--most_batched", type=int, default=32, help="batched_mm copies the weights of each choice")
    parser.add_argument("--output_file", type=Path)
    given = parser.parse_args()
    if "RANK" not in os.environ:
        store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl" if given.device != "cpu" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    model = make_model(given, device)
    lines: list[dict[str, Any]] = []
    known: dict[int, torch.Tensor] = {}
    for name in PEERS if ranks == 1 else ():
        model.set_experts_implementation(name)
        lines.append(measure(name, model, given, device, rank, known))
        print(json.dumps(lines[-1]), flush=True)
    model.set_experts_implementation("grouped_mm")
    for batch in given.batches:
        known.setdefault(batch, outputs_of(model, batch, device, rank))
    for name in SPREAD if ranks > 1 else ():
        upstream = Upstream(model, name, device)
        lines.append(measure(name, model, given, device, rank, known))
        upstream.end()
        if rank == 0:
            print(json.dumps(lines[-1]), flush=True)
    with contextlib.ExitStack() as stack:
        group = dist.new_group(backend="gloo")
        comm = stack.enter_context(putget.Communicator(group))
        stack.callback(spread(model, comm, max_tokens_per_rank=max(given.batches)).end)
        lines.append(measure("putget", model, given, device, rank, known))
    if rank == 0:
        print(json.dumps(lines[-1]), flush=True)
        report = {
            "schema": "putget.transformers_step/1",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "ranks": ranks,
            "transformers": transformers.__version__,
            "settings": {key: value for key, value in vars(given).items() if key != "output_file"},
            "lines": lines,
        }
        if given.output_file:
            given.output_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
