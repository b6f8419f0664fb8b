"""Measures weight updates from FSDP2 trainers into tensor-parallel rollout ranks on CPUs, beside other ways.

    python benchmarks/weights_update.py --peers nixl_tcp,nixl_shm,mooncake_tcp --output_file update.json

4 trainer processes shard a BF16 model over their ranks; 2 replicas of 2 rollout processes have it fused and sliced. By
turns in each round: an update; the engine's own writes of the same bytes, task by task; gloo, where trainers bring each
parameter together and rank 0 broadcasts it to rollout ranks that load it. NIXL and Mooncake then move the same bytes as
long pieces of memory, without slicing. The weights are compared with a plain load before anything is timed.

Needs `putget_transfer` and torch; for peers their packages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import DeviceMesh

import putget_transfer as pt
from putget_transfer import weights

sys.path.insert(0, str(Path(__file__).parent.parent / "transfer" / "bench"))
import peers

TRAINERS, TP, REPLICAS = 4, 2, 2
RANKS = TRAINERS + TP * REPLICAS
WAIT_S = 120.0
RAW_IMM = 9
PIECE = 16 << 20
WATERMARK = 256 << 20
SCALE = "_scale_inv"
SMALL = (128, 128)
"""The shape of a small parameter: 32 KiB of BF16."""


def shapes(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Return the checkpoint's names and shapes."""
    hidden, inter = options.hidden, 3 * options.hidden
    kinds = {"q": (hidden, hidden), "k": (hidden // 4, hidden), "v": (hidden // 4, hidden), "o": (hidden, hidden)}
    kinds |= {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    kinds |= {f"small{at}": SMALL for at in range(options.small)}
    return {f"layers.{layer}.{kind}": shape for layer in range(options.layers) for kind, shape in kinds.items()}


class Source(torch.nn.Module):
    """The trainers' model."""

    def __init__(self, options: argparse.Namespace, device: str = "cpu") -> None:
        super().__init__()
        for name, shape in shapes(options).items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(values(name, shape, device)))


def values(name: str, shape: tuple[int, int], device: str = "cpu") -> torch.Tensor:
    """Return a parameter: the same on all ranks, and another one for each name."""
    made = torch.Generator().manual_seed(sum(map(ord, name)))
    length = shape[0] * shape[1]
    few = torch.randn(min(length, 1_000_003), generator=made).bfloat16().to(device)
    return few.repeat(-(-length // few.numel()))[:length].view(shape)


class Fused:
    """A rollout rank's model: QKV and gate-up fused, sliced over `tp` ranks; BF16, or FP8 with scales of blocks."""

    def __init__(
        self, options: argparse.Namespace, rank: int, tp: int = TP, device: str = "cpu", *, fp8: bool = False
    ) -> None:
        self.rank, self.tp, self.tensors = rank, tp, dict[str, torch.Tensor]()

        def make(name: str, high: int, wide: int) -> None:
            dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
            self.tensors[name] = torch.zeros(high, wide, dtype=dtype, device=device)
            if fp8:
                self.tensors[name + SCALE] = torch.zeros(high // 128, wide // 128, device=device)

        known = shapes(options)
        for layer in range(options.layers):
            rows = lambda kind, at=f"layers.{layer}.": known[at + kind][0]  # noqa: E731
            hidden, inter = options.hidden, rows("gate")
            make(f"{layer}.qkv", (rows("q") + 2 * rows("k")) // tp, hidden)
            make(f"{layer}.gate_up", 2 * inter // tp, hidden)
            make(f"{layer}.o", hidden, hidden // tp)
            make(f"{layer}.down", hidden, inter // tp)
            for at in range(rank * options.small // tp, (rank + 1) * options.small // tp):
                make(f"{layer}.small{at}", *SMALL)

    def load(self, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint."""
        for name, tensor in checkpoint:
            suffix = SCALE if name.endswith(SCALE) else ""
            _, layer, kind = name.removesuffix(suffix).replace("_", ".").split(".")
            if kind.startswith("small"):  # each rank has its own ones whole, as experts
                if (own := self.tensors.get(f"{layer}.{kind}{suffix}")) is not None:
                    own.copy_(tensor)
                continue
            size = tensor.shape[0] // self.tp
            if kind in ("o", "down"):
                size = tensor.shape[1] // self.tp
                self.tensors[f"{layer}.{kind}{suffix}"].copy_(tensor.narrow(1, self.rank * size, size))
                continue
            fused = self.tensors[f"{layer}.{'gate_up' if kind in ('gate', 'up') else 'qkv'}{suffix}"]
            key = fused.shape[0] // 6 if kind in "qkv" else 0
            first = {"q": 0, "k": 4 * key, "v": 5 * key, "gate": 0, "up": size}[kind]
            fused.narrow(0, first, size).copy_(tensor.narrow(0, self.rank * size, size))


def gathered(value: Any) -> list[Any]:
    """Return each rank's value."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have done their work."""
    distributed.barrier()
    begun = time.monotonic()
    work()
    own = time.monotonic()
    ends = gathered((begun, own))
    return float(max(end for _, end in ends) - min(begin for begin, _ in ends))


class Rank:
    """A process of this benchmark: ranks below `TRAINERS` train, the others serve."""

    def __init__(self, rank: int, options: argparse.Namespace, network: str) -> None:
        self.number, self.options, self.version = rank, options, 0
        self.trains, self.rollout_rank = rank < TRAINERS, rank - TRAINERS
        group = pt.DeviceGroup.host() if network == "host" else pt.DeviceGroup.tcp(["127.0.0.1"])
        self.engine = pt.Engine.builder().group(group).build()
        mesh = DeviceMesh("cpu", list(range(TRAINERS)))
        self.to_rollouts = distributed.new_group([0, *range(TRAINERS, RANKS)])
        params: list[weights.Param] = []
        if self.trains:
            from torch.distributed.fsdp import fully_shard

            self.source = Source(options)
            fully_shard(self.source, mesh=mesh)
            params = weights.describe(self.source, rank=rank)
            self.group = mesh.get_group()
        described = [own for own in gathered(params) if own]
        slots: Any = None
        if not self.trains:
            self.fused = Fused(options, self.rollout_rank % TP)
            slots = weights.record(self.fused.tensors, weights.checkpoint(described[0]), load=self.fused.load)
        lists = [own for own in gathered(slots) if own is not None][:TP]
        self.schedule = weights.plan(described, lists, replicas=REPLICAS, task_bytes=options.task_kb << 10)
        if self.trains:
            self.trainer = weights.Trainer(self.engine, self.schedule, rank, self.source, self.group)
        else:
            self.rollout = weights.Rollout(self.engine, slots, self.schedule, self.rollout_rank, commit=options.commit)
        self.addresses = dict(enumerate(gathered(self.trainer.address() if self.trains else b"")[:TRAINERS]))
        self.report: Any = None
        self._raw()

    def update(self) -> None:
        """Bring a version into force."""
        self.version += 1
        offers: dict[int, bytes] = {}
        if not self.trains:
            offers = self.rollout.expect(self.version, self.addresses)
        offers_of = gathered(offers)[TRAINERS:]
        if self.trains:
            self.report = self.trainer.publish(
                self.version, WAIT_S, offers=[offer[self.number] for offer in offers_of if self.number in offer]
            )
        else:
            if not self.rollout.ready(WAIT_S):
                raise RuntimeError(f"version {self.version} is not complete")
            self.rollout.commit(self.version)

    def _raw(self) -> None:
        """Prepare the engine's own writes: as many bytes as the schedule's, in pieces as long as a task's writes."""
        own = b""
        self.share = self.schedule.received(0) // TRAINERS
        if self.trains:
            self.memory, _ = self.engine.alloc_mr(min(self.share, WATERMARK))
        else:
            self.memory, desc = self.engine.alloc_mr(self.share * TRAINERS)
            own = desc.to_bytes()
        self.descs = [pt.MrDesc.from_bytes(desc) for desc in gathered(own)[TRAINERS:]]

    def pieces(self) -> list[tuple[int, int, int]]:
        """Return source offset, target offset and length of what a trainer rank writes to each rollout rank."""
        piece = min(PIECE, len(self.memory))
        room = len(self.memory) // piece * piece
        found = range(0, self.share, piece)
        return [(at % room, self.number * self.share + at, min(piece, self.share - at)) for at in found]

    def raw(self) -> None:
        """Move the same bytes by the engine's own writes."""
        if self.trains:
            under_way = [
                self.engine.submit_single_write(size, RAW_IMM, (self.memory, src), (desc, dst), deadline_s=WAIT_S)
                for src, dst, size in self.pieces()
                for desc in self.descs
            ]
            for transfer in under_way:
                transfer.wait(WAIT_S)
        else:
            count = TRAINERS * -(-self.share // min(PIECE, self.share))
            self.engine.expect_imm_count(RAW_IMM, count, take=True, deadline_s=WAIT_S).wait(WAIT_S)

    def gloo(self) -> None:
        """Bring each parameter together on the trainers, and broadcast it from rank 0."""
        for name, shape in shapes(self.options).items():
            if self.trains:
                whole: Any = self.source.get_parameter(name.replace(".", "_"))
                whole = whole.full_tensor().detach()
            else:
                whole = torch.empty(shape, dtype=torch.bfloat16)
            if self.number == 0 or not self.trains:
                distributed.broadcast(whole, 0, self.to_rollouts)
            if not self.trains:
                self.fused.load([(name, whole)])

    def check(self) -> None:
        """Compare a rollout rank's weights with a plain load, and forget them.

        Raises:
            RuntimeError: They differ.
        """
        if self.trains:
            return
        wanted = Fused(self.options, self.rollout_rank % TP)
        wanted.load((name, values(name, shape)) for name, shape in shapes(self.options).items())
        for name, tensor in self.fused.tensors.items():
            if not torch.equal(tensor, wanted.tensors[name]):
                raise RuntimeError(f"{name} of rollout rank {self.rollout_rank} differs")
            tensor.zero_()


class Peer:
    """The same bytes by NIXL or Mooncake: trainers write to all rollout ranks."""

    def __init__(self, kind: str, rank: Rank) -> None:
        self.kind, self.rank, length = kind, rank, len(rank.memory)
        self.memory = peers.Memory(length)
        where: Any = None
        if rank.trains:
            self.memory.array[:] = bytes([rank.number + 1]) * length
        elif kind.startswith("nixl"):
            self.agent = peers.nixl_agent(f"target{rank.number}", kind)
            self.agent.register_memory([(self.memory.address, length, 0, "target")], "DRAM")
            where = self.agent.get_agent_metadata(), self.memory.address
        else:
            self.agent = peers.mooncake_engine()
            self.agent.register_memory(self.memory.address, length)
            where = f"127.0.0.1:{self.agent.get_rpc_port()}", self.memory.address
        places = gathered(where)[TRAINERS:]
        self.starts: list[peers.Start] = []
        if rank.trains and kind.startswith("nixl"):
            names = [f"initiator{rank.number}.{at}" for at in range(len(places))]
            self.starts = [
                peers.nixl_start(kind, self.memory, place, name) for place, name in zip(places, names, strict=True)
            ]
        elif rank.trains:
            self.starts = [peers.mooncake_start(self.memory, place) for place in places]

    def move(self) -> None:
        """Move all of it, each piece to each rollout rank."""
        under_way = [start([piece]) for piece in (self.rank.pieces() if self.starts else ()) for start in self.starts]
        end = time.monotonic() + WAIT_S
        while under_way:
            under_way = [is_over for is_over in under_way if not is_over()]
            if time.monotonic() > end:
                raise TimeoutError("a transfer did not end")
            time.sleep(0.0001)

    def check(self) -> None:
        """Compare all bytes.

        Raises:
            RuntimeError: They differ.
        """
        share = self.rank.share
        for sender in range(0 if self.rank.trains else TRAINERS):
            part = memoryview(self.memory.array).cast("B")[sender * share : (sender + 1) * share]
            if bytes(part) != bytes([sender + 1]) * share:
                raise RuntimeError(f"{self.kind}: bytes from rank {sender} differ")


def worker(number: int, options: argparse.Namespace, network: str, kind: str | None, folder: str) -> None:
    """Be one process; rank 0 writes what was found."""
    if kind in peers.TRANSPORTS:
        os.environ["UCX_TLS"] = peers.TRANSPORTS[kind]
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    torch.set_num_threads(max((os.cpu_count() or 1) // RANKS, 1))
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS)
    rank = Rank(number, options, network)
    schedule = rank.schedule
    row: dict[str, Any] = {"num_bytes": schedule.num_bytes, "gathered_bytes": schedule.gathered_bytes}
    row |= {"num_params": len(schedule.params), "num_tasks": len(schedule.tasks(0))}
    if kind is None:
        works: dict[str, Callable[[], None]] = {"update": rank.update, "engine": rank.raw}
        if network == "tcp":
            works["gloo"] = rank.gloo
    else:
        peer = Peer(kind, rank)
        works = {kind: peer.move}
    found: dict[str, list[float]] = {name: [] for name in works}
    reports: list[list[Any]] = []
    for at in range(options.rounds + 1):
        for name, work in works.items():
            if name == "gloo" and at > 2:
                continue  # it takes seconds
            found[name].append(timed(work))
            if at == 0 and name in ("update", "gloo"):
                rank.check()
            if at == 0 and kind is not None:
                peer.check()
        if kind is None:
            reports.append(gathered(json.loads(rank.report.to_json()) if rank.report else None)[:TRAINERS])
    row["all_seconds"] = {name: times[1:] for name, times in found.items()}
    row["seconds"] = {name: statistics.median(times[1:]) for name, times in found.items()}
    row["reports"] = reports[1:]
    if number == 0:
        (Path(folder) / "row.json").write_text(json.dumps(row), encoding="utf-8")
    distributed.barrier()
    os._exit(0)  # peers leave threads behind that would keep the process


def measured(options: argparse.Namespace, network: str, kind: str | None) -> dict[str, Any]:
    """Run one set of processes."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        started = [
            context.Process(target=worker, args=(number, options, network, kind, folder)) for number in range(RANKS)
        ]
        for process in started:
            process.start()
        file, end = Path(folder) / "row.json", time.monotonic() + options.limit_s
        while time.monotonic() < end and all(process.exitcode in (None, 0) for process in started):
            if all(process.exitcode == 0 for process in started):
                break
            time.sleep(0.1)
        for process in started:
            process.kill()
            process.join()
        if not file.exists():
            return {"network": network, "error": f"{kind or 'update'} did not end"}
        return {"network": network, **json.loads(file.read_text(encoding="utf-8"))}


def main() -> None:
    """Measure all of it, and show a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--networks", type=lambda text: text.split(","), default=["host", "tcp"])
    parser.add_argument("--peers", type=lambda text: [kind for kind in text.split(",") if kind], default=[])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--small", type=int, default=0, help="parameters of 32 KiB in each layer")
    parser.add_argument("--task_kb", type=int, default=32 << 10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", choices=("swap", "paused"), default="paused")
    parser.add_argument("--limit_s", type=float, default=120.0)
    parser.add_argument("--output_file", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"schema": "putget.weights_update/1", "rows": []}
    found["machine"] = {"processors": os.cpu_count(), "load": os.getloadavg()[0], "system": platform.platform()}
    named = ("hidden", "layers", "small", "task_kb", "commit")
    found["options"] = {name: getattr(options, name) for name in named}
    runs: list[tuple[str, str | None]] = [(network, None) for network in options.networks]
    runs += [("host" if kind == "nixl_shm" else "tcp", kind) for kind in options.peers]
    for network, kind in runs:
        row = measured(options, network, kind)
        found["rows"].append(row)
        for name, seconds in row.get("seconds", {}).items():
            rate = row["num_bytes"] / seconds / 1e9
            print(f"{network:5} {name:13} {seconds * 1e3:9.1f} ms {rate:7.2f} GB/s", flush=True)
        if "error" in row:
            print(network, row["error"], flush=True)
        if options.output_file:
            options.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
