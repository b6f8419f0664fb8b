"""Measures updates of one rollout process from a trainer in another one; both share a GPU.

    python benchmarks/weights_gpu.py --params 64 --output_file weights_gpu.json

The trainer has BF16 parameters in pinned memory, as many as `--pin_seconds` allow for, the rollout process FP8 values
and scales on the GPU. By turns for each way to commit: updates while the rollout process is idle, and updates while it
computes steps (a graph of products of matrices). Bytes are compared before anything is timed: those of some parameters,
one with NaN, infinities and blocks of zeros, with a CPU's, those of all with torch's eager steps on the GPU. Beside the
updates, the floor of each stage: a copy of all pinned memory, quantising what lies on the GPU already, and the engine's
own writes of as many bytes.

Temporary memory is what the trainer's process has allocated at most, by torch's own count, from the time before the
`Trainer` was made. An update may take `--watermark_mb`, or a task that is alone.

How long inference stands still: with "swap" from the end of the last step of a version to the beginning of the first of
the next one; with "paused" from the pause in front of the update to the first step behind it.

Needs `putget_transfer`, torch and a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import putget_transfer as pt
from putget_transfer import weights
from putget_transfer.weights import _kernel

WAIT_S = 120.0
IMM = 55
BEGUN = time.monotonic()
PIECE = 32 << 20
ON_CPU = 3
"""Parameters that are compared with a CPU's bytes."""


def engine() -> pt.Engine:
    """Return an engine on the GPU."""
    torch.cuda.set_device(0)
    return pt.Engine.builder().group(pt.DeviceGroup.nvlink(0)).build()


def say(text: str) -> None:
    """Say what is done next."""
    print(f"{time.monotonic() - BEGUN:6.1f} s: {text}", file=sys.stderr, flush=True)


def made(shape: tuple[int, int], number: int) -> torch.Tensor:
    """Return a parameter: the same in both processes."""
    generator = torch.Generator(device="cuda").manual_seed(number)
    tensor = torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
    if number == 0:
        tensor[:128, :256] = 0
        for at, value in enumerate((float("nan"), float("inf"), -float("inf"), -0.0, 2.0**-130)):
            tensor[at::1000, at::777] = value
    return tensor


def eagerly(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise on the GPU without the kernel.

    Raises:
        RuntimeError: The kernel is not there.
    """
    if not _kernel.is_loaded(tensor.device):
        raise RuntimeError("the kernel is not there")
    takes = _kernel.takes
    _kernel.takes = lambda _tensor: False  # type: ignore[assignment]
    try:
        return weights.quantise(tensor)  # type: ignore[no-any-return]
    finally:
        _kernel.takes = takes


class Serving:
    """Steps of inference."""

    def __init__(self, products: int) -> None:
        self.hidden = torch.randn(256, 8192, dtype=torch.bfloat16, device="cuda")
        self.weight = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") / 90
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            _ = self.hidden @ self.weight
        stream.synchronize()
        with torch.cuda.graph(self.graph, stream=stream):
            out = self.hidden
            for _ in range(products):
                out = out @ self.weight
        self.ends: list[float] = []
        self.times: list[float] = []

    def step(self) -> None:
        """Compute one."""
        begun = time.monotonic()
        self.graph.replay()
        torch.cuda.synchronize()
        self.ends.append(time.monotonic())
        self.times.append(self.ends[-1] - begun)


class Rank:
    """The rollout process."""

    def __init__(self, pipe: Connection, shape: tuple[int, int], task_bytes: int) -> None:
        self.pipe, self.engine = pipe, engine()
        self.address, params = pipe.recv()
        number = len(params)
        self.values = {f"w{at}": torch.zeros(shape, dtype=torch.float8_e4m3fn, device="cuda") for at in range(number)}
        grid = (shape[0] // 128, shape[1] // 128)
        scales = {f"w{at}_scale_inv": torch.zeros(grid, device="cuda") for at in range(number)}
        self.model = self.values | scales
        entries = weights.checkpoint(params, quantised=list(self.values))
        self.slots = weights.record(self.model, entries, load=self.load)
        self.schedule = weights.plan(params, [self.slots], task_bytes=task_bytes)
        pipe.send(self.slots)
        self.version = 0

    def load(self, checkpoint: Any) -> None:
        """Load a checkpoint."""
        for name, tensor in checkpoint:
            self.model[name].copy_(tensor)

    def start(self, commit: Any) -> None:
        """Begin to commit in one way."""
        self.serving = Serving(self.pipe.recv())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.rollout = weights.Rollout(self.engine, self.slots, self.schedule, 0, commit=commit)
        self.held = torch.cuda.max_memory_allocated() - before
        self.rollout.version = self.version

    def update(self, commit: str, serves: bool) -> dict[str, Any]:
        """Take a version; with steps meanwhile, or idle."""
        self.version += 1
        serving, paused = self.serving, commit == "paused"
        alone = serving.times
        if serves:
            for _ in range(30):
                serving.step()
            alone, serving.times = serving.times[-20:], []
        begun = time.monotonic()
        self.pipe.send(self.rollout.expect(self.version, {0: self.address}, WAIT_S)[0])
        while not self.rollout.ready(0.0 if serves and not paused else WAIT_S):
            serving.step()
        complete = last = time.monotonic()
        if serves and not paused:
            last = serving.ends[-1] if serving.ends else complete
        self.rollout.commit(self.version)
        torch.cuda.synchronize()
        end = time.monotonic()
        report = {
            "seconds": end - begun,
            "landed_s": complete - begun,
            "commit_s": end - complete,
            "still_s": end - (begun if paused else last),
        }
        if serves:
            during = serving.times or [float("nan")]
            report |= {"step_s": statistics.median(alone), "step_during_s": statistics.median(during)}
            report |= {"steps_during": len(serving.times), "longest_step_s": max(during)}
        return report


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare tensors, of which one may lie on the host."""
    return torch.equal(one.view(torch.uint8).to(other.device), other.view(torch.uint8))


def rollout(pipe: Connection, shape: tuple[int, int], task_bytes: int) -> None:
    """Obey the trainer."""
    rank, commit = Rank(pipe, shape, task_bytes), ""
    while (order := pipe.recv()) is not None:
        if order[0] == "start":
            commit = order[1]
            rank.start(commit)
            pipe.send(rank.held)
        elif order[0] == "update":
            pipe.send(rank.update(commit, order[1]))
        elif order[0] == "check":
            tensor, name = made(shape, order[1]), f"w{order[1]}"
            wanted = [eagerly(tensor)] + ([weights.quantise(tensor.cpu())] if order[1] < ON_CPU else [])
            found = rank.model[name], rank.model[name + "_scale_inv"]
            pipe.send(all(same_bytes(one, other) for pair in wanted for one, other in zip(found, pair, strict=True)))
        elif order[0] == "memory":
            memory = torch.zeros(order[1], dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            handle = rank.engine.reg_mr(memory)[0]
            pipe.send(rank.engine.desc_for(handle, pt.NetAddr.from_bytes(rank.address)).to_bytes())
        elif order[0] == "expect":
            known = rank.engine.expect_imm_count(IMM, order[1], take=True, deadline_s=WAIT_S)
            pipe.send(None)
            known.wait(WAIT_S)
            pipe.send(time.monotonic())
    rank.engine.close()


class Bench:
    """The trainer."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.shape = options, (options.rows, options.columns)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.task_bytes = options.task_mb << 20
        arguments = (theirs, self.shape, self.task_bytes)
        self.process = context.Process(target=rollout, args=arguments, daemon=True)
        self.process.start()
        self.engine = engine()
        say("pinned memory")
        self.source: dict[str, torch.Tensor] = {}
        until = time.monotonic() + options.pin_seconds
        for at in range(options.params):
            if time.monotonic() > until:
                break
            self.source[f"w{at}"] = torch.empty(self.shape, dtype=torch.bfloat16, pin_memory=True)
            self.source[f"w{at}"].copy_(made(self.shape, at))
        say(f"schedule of {len(self.source)} parameters")
        params = weights.describe(self.source, rank=0)
        self.pipe.send((self.engine.main_address().to_bytes(), params))
        self.schedule = weights.plan(params, [self.answer()], task_bytes=self.task_bytes)
        _kernel.is_loaded("cuda")
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        self.begun = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.trainer = weights.Trainer(
            self.engine, self.schedule, 0, self.source, watermark_bytes=options.watermark_mb << 20, device="cuda"
        )

    def answer(self) -> Any:
        """Return what the rollout process says.

        Raises:
            RuntimeError: It is silent, or has ended.
        """
        if not self.pipe.poll(WAIT_S):
            raise RuntimeError("the rollout process has not answered")
        return self.pipe.recv()

    def update(self, version: int, serves: bool) -> dict[str, Any]:
        """Publish a version."""
        self.pipe.send(("update", serves))
        offer = self.answer()
        report = self.trainer.publish(version, WAIT_S, offers=[offer])
        if report.failed:
            raise RuntimeError(f"version {version}: {report.failed}")
        return {**self.answer(), "report": json.loads(report.to_json())}

    def check(self) -> None:
        """Compare some parameters.

        Raises:
            RuntimeError: One differs.
        """
        for number in range(len(self.source)):
            self.pipe.send(("check", number))
            if not self.answer():
                raise RuntimeError(f"parameter {number} differs")

    def floors(self) -> dict[str, list[float]]:
        """Time each stage alone, with as many bytes."""
        found: dict[str, list[float]] = {"host_to_device": [], "quantise": [], "quantise_ceiling": [], "write": []}
        there = torch.empty(self.shape, dtype=torch.bfloat16, device="cuda")
        part = self.shape[0] * PIECE // (self.shape[0] * self.shape[1])
        half = there[:part]
        # BF16 in, FP8 out: three bytes for each element, by a copy that reads and writes as many.
        copied = torch.empty(half.numel() * 3 // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(copied)
        times = range(len(self.source) * self.shape[0] // part)
        for _ in range(3):
            found["host_to_device"].append(
                _seconds(lambda: [there.copy_(one, non_blocking=True) for one in self.source.values()])
            )
            found["quantise"].append(_seconds(lambda: [weights.quantise(half) for _ in times]))
            found["quantise_ceiling"].append(_seconds(lambda: [target.copy_(copied) for _ in times]))
            found["write"].append(self.write())
        return found

    def write(self) -> float:
        """Return the seconds in which the engine's own writes move as many bytes as an update."""
        if not hasattr(self, "raw"):
            self.raw = torch.zeros(self.options.watermark_mb << 20, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            self.handle = self.engine.reg_mr(self.raw)[0]
            self.pipe.send(("memory", len(self.raw)))
            self.desc = pt.MrDesc.from_bytes(self.answer())
        count, room = self.schedule.num_bytes // PIECE, len(self.raw) // PIECE
        self.pipe.send(("expect", count))
        self.answer()
        begun, under_way = time.monotonic(), []
        for at in range(count):
            place = at % room * PIECE
            source, target = (self.handle, place), (self.desc, place)
            under_way.append(self.engine.submit_single_write(PIECE, IMM, source, target, deadline_s=WAIT_S))
        for transfer in under_way:
            transfer.wait(WAIT_S)
        return float(self.answer() - begun)

    def keep(self, found: dict[str, Any]) -> None:
        """Show what was found so far, and write it."""
        for name, rows in found["updates"].items():
            times = {key: [row[key] for row in rows] for key in rows[0] if key != "report"}
            times |= {key: [row["report"][key] for row in rows] for key in rows[0]["report"] if key.endswith("_s")}
            print(name, *(f"{key} {statistics.median(values):.4f}" for key, values in times.items()))
        self.compare(found)
        if self.options.output_file:
            self.options.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def compare(self, found: dict[str, Any]) -> None:
        """Show stages beside their floors, and what the goals are about."""
        floors, goals = found.get("floors_s", {}), {}
        stages = {"gather_s": "host_to_device", "prepare_s": "quantise", "write_s": "write"}
        for name, rows in found["updates"].items():
            reports = [row["report"] for row in rows]
            times = {stage: statistics.median(report[stage] for report in reports) for stage in stages}
            total = statistics.median(report["seconds"] for report in reports)
            goals[name] = {"total_s": total, "total_over_longest_stage": total / max(times.values())}
            goals[name]["still_s"] = statistics.median(row["still_s"] for row in rows)
            if floors:
                longest = max(floors[floor] for floor in stages.values())
                goals[name]["total_over_longest_floor"] = total / longest
                goals[name] |= {f"{stage} over floor": times[stage] / floors[stages[stage]] for stage in stages}
            print(name, {key: round(value, 4) for key, value in goals[name].items()})
        found["goals"] = goals
        print("floors, ms", {name: round(seconds * 1e3, 2) for name, seconds in floors.items()})
        peak, most = found["peak_temporary_bytes"], found["watermark_bytes"] + found["largest_task_bytes"]
        print(f"temporary memory: {peak >> 20} MiB at most; watermark and a task: {most >> 20} MiB")
        print("second copy", found["second_copy_bytes"])

    def run(self) -> None:
        """Measure all of it."""
        found: dict[str, Any] = {"schema": "putget.weights_gpu/1", "gpu": torch.cuda.get_device_name(), "updates": {}}
        found["num_bytes"] = self.schedule.num_bytes
        found["source_bytes"] = sum(one.numel() * 2 for one in self.source.values())
        version = 0
        for commit in ("swap", "paused"):
            self.pipe.send(("start", commit))
            self.pipe.send(self.options.products)
            found.setdefault("second_copy_bytes", {})[commit] = self.answer()
            for serves in (False, True):
                say(f"{commit}, {'serving' if serves else 'idle'}")
                rows = []
                for at in range(self.options.rounds + 1):
                    version += 1
                    rows.append(self.update(version, serves))
                    if at == 0 and not serves:
                        self.check()
                found["updates"][f"{commit}, {'serving' if serves else 'idle'}"] = rows[1:]
        found["peak_temporary_bytes"] = torch.cuda.max_memory_allocated() - self.begun
        found["watermark_bytes"], found["task_bytes"] = self.options.watermark_mb << 20, self.task_bytes
        found["largest_task_bytes"] = max(work.total for work in self.trainer._works)
        self.keep(found)
        say("floors")
        found["floors_s"] = {name: statistics.median(times) for name, times in self.floors().items()}
        self.keep(found)
        self.pipe.send(None)
        self.process.join(10)


def _seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - begun


def main() -> None:
    """Measure, and show what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("params", 64), ("rows", 8192), ("columns", 16384), ("rounds", 5), ("products", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--watermark_mb", type=int, default=256)
    parser.add_argument("--task_mb", type=int, default=32)
    parser.add_argument("--pin_seconds", type=float, default=60)
    parser.add_argument("--output_file", type=Path)
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
