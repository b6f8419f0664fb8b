"""Measures the nvlink provider on 2 or more GPUs, one process each, beside the copy engine itself in the same run.

    python nvlink.py --gpus 2 --output_file nvlink.json

Needs torch, nvcc and the package putget_transfer. Every size is compared byte by byte before it is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import putget_transfer as pt

PATIENCE_S = 60.0
MEMORY = 1 << 30
REPEATS = 5
MIB = 1 << 20
# Bytes of one transfer: a single write, or pages of so many bytes each.
SINGLES = [64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 32 * MIB]
PAGES = [1 << 10, 4 << 10, 16 << 10, 64 << 10]
PAGES_A_WRITE = 1024


def kernels(folder: Path) -> ctypes.CDLL:
    """Build and load the kernels beside this file."""
    library = folder / "kernels.so"
    source = Path(__file__).with_name("kernels.cu")
    nvcc = "/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else "nvcc"
    subprocess.run([nvcc, "-shared", "-Xcompiler", "-fPIC", "-arch=native", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def engine(gpu: int, busy_poll: bool = True) -> pt.Engine:
    """Build the engine of one GPU."""
    return pt.Engine.builder().group(pt.DeviceGroup.nvlink(gpu)).busy_poll(busy_poll).build()


class Peer:
    """Another process with a GPU, which does what it is told."""

    def __init__(self, gpu: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(gpu, theirs, folder), daemon=True)
        self.process.start()
        address, desc, word = self.receive()
        self.address = pt.NetAddr.from_bytes(address)
        self.desc = pt.MrDesc.from_bytes(desc)
        self.word = pt.MrDesc.from_bytes(word)

    def receive(self) -> Any:
        """Take an answer."""
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError("the other process does not answer")
        return self.pipe.recv()

    def ask(self, *question: Any) -> Any:
        """Ask and take the answer."""
        self.pipe.send(question)
        return self.receive()


def serve(gpu: int, pipe: Connection, folder: str) -> None:
    """Be the target on one GPU until told to end."""
    torch.cuda.set_device(gpu)
    memory = torch.zeros(MEMORY, dtype=torch.uint8, device=f"cuda:{gpu}")
    library = ctypes.CDLL(str(Path(folder) / "kernels.so"))
    own = engine(gpu)
    _handle, desc = own.reg_mr(memory)
    words, word_desc = own.alloc_mr(4096)
    pipe.send((own.main_address().to_bytes(), desc.to_bytes(), word_desc.to_bytes()))
    back: pt.MrDesc | None = None
    while True:
        question = pipe.recv()
        match question:
            case ("end",):
                own.close()
                return
            case ("bytes", start, length):
                pipe.send(memory[start : start + length].cpu().numpy().tobytes())
            case ("zero",):
                memory.zero_()
                torch.cuda.synchronize()
                pipe.send(None)
            case ("back", peer):
                back = pt.MrDesc.from_bytes(peer)
                pipe.send(None)
            case ("polled", imm, count):
                pipe.send("ready")
                seen = []
                for number in range(1, count + 1):
                    end = time.perf_counter() + PATIENCE_S
                    while own.imm_count(imm) < number and time.perf_counter() < end:
                        pass
                    seen.append(time.perf_counter_ns())
                    assert back is not None
                    own.submit_barrier(None, imm, [back])
                pipe.send(seen)
            case ("callback", imm, count):
                seen = []

                def arrived(
                    _error: Exception | None,
                    seen: list[int] = seen,
                    imm: int = imm,
                    count: int = count,
                    back: pt.MrDesc | None = back,
                ) -> None:
                    seen.append(time.perf_counter_ns())
                    if len(seen) < count:
                        own.expect_imm_count(imm, len(seen) + 1, deadline_s=PATIENCE_S, done=arrived)
                    assert back is not None
                    own.submit_barrier(None, imm, [back])

                own.expect_imm_count(imm, 1, deadline_s=PATIENCE_S, done=arrived)
                pipe.send("ready")
                end = time.perf_counter() + PATIENCE_S
                while len(seen) < count and time.perf_counter() < end:
                    time.sleep(0.001)
                pipe.send(seen)
            case ("mirror", imm, count):
                # A kernel sees the counter's mirror and stores to a word that this process polls.
                own.mirror_imm(imm, words, 0)
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                seen = []
                answer = ctypes.c_uint64.from_address(words.address + 512)
                for number in range(1, count + 1):
                    code = library.answer(
                        ctypes.c_void_p(words.address),
                        ctypes.c_uint64(number),
                        ctypes.c_void_p(words.address + 512),
                        ctypes.c_uint64(5_000_000_000),
                        ctypes.c_void_p(stream.cuda_stream),
                    )
                    assert code == 0, code
                    time.sleep(0.0005)
                    pipe.send("ready")
                    end = time.perf_counter() + PATIENCE_S
                    while answer.value < number and time.perf_counter() < end:
                        pass
                    seen.append(time.perf_counter_ns())
                    assert answer.value == number, "the kernel did not see the counter"
                    assert back is not None
                    own.submit_barrier(None, imm, [back])
                pipe.send(seen)


def timed(submit: Callable[[], pt.Transfer], writes: int, window: int) -> float:
    """Seconds for so many writes with a window of them under way."""
    under_way: deque[pt.Transfer] = deque()
    begin = time.perf_counter()
    for _ in range(writes):
        if len(under_way) == window:
            under_way.popleft().wait(PATIENCE_S)
        under_way.append(submit())
    while under_way:
        under_way.popleft().wait(PATIENCE_S)
    return time.perf_counter() - begin


def percentiles(samples_ns: list[int]) -> dict[str, float]:
    """Median and 99th percentile in microseconds, without the first tenth."""
    kept = sorted(samples_ns[len(samples_ns) // 10 :])
    return {"p50_us": kept[len(kept) // 2] / 1e3, "p99_us": kept[int(len(kept) * 0.99)] / 1e3}


class Bench:
    """The writing process, on GPU 0."""

    def __init__(self, gpus: int, folder: Path) -> None:
        self.library = kernels(folder)
        self.peers = [Peer(gpu, str(folder)) for gpu in range(1, gpus)]
        torch.cuda.set_device(0)
        generator = torch.Generator(device="cuda:0").manual_seed(7)
        self.memory = torch.randint(0, 256, (MEMORY,), dtype=torch.uint8, device="cuda:0", generator=generator)
        torch.cuda.synchronize()
        self.engine = engine(0)
        self.source, self.desc = self.engine.reg_mr(self.memory)
        # Memory for measuring the ceiling: memory of this process on the other GPUs.
        self.local = [torch.empty(MEMORY // 2, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(1, gpus)]
        self.rows: list[dict[str, Any]] = []

    def note(self, **row: Any) -> None:
        """Keep a row and show it."""
        self.rows.append(row)
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            ),
            flush=True,
        )

    def ceiling(self, length: int, total: int, peers: int = 1) -> float:
        """GB/s of cudaMemcpyPeerAsync with copies of this length, to so many peers at a time."""
        targets = (ctypes.c_void_p * peers)(*[memory.data_ptr() for memory in self.local[:peers]])
        gpus = (ctypes.c_int * peers)(*range(1, peers + 1))
        count, rates = max(1, total // length), []
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            code = self.library.copy_peer(
                targets,
                gpus,
                peers,
                ctypes.c_void_p(self.memory.data_ptr()),
                0,
                ctypes.c_size_t(length),
                ctypes.c_size_t(MEMORY // 2),
                count,
            )
            rates.append(peers * count * length / (time.perf_counter() - begin) / 1e9)
            if code != 0:
                raise RuntimeError(f"cudaMemcpyPeerAsync: {code}")
        return statistics.median(rates)

    def single(self, length: int, peer: int, imm: int) -> Callable[[], pt.Transfer]:
        """Writes of one length, each to the next place."""
        place = [0]

        def submit() -> pt.Transfer:
            at = place[0] * length % (MEMORY // 2)
            place[0] += 1
            return self.engine.submit_single_write(length, imm, (self.source, at), (self.peers[peer].desc, at))

        return submit

    def paged(self, length: int, count: int, peer: int, imm: int) -> tuple[Callable[[], pt.Transfer], list[int]]:
        """Writes of pages that lie apart in the source and in another order in the target."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(length)).tolist()
        source = pt.Pages([2 * page for page in range(count)], length)
        target = pt.Pages(order, length)
        desc = self.peers[peer].desc
        return lambda: self.engine.submit_paged_writes(length, imm, (self.source, source), (desc, target)), order

    def check(self, length: int, count: int, imm: int) -> None:
        """Compare what one transfer leaves in the target."""
        self.peers[0].ask("zero")
        if count == 1:
            self.single(length, 0, imm)().wait(PATIENCE_S)
            right = self.memory[:length]
        else:
            submit, order = self.paged(length, count, 0, imm)
            submit().wait(PATIENCE_S)
            right = torch.empty(length * count, dtype=torch.uint8, device="cuda:0")
            right.view(count, length)[torch.tensor(order, device="cuda:0")] = self.memory[: 2 * length * count].view(
                count, 2, length
            )[:, 0]
        if self.peers[0].ask("bytes", 0, length * count) != right.cpu().numpy().tobytes():
            raise AssertionError(f"wrong bytes after a transfer of {count} x {length} bytes")

    def rates(self) -> None:
        """Rates to one peer, each beside the copy engine in the same minute."""
        best = max(self.ceiling(256 * MIB, 8 << 30) for _ in range(2))
        self.note(kind="ceiling", bytes=256 * MIB, gb_per_s=best)
        for length, count in [(length, 1) for length in SINGLES] + [(length, PAGES_A_WRITE) for length in PAGES]:
            self.check(length, count, 1)
            submit = self.single(length, 0, 1) if count == 1 else self.paged(length, count, 0, 1)[0]
            writes = max(64, min(4000, (8 << 30) // (length * count)))
            window = 64 if length * count < 4 * MIB else 16
            timed(submit, writes // 8, window)
            ours, same = [], []
            for _ in range(REPEATS):
                ours.append(writes * length * count / timed(submit, writes, window) / 1e9)
                # The same bytes, in copies as long as ours.
                same.append(self.ceiling(length, min(4 << 30, max(length * 2048, 1 << 28))) if count == 1 else best)
            rate, peer = statistics.median(ours), statistics.median(same)
            row: dict[str, Any] = {
                "kind": "single" if count == 1 else "paged",
                "bytes": length,
                "pages": count,
                "gb_per_s": rate,
            }
            if count == 1:
                row |= {"copy_engine_same_size": peer, "of_same_size": rate / peer}
            self.note(**row, of_ceiling=rate / best)

    def fan_out(self) -> None:
        """Rates to all peers at a time."""
        peers = len(self.peers)
        best = self.ceiling(256 * MIB, 4 << 30, peers)
        submits = [self.single(16 * MIB, peer, 2) for peer in range(peers)]
        turn = [0]

        def submit() -> pt.Transfer:
            turn[0] += 1
            return submits[turn[0] % peers]()

        timed(submit, 64, 8 * peers)
        rate = statistics.median(512 * 16 * MIB / timed(submit, 512, 8 * peers) / 1e9 for _ in range(REPEATS))
        self.note(kind="fan-out", bytes=16 * MIB, peers=peers, gb_per_s=rate, ceiling=best, of_ceiling=rate / best)

    def round_trips(self, how: str, imm: int, length: int, count: int = 2000) -> None:
        """One-way times from submission to the other process's notice, by clocks that both share."""
        peer = self.peers[0]
        peer.pipe.send((how, imm, count))
        if how != "mirror":
            assert peer.receive() == "ready"
        sent = []
        for number in range(1, count + 1):
            if how == "mirror":
                assert peer.receive() == "ready"
            sent.append(time.perf_counter_ns())
            self.engine.submit_single_write(length, imm, (self.source, 0), (peer.desc, 0))
            end = time.perf_counter() + PATIENCE_S
            while self.engine.imm_count(imm) < number:
                assert time.perf_counter() < end, f"{how}: no answer"
        seen = peer.receive()
        self.note(
            kind="latency", how=how, bytes=length, **percentiles([b - a for a, b in zip(sent, seen, strict=True)])
        )

    def watcher(self, count: int = 2000) -> None:
        """From a graph's replay to the watcher's callback, and to a host thread that polls the same word."""
        seen = threading.Event()
        at = [0]

        def changed(_old: int, _new: int) -> None:
            at[0] = time.perf_counter_ns()
            seen.set()

        watcher = self.engine.alloc_uvm_watcher(changed)
        word = ctypes.c_uint64.from_address(watcher.address)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, stream=stream):
            assert self.library.bump(ctypes.c_void_p(watcher.address), ctypes.c_void_p(stream.cuda_stream)) == 0
        for how in ("watcher", "polled word"):
            times = []
            for _ in range(count):
                torch.cuda.synchronize()
                seen.clear()
                before = word.value
                begin = time.perf_counter_ns()
                graph.replay()
                if how == "watcher":
                    # Waiting lets go of Python's lock, which the callback needs.
                    assert seen.wait(PATIENCE_S), "the watcher saw nothing"
                    times.append(at[0] - begin)
                else:
                    end = time.perf_counter() + PATIENCE_S
                    while word.value == before:
                        assert time.perf_counter() < end, "the word did not change"
                    times.append(time.perf_counter_ns() - begin)
                    assert seen.wait(PATIENCE_S), "the watcher saw nothing"
            self.note(kind="latency", how=f"graph replay to {how}", bytes=8, **percentiles(times))


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--only", choices=["fan_out"])
    options = parser.parse_args()
    if torch.cuda.device_count() < options.gpus:
        raise SystemExit(f"--gpus: {options.gpus} came; this machine has {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.gpus, Path(folder))
        if options.only is None:
            bench.rates()
            for peer in bench.peers:
                peer.ask("back", bench.desc.to_bytes())
            bench.round_trips("polled", 11, 8)
            bench.round_trips("polled", 12, 64 << 10)
            bench.round_trips("callback", 13, 8)
            bench.round_trips("mirror", 14, 8, 500)
            bench.watcher()
        if options.gpus > 2 or options.only == "fan_out":
            bench.fan_out()
        for peer in bench.peers:
            peer.pipe.send(("end",))
        bench.engine.close()
    if options.output_file:
        about = {"schema": 1, "gpu": torch.cuda.get_device_name(0), "gpus": options.gpus, "rows": bench.rows}
        options.output_file.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
