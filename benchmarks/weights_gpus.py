"""Measures weight updates from trainers into rollout ranks, each with a GPU of its own, beside other ways.

    python benchmarks/weights_gpus.py --gpus 2 --peers checkpoint_engine --output_file weights_gpus.json

The first half of the GPUs trains, the second half serves. Trainers shard a BF16 model over their GPUs (FSDP2). Rollout
ranks have it fused, in BF16 or in FP8 blocks: as replicas, or sliced over tensor-parallel ranks. Timed are, one after
the other:

- updates with "paused" and with "swap", with all calls between ranks;
- `nccl`: trainers bring each parameter together, rank 0 rounds it to FP8 if asked for and broadcasts it to rollout
  ranks, which load it;
- the floors: the engine's own writes of as many bytes, and copies by torch from GPU to GPU.

`checkpoint_engine` then does the same with processes of its own. Trainers bring parameters together, each keeps a share
of them in pinned memory (`register`), and parameter servers broadcast it to engines (`update`), at most three rounds.
Its parameter servers keep their process group and pinned memory from one update to the next. GPUs that train have no
engine, so a thread answers there.

Each way's weights are compared with a plain load in its first round, which is not timed. `--device cpu` tries all but
checkpoint-engine without GPUs: gloo in the place of NCCL, the provider `host` in the place of `nvlink`.

Needs `putget_transfer` and torch; for `checkpoint_engine` its package and GPUs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from weights_update import PIECE, RAW_IMM, SCALE, WAIT_S, Fused, Source, gathered, shapes, timed, values

import putget_transfer as pt
from putget_transfer import weights

COMMITS = ("paused", "swap")
BEGUN = time.monotonic()


def join(options: argparse.Namespace, number: int, folder: str) -> None:
    """Join the ranks of one run, each on its GPU."""
    gpu = options.device == "cuda"
    torch.set_num_threads(max((os.cpu_count() or 1) // options.gpus, 1))
    if gpu:
        torch.cuda.set_device(number)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    store = f"file://{folder}/store"
    distributed.init_process_group(backend, init_method=store, rank=number, world_size=options.gpus)


def device_of(options: argparse.Namespace, number: int) -> str:
    """Return a rank's device."""
    return f"cuda:{number}" if options.device == "cuda" else "cpu"


def synchronise(options: argparse.Namespace) -> None:
    """Wait for this rank's GPU."""
    if options.device == "cuda":
        torch.cuda.synchronize()


def tp_of(options: argparse.Namespace) -> int:
    """Return the rollout ranks that share a model."""
    return options.gpus // 2 if options.layout == "tp" else 1


def sharded(options: argparse.Namespace, number: int, mesh: DeviceMesh) -> Source:
    """Return the trainers' model, sharded."""
    from torch.distributed.fsdp import fully_shard

    source = Source(options, device_of(options, number))
    fully_shard(source, mesh=mesh)
    return source


def rounded(name: str, whole: torch.Tensor, *, fp8: bool) -> list[tuple[str, torch.Tensor]]:
    """Return a parameter as rollout ranks load it."""
    if not fp8:
        return [(name, whole)]
    return list(zip((name, name + SCALE), weights.quantise(whole), strict=True))


def blank(shape: tuple[int, int], device: str, *, fp8: bool) -> list[torch.Tensor]:
    """Return memory for a parameter as rollout ranks load it."""
    if not fp8:
        return [torch.empty(shape, dtype=torch.bfloat16, device=device)]
    grid = shape[0] // 128, shape[1] // 128
    return [torch.empty(shape, dtype=torch.float8_e4m3fn, device=device), torch.empty(grid, device=device)]


def check(options: argparse.Namespace, fused: Fused, device: str, *, fp8: bool) -> None:
    """Compare a rollout rank's weights with a plain load, and forget them. The first FP8 bytes are a CPU's.

    Raises:
        RuntimeError: They differ.
    """
    wanted = Fused(options, fused.rank, fused.tp, device, fp8=fp8)
    for name, shape in shapes(options).items():
        where = "cpu" if name == "layers.0.k" else device
        wanted.load(rounded(name, values(name, shape, where), fp8=fp8))
    for name, tensor in fused.tensors.items():
        if not torch.equal(tensor.view(torch.uint8), wanted.tensors[name].view(torch.uint8)):
            raise RuntimeError(f"{name} of rollout rank {fused.rank} differs")
        tensor.zero_()


class Rank:
    """A rank of putget's run: the first half trains, the second half serves."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self.number, self.options, self.version = number, options, 0
        self.trainers = options.gpus // 2
        self.trains, self.rollout_rank = number < self.trainers, number - self.trainers
        self.device = device_of(options, number)
        group = pt.DeviceGroup.nvlink(number) if options.device == "cuda" else pt.DeviceGroup.host()
        self.engine = pt.Engine.builder().group(group).build()
        mesh = DeviceMesh(options.device, list(range(self.trainers)))
        self.meeting = distributed.new_group(list(range(self.trainers)), backend="gloo")
        self.to_rollouts = distributed.new_group([0, *range(self.trainers, options.gpus)])
        self.addresses = dict(enumerate(gathered(self.engine.main_address().to_bytes())[: self.trainers]))
        self.params: list[weights.Param] = []
        if self.trains:
            self.source = sharded(options, number, mesh)
            self.params = weights.describe(self.source, rank=number)

    def begin(self, *, fp8: bool) -> None:
        """Record slots of a type, and plan."""
        self.fp8 = fp8
        described = [own for own in gathered(self.params) if own]
        self.slots: Any = None
        if not self.trains:
            tp = tp_of(self.options)
            self.fused = Fused(self.options, self.rollout_rank % tp, tp, self.device, fp8=fp8)
            names = [param.name for param in described[0]] if fp8 else []
            entries = weights.checkpoint(described[0], quantised=names)
            self.slots = weights.record(self.fused.tensors, entries, load=self.fused.load)
        lists = [own for own in gathered(self.slots) if own is not None][: tp_of(self.options)]
        task_bytes = self.options.task_mb << 20
        self.schedule = weights.plan(
            described, lists, replicas=self.trainers // tp_of(self.options), task_bytes=task_bytes
        )
        if self.trains:
            self.trainer = weights.Trainer(
                self.engine,
                self.schedule,
                self.number,
                self.source,
                self.meeting,
                watermark_bytes=self.options.watermark_mb << 20,
                device=self.device,
            )
        self._raw()

    def use(self, commit: Any) -> None:
        """Bring the next versions into force in one way."""
        if not self.trains:
            self.rollout = weights.Rollout(self.engine, self.slots, self.schedule, self.rollout_rank, commit=commit)
            self.rollout.version = self.version

    def update(self) -> None:
        """Bring a version into force."""
        self.version += 1
        offers: dict[int, bytes] = {}
        if not self.trains:
            offers = self.rollout.expect(self.version, self.addresses)
        offers_of = gathered(offers)[self.trainers :]
        if self.trains:
            own = [offer[self.number] for offer in offers_of if self.number in offer]
            self.report = json.loads(self.trainer.publish(self.version, WAIT_S, offers=own).to_json())
            return
        if not self.rollout.ready(WAIT_S):
            raise RuntimeError(f"version {self.version} is not complete")
        self.rollout.commit(self.version)
        synchronise(self.options)

    def memory(self, num_bytes: int) -> tuple[Any, Any]:
        """Return a registration of new memory on this rank's device, and its descriptor."""
        if self.options.device == "cpu":
            return self.engine.alloc_mr(num_bytes)
        self.room = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        synchronise(self.options)
        return self.engine.reg_mr(self.room)

    def _raw(self) -> None:
        """Prepare the floors: as many bytes as the schedule's."""
        own = b""
        self.share = self.schedule.received(0) // self.trainers
        self.length = min(self.share, self.options.watermark_mb << 20)
        if hasattr(self, "handle"):
            self.engine.dereg_mr(self.handle)
        if self.trains:
            self.handle, _ = self.memory(self.length)
        else:
            self.handle, desc = self.memory(self.share * self.trainers)
            own = desc.to_bytes()
        self.descs = [pt.MrDesc.from_bytes(desc) for desc in gathered(own)[self.trainers :]]

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield source offset, target offset and length of what a trainer writes to each rollout rank."""
        piece = min(PIECE, self.length)
        room = self.length // piece * piece
        for at in range(0, self.share, piece):
            yield at % room, self.number * self.share + at, min(piece, self.share - at)

    def engine_itself(self) -> None:
        """Move the same bytes by the engine's own writes."""
        if not self.trains:
            count = self.trainers * -(-self.share // min(PIECE, self.length))
            self.engine.expect_imm_count(RAW_IMM, count, take=True, deadline_s=WAIT_S).wait(WAIT_S)
            return
        under_way = [
            self.engine.submit_single_write(size, RAW_IMM, (self.handle, src), (desc, dst), deadline_s=WAIT_S)
            for src, dst, size in self.pieces()
            for desc in self.descs
        ]
        for transfer in under_way:
            transfer.wait(WAIT_S)

    def copy(self) -> None:
        """Copy as many bytes as a trainer writes, from its device to that of one rollout rank."""
        if not self.trains:
            return
        size = self.options.watermark_mb << 20
        if not hasattr(self, "there"):
            there = device_of(self.options, self.number + self.trainers)
            self.here = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self.there = torch.zeros(size, dtype=torch.uint8, device=there)
        for left in range(self.share * len(self.descs), 0, -size):
            self.there[:left].copy_(self.here[:left], non_blocking=True)
        synchronise(self.options)

    def nccl(self) -> None:
        """Bring each parameter together on the trainers, and broadcast it from rank 0."""
        for name, shape in shapes(self.options).items():
            names = [name, name + SCALE]
            if self.trains:
                whole: Any = self.source.get_parameter(name.replace(".", "_"))
                whole = whole.full_tensor().detach()
                parts = [part for _, part in rounded(name, whole, fp8=self.fp8)] if self.number == 0 else []
            else:
                parts = blank(shape, self.device, fp8=self.fp8)
            for part in parts:
                distributed.broadcast(part.view(torch.uint8), 0, self.to_rollouts)
            if not self.trains:
                self.fused.load(zip(names, parts, strict=False))
        synchronise(self.options)

    def check(self) -> None:
        """Compare a rollout rank's weights."""
        if not self.trains:
            check(self.options, self.fused, self.device, fp8=self.fp8)


def putget(number: int, options: argparse.Namespace, folder: str) -> None:
    """Be one rank beside NCCL and the floors; rank 0 writes what was found."""
    join(options, number, folder)
    rank, rows = Rank(number, options), []
    for recipe in options.recipes:
        rank.begin(fp8=recipe == "fp8")
        works: dict[str, Callable[[], None]] = dict.fromkeys(COMMITS, rank.update)
        works |= {"nccl": rank.nccl, "engine": rank.engine_itself, "copy": rank.copy}
        found: dict[str, list[float]] = {name: [] for name in works}
        reports: dict[str, list[Any]] = {name: [] for name in COMMITS}
        for name, work in works.items():
            if name in COMMITS:
                rank.use(name)
            for at in range(options.rounds + 1):
                seconds = timed(work)
                if at == 0 and name not in ("engine", "copy"):
                    rank.check()
                if at > 0:
                    found[name].append(seconds)
                if at > 0 and name in COMMITS:
                    reports[name].append(gathered(rank.report if rank.trains else None)[: rank.trainers])
        more = {"gathered_bytes": rank.schedule.gathered_bytes, "reports": reports}
        rows.append(row_of(recipe, found, rank.schedule.num_bytes) | more)
        keep(number, rows, folder)
    finish()


def row_of(recipe: str, found: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    """Return all times of a type, and their medians."""
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {"recipe": recipe, "num_bytes": num_bytes, "seconds": medians, "all_seconds": found}


def keep(number: int, rows: list[dict[str, Any]], folder: str) -> None:
    """Write what was found so far, on rank 0."""
    if number == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def finish() -> None:
    """End a process when all have measured."""
    distributed.barrier()
    os._exit(0)  # other packages leave threads behind that would keep the process


def engine_process(number: int, options: argparse.Namespace, pipe: Any) -> None:
    """Be an engine beside checkpoint-engine's parameter server, on the same GPU, as long as the server lives."""
    import zmq
    from checkpoint_engine.worker import update_weights_from_ipc

    threading.Thread(target=die_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    device, tp, context = device_of(options, number), tp_of(options), zmq.Context()
    if options.device == "cuda":
        torch.cuda.set_device(number)
    while (order := pipe.recv()) is not None:
        if order[0] == "begin":
            fp8 = order[1]
            fused = Fused(options, (number - options.gpus // 2) % tp, tp, device, fp8=fp8)
        elif order[0] == "check":
            check(options, fused, device, fp8=fp8)
        else:
            update_weights_from_ipc(context, order[1], number, run=fused.load)
        pipe.send("done")


def die_with(other: Any) -> None:
    """End this process when another one has ended: it may wait for a message for ever."""
    other.join()
    os._exit(1)


def answer(path: str) -> None:
    """Answer a parameter server in the place of an engine that loads nothing."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.REP) as pipe:
        pipe.connect(path)
        ends = 0
        while ends < 2:
            ends += pipe.recv_pyobj() is None
            pipe.send(b"")


class Server:
    """A parameter server of checkpoint-engine, in a process that trains or beside an engine."""

    def __init__(self, number: int, options: argparse.Namespace, port: int) -> None:
        import checkpoint_engine.ps
        from loguru import logger

        logger.disable("checkpoint_engine")
        checkpoint_engine.ps.get_ip = lambda: "127.0.0.1"  # it asks the network, which may not be there
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(options.gpus)}
        self.number, self.options, self.trainers = number, options, options.gpus // 2
        self.trains = number < self.trainers
        mesh = DeviceMesh(options.device, list(range(self.trainers)))
        self.server = checkpoint_engine.ps.ParameterServer(
            auto_pg=False, gpu_count=options.gpus, master_addr="127.0.0.1", master_port=port
        )
        if self.trains:
            self.source = sharded(options, number, mesh)
        else:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            context.Process(target=engine_process, args=(number, options, theirs), daemon=True).start()
            theirs.close()

    def order(self, *words: Any) -> None:
        """Have the engine do something; None: end."""
        if self.trains:
            return
        self.pipe.send(words if words[0] else None)
        if words[0]:
            self.pipe.recv()

    def register(self) -> None:
        """Bring parameters together, and keep this trainer's share in pinned memory."""
        if not self.trains:
            return
        named: dict[str, torch.Tensor] = {}
        for at, name in enumerate(shapes(self.options)):
            whole: Any = self.source.get_parameter(name.replace(".", "_"))
            whole = whole.full_tensor().detach()
            if at % self.trainers == self.number:
                named |= dict(rounded(name, whole, fp8=self.fp8))
        synchronise(self.options)
        self.server.register_checkpoint("weights", named_tensors=named, use_shared_memory_pool=True)

    def request(self, paths: list[tuple[str, str]]) -> None:
        """Tell the engine of this GPU where weights come from."""
        path = paths[self.number][1]
        if self.trains:
            answer(path)
        else:
            self.order("update", path)

    def run(self, *, fp8: bool) -> dict[str, list[float]]:
        """Update and measure with a type."""
        self.fp8 = fp8
        self.order("begin", fp8)
        names = [
            f"{stage}, buckets of {size} GB" for size in self.options.bucket_gb for stage in ("register", "update")
        ]
        found: dict[str, list[float]] = {name: [] for name in names}
        for at in range(min(self.options.rounds, 3) + 1):
            for size in self.options.bucket_gb:
                os.environ["PS_MAX_BUCKET_SIZE_GB"] = size
                registered = timed(self.register)
                if at == 0:
                    self.server.gather_metas("weights")
                updated = timed(lambda: self.server.update("weights", self.request))
                if at == 0:
                    self.order("check")
                else:
                    found[f"register, buckets of {size} GB"].append(registered)
                    found[f"update, buckets of {size} GB"].append(updated)
                if self.trains:
                    self.server.unregister_checkpoint("weights")
        if self.trains:  # pinned memory has the size of the first checkpoint
            self.server._current_shared_memory_pool_user = "weights"
            self.server.unregister_checkpoint("weights", force=True)
        return found


def checkpoint_engine(number: int, options: argparse.Namespace, folder: str) -> None:
    """Be one parameter server; rank 0 writes what was found."""
    join(options, number, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = gathered(free.getsockname()[1])[0]
    server, rows = Server(number, options, port), []
    for recipe in options.recipes:
        fp8 = recipe == "fp8"
        parts = [part for shape in shapes(options).values() for part in blank(shape, "meta", fp8=fp8)]
        num_bytes = sum(part.nbytes for part in parts) * server.trainers // tp_of(options)
        rows.append(row_of(recipe, server.run(fp8=fp8), num_bytes))
        rows[-1]["version"] = importlib.metadata.version("checkpoint-engine")
        keep(number, rows, folder)
    server.order(None)
    finish()


PEERS: dict[str, Callable[..., None]] = {"checkpoint_engine": checkpoint_engine}


def measured(options: argparse.Namespace, target: Callable[..., None], limit_s: float) -> dict[str, Any]:
    """Run one set of processes, and return what they found."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        started = [context.Process(target=target, args=(at, options, folder)) for at in range(options.gpus)]
        for process in started:
            process.start()
        end = time.monotonic() + limit_s
        while time.monotonic() < end and all(process.exitcode in (None, 0) for process in started):
            if all(process.exitcode == 0 for process in started):
                break
            time.sleep(0.1)
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
            process.join()
        file = Path(folder) / "rows.json"
        rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        error = None if codes == [0] * options.gpus else f"exit codes {codes} by the end, or after {limit_s:.0f} s"
        return {"rows": rows, "error": error}


def show(found: dict[str, Any]) -> None:
    """Show medians."""
    for way, result in found["ways"].items():
        for row in result["rows"]:
            for name, seconds in row["seconds"].items():
                rate = row["num_bytes"] / seconds / 1e9
                print(f"{row['recipe']:5} {way}, {name}: {seconds * 1e3:.2f} ms, {rate:.1f} GB/s")
        if result["error"]:
            print(f"{way}: {result['error']}")


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words = lambda text: [word for word in text.split(",") if word]  # noqa: E731
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layout", choices=("replicas", "tp"), default="replicas")
    parser.add_argument("--recipes", type=words, default=["bf16", "fp8"])
    parser.add_argument("--peers", type=words, default=[])
    numbers = {"hidden": 8192, "layers": 2, "small": 0, "rounds": 5, "task_mb": 32, "watermark_mb": 256}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bucket_gb", type=words, default=["8", "0.5"], help="buckets of checkpoint-engine")
    parser.add_argument("--limit_s", type=float, default=110.0, help="seconds for all of it")
    parser.add_argument("--output_file", type=Path)
    options = parser.parse_args()
    for kind, came, known in (("recipes", options.recipes, ["bf16", "fp8"]), ("peers", options.peers, list(PEERS))):
        if unknown := sorted(set(came) - set(known)):
            parser.error(f"--{kind}: {', '.join(unknown)} came; allowed are {', '.join(known)}")
    found: dict[str, Any] = {"schema": "putget.weights_gpus/1", "ways": {}}
    found["machine"] = {"processors": os.cpu_count(), "system": platform.platform(), "torch": torch.__version__}
    if options.device == "cuda":
        found["machine"]["gpu"] = torch.cuda.get_device_name()
    found["options"] = {name: value for name, value in vars(options).items() if name != "output_file"}
    ways = {"putget": putget} | {peer: PEERS[peer] for peer in options.peers}
    for at, (way, target) in enumerate(ways.items()):
        left_s = options.limit_s - (time.monotonic() - BEGUN)
        found["ways"][way] = measured(options, target, left_s / (len(ways) - at))
        print(f"{time.monotonic() - BEGUN:.0f} s: {way} has ended", flush=True)
        if options.output_file:
            options.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found)
    raise SystemExit(any(result["error"] for result in found["ways"].values()))


if __name__ == "__main__":
    main()
