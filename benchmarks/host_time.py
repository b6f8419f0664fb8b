"""The host's time per call: eager pairs of dispatch and combine of one rank, by caller.

    python3 benchmarks/host_time.py --device cuda --tokens 1,128 --output_file host_time.json
    torchrun --nproc_per_node=4 benchmarks/host_time.py --device cuda      # on 4 GPUs: the period of a pair, too

The group is the world of torchrun, or one rank. The shape is DeepSeek-V3's: hidden 7168, 256 experts, top_k 8, BF16
rows; callers with ``_fp8`` quantise them first, with a scale for every 128 values, and get BF16 rows back. For each:

- *queue empty*: the host's time of one call, where the device has been waited for before it.
- *queue full*: the same while a long kernel holds the device up: the host alone, whatever the device does.
- *period*: time of a pair where many follow each other and the device is waited for at the end, the slowest rank's.
- *calls*: Python functions and torch calls of one pair, counted, and the steps that take most of it (``--steps``).

All are medians, in microseconds. FlashInfer's own class is measured in the same run where it is installed.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import putget
from putget.adapters import deep_ep
from putget.adapters.flashinfer import MoeAlltoAll
from putget.moe import ExpertParallelMoE, layer_payloads
from putget.moe.grouped_fp8 import quantise_rows
from putget_bench.profiles import dispatch_row_bytes

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
CALLS, PAIRS, PROFILED = 200, 100, 200
HOLD_CYCLES = 40_000_000  # about 20 ms of a GPU
Step = tuple[str, Callable[[], Any]]


class Case:
    """One kind of caller: the steps of a pair, in order."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    def pair(self) -> None:
        """All steps."""
        for _, step in self.steps:
            step()


def sent(rank: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, weights, rows."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, TOP_K, generator=generator)
    rows = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    return ids.to(device), weights.to(device), rows.to(device)


def alltoall(comm: putget.Communicator, tokens: int, device: torch.device) -> Case:
    """``putget.AllToAll``; experts' rows are in the workspace."""
    ids, weights, rows = sent(comm.rank, tokens, device)
    row = putget.Payload((HIDDEN,), torch.bfloat16)
    a2a = putget.AllToAll(
        comm,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        payloads=[row],
        output=row,
        device=device,
    )
    return Case([("dispatch", lambda: a2a.dispatch(ids, weights, rows)), ("combine", lambda: a2a.combine())])


def alltoall_fp8(comm: putget.Communicator, tokens: int, device: torch.device) -> Case:
    """``putget.AllToAll`` with rows that the caller quantises."""
    ids, weights, rows = sent(comm.rank, tokens, device)
    a2a = putget.AllToAll(
        comm,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        payloads=layer_payloads(HIDDEN, torch.float8_e4m3fn),
        output=putget.Payload((HIDDEN,), torch.bfloat16),
        device=device,
    )
    quantised: list[torch.Tensor] = []

    def quantise() -> None:
        quantised[:] = quantise_rows(rows)

    dispatch = ("dispatch", lambda: a2a.dispatch(ids, weights, *quantised))
    return Case([("quantise", quantise), dispatch, ("combine", lambda: a2a.combine())])


def flashinfer_like(
    make: Callable[..., Any], rank: int, tokens: int, device: torch.device, *, fp8: bool = False
) -> Case:
    """A class with FlashInfer's arguments, as its engines call it."""
    ids, weights, rows = sent(rank, tokens, device)
    moe = make()
    given: dict[str, Any] = {"invalid_token_expert_id": EXPERTS, "expert_id_payload_index": 2 if fp8 else 1}
    quantised = [rows]

    def quantise() -> None:
        quantised[:] = quantise_rows(rows)

    def combine() -> None:
        place = moe.get_combine_payload_tensor_in_workspace(tokens, HIDDEN, torch.bfloat16)
        moe.combine(place, tokens, payload_in_workspace=True)

    dispatch = ("dispatch", lambda: moe.dispatch(ids, [*quantised, ids, weights], tokens, **given))
    return Case([*([("quantise", quantise)] if fp8 else []), dispatch, ("combine", combine)])


def flashinfer(
    comm: putget.Communicator, tokens: int, device: torch.device, *, fp8: bool = False, **options: bool
) -> Case:
    """``MoeAlltoAll`` over putget."""
    mapping = SimpleNamespace(moe_ep_size=comm.size, moe_ep_rank=comm.rank)
    options = {"by_source": True, "ids_are_routes": False, **options}

    def make() -> MoeAlltoAll:
        return MoeAlltoAll(mapping, tokens, TOP_K, EXPERTS, hidden_size=HIDDEN, comm=comm, device=device, **options)

    return flashinfer_like(make, comm.rank, tokens, device, fp8=fp8)


def flashinfer_itself(comm: putget.Communicator, tokens: int, device: torch.device, *, fp8: bool = False) -> Case:
    """FlashInfer's own class; raises where it is not installed or cannot run here."""
    peer: Any = importlib.import_module("putget_bench.peers.flashinfer")
    row = putget.Payload((HIDDEN,), torch.bfloat16)
    payloads = layer_payloads(HIDDEN, torch.float8_e4m3fn if fp8 else torch.bfloat16)

    def make() -> Any:
        return peer.connect(
            ep_size=comm.size,
            max_tokens_per_rank=tokens,
            top_k=TOP_K,
            num_experts=EXPERTS,
            dispatch_row_bytes=dispatch_row_bytes(payloads, TOP_K),
            combine_row_bytes=row.row_bytes,
        )

    return flashinfer_like(make, comm.rank, tokens, device, fp8=fp8)


def deep_ep_normal(comm: putget.Communicator, tokens: int, device: torch.device) -> Case:
    """DeepEP's normal kernels over putget, with as many rows as can come: nothing is waited for on the host."""
    ids, weights, rows = sent(comm.rank, tokens, device)
    buffer = deep_ep.Buffer(comm, device=device)
    kept: list[Any] = []

    def dispatch() -> None:
        layout = buffer.get_dispatch_layout(ids.long(), EXPERTS)
        got = buffer.dispatch(
            rows,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            topk_idx=ids.long(),
            topk_weights=weights,
            num_worst_tokens=tokens * comm.size,
        )
        kept[:] = [got[0], got[4]]

    return Case([("dispatch", dispatch), ("combine", lambda: buffer.combine(*kept))])


def deep_ep_low_latency(comm: putget.Communicator, tokens: int, device: torch.device) -> Case:
    """DeepEP's low-latency kernels over putget, BF16 rows."""
    ids, weights, rows = sent(comm.rank, tokens, device)
    buffer, long_ids = deep_ep.Buffer(comm, device=device), ids.long()
    kept: list[Any] = []

    def dispatch() -> None:
        got = buffer.low_latency_dispatch(rows, long_ids, tokens, EXPERTS, use_fp8=False)
        kept[:] = [got[0], got[2]]

    return Case(
        [
            ("dispatch", dispatch),
            ("combine", lambda: buffer.low_latency_combine(kept[0], long_ids, weights, kept[1])),
        ]
    )


def layer(comm: putget.Communicator, tokens: int, device: torch.device, *, replayed: bool = False) -> Case:
    """``ExpertParallelMoE`` with small BF16 experts: their matrices are not what is measured."""
    moe = ExpertParallelMoE(
        comm,
        hidden_size=1024,
        intermediate_size=256,
        num_experts=32 * comm.size,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        weight_dtype=torch.bfloat16,
        device=device,
    )
    if replayed:
        moe.replay_calls(tokens)
    x = torch.randn(tokens, 1024, device=device).bfloat16()
    return Case([("forward", lambda: moe(x))])


CASES: dict[str, Callable[[putget.Communicator, int, torch.device], Case]] = {
    "alltoall": alltoall,
    "alltoall_fp8": alltoall_fp8,
    "flashinfer_class": flashinfer,
    "flashinfer_class_fp8": lambda *a: flashinfer(*a, fp8=True),
    "flashinfer_class_flat": lambda *a: flashinfer(*a, by_source=False, ids_are_routes=True),
    "flashinfer_itself": flashinfer_itself,
    "flashinfer_itself_fp8": lambda *a: flashinfer_itself(*a, fp8=True),
    "deep_ep_normal": deep_ep_normal,
    "deep_ep_low_latency": deep_ep_low_latency,
    "layer": layer,
    "layer_replayed": lambda *a: layer(*a, replayed=True),
}


def wait(device: torch.device) -> None:
    """Until the device has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(case: Case, device: torch.device, hold: bool) -> dict[str, float]:
    """Microseconds of each step on the host: the median, and the 99th percentile of the pair."""
    found: dict[str, list[float]] = {name: [] for name, _ in case.steps}
    pairs = []
    for turn in range(CALLS):
        if not hold or turn % 10 == 0:
            wait(device)
            if hold and device.type == "cuda":
                torch.cuda._sleep(HOLD_CYCLES)
        total = 0.0
        for name, step in case.steps:
            begin = time.perf_counter_ns()
            step()
            took = (time.perf_counter_ns() - begin) / 1e3
            found[name].append(took)
            total += took
        pairs.append(total)
    wait(device)
    medians = {name: round(statistics.median(values), 2) for name, values in found.items()}
    return {**medians, "pair": round(statistics.median(pairs), 2), "pair_p99": round(sorted(pairs)[-CALLS // 100], 2)}


def period(case: Case, device: torch.device) -> float:
    """Microseconds of a pair among many."""
    found = []
    for _ in range(9):
        wait(device)
        if dist.get_world_size() > 1:
            dist.barrier()
        begin = time.perf_counter_ns()
        for _ in range(PAIRS):
            case.pair()
        wait(device)
        found.append((time.perf_counter_ns() - begin) / 1e3 / PAIRS)
    slowest = torch.tensor(found, dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest.median()), 2)


def counted(case: Case, most: int) -> dict[str, Any]:
    """Python functions and calls into C of one pair, and where the time goes."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(PROFILED):
        case.pair()
    profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    python = sum(row[0] for (file, *_), row in stats.items() if file != "~")
    into_c = sum(row[0] for (file, *_), row in stats.items() if file == "~")
    rows = sorted(stats.items(), key=lambda item: -item[1][2])[:most]
    steps = [
        {
            "function": f"{Path(file).name}:{line} {name}" if file != "~" else name,
            "calls": round(row[0] / PROFILED, 2),
            "profiled_us": round(row[2] / PROFILED * 1e6, 2),
        }
        for (file, line, name), row in rows
    ]
    return {
        "python_calls": round(python / PROFILED, 1),
        "c_calls": round(into_c / PROFILED, 1),
        **({"steps": steps} if most else {}),
    }


def measure(name: str, comm: putget.Communicator, tokens: int, device: torch.device, steps: int) -> dict[str, Any]:
    """One line of the table."""
    line: dict[str, Any] = {"caller": name, "tokens": tokens}
    try:
        case = CASES[name](comm, tokens, device)
        for _ in range(20):
            case.pair()
    except (ImportError, RuntimeError, AssertionError) as error:
        return {**line, "absent": f"{type(error).__name__}: {error}".split("\n")[0]}
    line["period"] = period(case, device)
    line["queue_empty"] = timed(case, device, hold=False)
    line["queue_full"] = timed(case, device, hold=True) if device.type == "cuda" else None
    return {**line, **counted(case, steps)}


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description="What a call costs the host")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", default="1,128")
    parser.add_argument("--callers", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=0, help="how many steps to show")
    parser.add_argument("--output_file", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    lines = []
    with torch.inference_mode():
        for tokens in map(int, options.tokens.split(",")):
            for name in options.callers.split(","):
                comm = putget.Communicator()
                lines.append(measure(name, comm, tokens, device, options.steps))
                if comm.rank == 0:
                    print(json.dumps(lines[-1]), flush=True)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report = {"schema": "putget.host_time/1", "device": where, "ranks": dist.get_world_size(), "lines": lines}
    if options.output_file and dist.get_rank() == 0:
        options.output_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
