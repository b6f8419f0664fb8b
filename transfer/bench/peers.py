"""Measures NIXL (UCX) and Mooncake with the sizes of `putget-transfer bench`, between two processes of one machine.

    python peers.py nixl_tcp --seconds 0.3 --output_file nixl_tcp.json

Each needs its own package: `nixl`, or `mooncake-transfer-engine-non-cuda` where there is no CUDA. Bytes are compared
before anything is timed. A NIXL transfer carries a notification, as ours carries an immediate; Mooncake has none.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PAGES = 256
PATIENCE_S = 60.0
MIN_MEMORY = 32 << 20
# Transports that UCX may use for each of NIXL's rows.
TRANSPORTS = {"nixl_tcp": "tcp", "nixl_shm": "posix,sysv,cma,self"}
if Path("/dev/nvidia0").exists():
    # NIXL refuses to start beside a GPU without it.
    TRANSPORTS = {kind: transports + ",cuda_copy" for kind, transports in TRANSPORTS.items()}

# Starts a transfer of (source offset, target offset, length) pieces; the result says whether it is over.
Start = Callable[[list[tuple[int, int, int]]], Callable[[], bool]]


class Memory:
    """Bytes at an address that does not move."""

    def __init__(self, length: int) -> None:
        self.array = (ctypes.c_char * length)()
        self.address = ctypes.addressof(self.array)

    def digest(self, length: int) -> str:
        """Hash the first bytes."""
        return hashlib.blake2b(memoryview(self.array)[:length], digest_size=16).hexdigest()


def nixl_agent(name: str, kind: str) -> Any:
    """Make an agent of NIXL with its UCX backend."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    # UCX's shared memory cannot notice that a peer has failed, and is not used where that is asked for.
    agent.create_backend("UCX", {"ucx_error_handling_mode": "none" if kind == "nixl_shm" else "peer"})
    return agent


def mooncake_engine() -> Any:
    """Make an engine of Mooncake over TCP."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("Mooncake did not start")
    return engine


def target(kind: str, length: int, pipe: Connection) -> None:
    """Be written to: say where the memory is, then answer for its bytes until told to end."""
    memory = Memory(length)
    agent: Any = None
    if kind.startswith("nixl"):
        agent = nixl_agent("target", kind)
        registered = agent.register_memory([(memory.address, length, 0, "target")], "DRAM")
        pipe.send((agent.get_agent_metadata(), memory.address))
    else:
        engine = mooncake_engine()
        if engine.register_memory(memory.address, length) != 0:
            raise RuntimeError("Mooncake did not register the memory")
        pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", memory.address))
    while True:
        # NIXL keeps notifications until somebody takes them.
        if agent is not None:
            agent.get_new_notifs()
        if not pipe.poll(0.0005):
            continue
        question = pipe.recv()
        if question is None:
            break
        pipe.send(memory.digest(question))
    if agent is not None:
        agent.deregister_memory(registered)


def nixl_start(kind: str, memory: Memory, where: tuple[bytes, int], own: str = "initiator") -> Start:
    """Prepare transfers of NIXL. The same pieces are prepared once and posted again and again."""
    agent = nixl_agent(own, kind)
    agent.register_memory([(memory.address, len(memory.array), 0, "source")], "DRAM")
    name = agent.add_remote_agent(where[0])
    ready: dict[tuple[tuple[int, int, int], ...], list[Any]] = {}

    def start(pieces: list[tuple[int, int, int]]) -> Callable[[], bool]:
        free = ready.setdefault(tuple(pieces), [])
        if free:
            transfer = free.pop()
        else:
            local = agent.get_xfer_descs([(memory.address + src, size, 0) for src, _, size in pieces], "DRAM")
            remote = agent.get_xfer_descs([(where[1] + dst, size, 0) for _, dst, size in pieces], "DRAM")
            transfer = agent.initialize_xfer("WRITE", local, remote, name, b"landed")
        state = [agent.transfer(transfer)]

        def is_over() -> bool:
            if state[0] == "PROC":
                state[0] = agent.check_xfer_state(transfer)
            if state[0] == "ERR":
                raise RuntimeError("a transfer of NIXL failed")
            if state[0] == "DONE":
                free.append(transfer)
            return bool(state[0] == "DONE")

        return is_over

    return start


def mooncake_start(memory: Memory, where: tuple[str, int]) -> Start:
    """Prepare transfers of Mooncake."""
    engine = mooncake_engine()
    engine.register_memory(memory.address, len(memory.array))

    def start(pieces: list[tuple[int, int, int]]) -> Callable[[], bool]:
        if len(pieces) == 1:
            src, dst, size = pieces[0]
            batch = engine.transfer_submit_write(where[0], memory.address + src, where[1] + dst, size)
            state = [0]

            def is_over() -> bool:
                if state[0] == 0:
                    state[0] = engine.transfer_check_status(batch)
                if state[0] < 0:
                    raise RuntimeError("a transfer of Mooncake failed")
                return state[0] == 1

            return is_over
        local = [memory.address + src for src, _, _ in pieces]
        remote = [where[1] + dst for _, dst, _ in pieces]
        if engine.batch_transfer_sync_write(where[0], local, remote, [size for _, _, size in pieces]) != 0:
            raise RuntimeError("a transfer of Mooncake failed")
        return lambda: True

    return start


def finish(is_over: Callable[[], bool]) -> None:
    """Wait for a transfer."""
    end = time.perf_counter() + PATIENCE_S
    while not is_over():
        if time.perf_counter() > end:
            raise TimeoutError("a transfer did not end")
        os.sched_yield()


def measure(start: Start, pieces: list[tuple[int, int, int]], seconds: float, window: int) -> dict[str, float]:
    """Rate with a window of transfers under way, and latency of one at a time."""
    under_way: deque[Callable[[], bool]] = deque()
    transfers, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds or under_way:
        if time.perf_counter() - begin < seconds and len(under_way) < window:
            under_way.append(start(pieces))
            transfers += 1
        else:
            finish(under_way.popleft())
    rate = transfers / (time.perf_counter() - begin)
    latencies: list[float] = []
    begin = time.perf_counter()
    while len(latencies) < 10 or (time.perf_counter() - begin < seconds and len(latencies) < 10_000):
        before = time.perf_counter()
        finish(start(pieces))
        latencies.append((time.perf_counter() - before) * 1e6)
    latencies.sort()
    size = sum(length for _, _, length in pieces)
    return {
        "ops_per_s": rate * len(pieces),
        "gbit_per_s": rate * size * 8e-9,
        **{f"p{share}_us": latencies[len(latencies) * share // 100] for share in (50, 90, 99)},
    }


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=[*TRANSPORTS, "mooncake_tcp"])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--largest", type=int, default=32 << 20)
    parser.add_argument("--sizes", type=lambda text: {int(size) for size in text.split(",")}, default=set())
    parser.add_argument("--smallest", type=int, default=64 << 10)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--output_file", type=Path)
    options = parser.parse_args()
    if options.kind in TRANSPORTS:
        os.environ["UCX_TLS"] = TRANSPORTS[options.kind]
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    # A missing part is named now, instead of a target that never answers.
    importlib.import_module("nixl" if options.kind in TRANSPORTS else "mooncake.engine")
    length = max(options.largest, MIN_MEMORY)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(options.kind, length, theirs), daemon=True)
    process.start()
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("the target did not start")
    where = pipe.recv()
    memory = Memory(length)
    memory.array[:] = os.urandom(1 << 20) * (length >> 20)
    start = nixl_start(options.kind, memory, where) if options.kind in TRANSPORTS else mooncake_start(memory, where)
    sizes = [options.smallest << shift for shift in range(32) if options.smallest << shift <= options.largest]
    rows = []
    for kind, size, count in [
        *(("single", size, 1) for size in sizes),
        *(("paged", 1024 << i, PAGES) for i in range(7)),
    ]:
        if options.sizes and size not in options.sizes:
            continue
        pieces = [(2 * page * size if count > 1 else 0, page * size, size) for page in range(count)]
        memory.array[0:8] = os.urandom(8)
        finish(start(pieces))
        right = hashlib.blake2b(
            b"".join(memory.array[src : src + n] for src, _, n in pieces), digest_size=16
        ).hexdigest()
        pipe.send(size * count)
        if pipe.recv() != right:
            raise AssertionError(f"wrong bytes after {count} x {size} bytes")
        rows.append({"kind": kind, "bytes": size, **measure(start, pieces, options.seconds, options.window)})
        print(rows[-1], flush=True)
    if options.output_file:
        options.output_file.write_text(json.dumps({"schema": 1, "engine": options.kind, "rows": rows}) + "\n")
    pipe.send(None)
    process.join(5)
    # Both leave threads behind that would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
