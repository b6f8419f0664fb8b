"""Measures how long a request's pages take, ours beside the engine, floors, NIXL and Mooncake, with the same pages.

    python benchmarks/kv_handover.py --peers nixl_tcp,nixl_shm,mooncake_tcp --output_file handover.json

Two processes of this machine. Each contender moves the same shuffled pages, and all bytes are compared before anything
is timed. A time begins when all pages are ready. It ends when the receiving process knows; Mooncake tells nobody, so
its time ends with its caller's knowledge. Peers' lists of pages are prepared before the time begins, like our plan, and
what that takes is a column of its own. `socket` is the floor of tcp: one connection and a bare loop over the pages.

Needs `putget_transfer`, and for peers `nixl` and `mooncake-transfer-engine` or its build without CUDA.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from putget_transfer.kv import _bench
from putget_transfer.kv._models import Model

sys.path.insert(0, str(Path(__file__).parent.parent / "transfer" / "bench"))
import peers

SHAPES = {
    "deepseek-v3": _bench.Shape(Model(layers=61, kv_heads=1, head_bytes=1152), 64, 4096),
    "llama-70b": _bench.Shape(Model(layers=80, kv_heads=8, head_bytes=256), 16, 4096),
}
NETWORK = {"nixl_tcp": "tcp", "nixl_shm": "host", "mooncake_tcp": "tcp", "socket": "tcp"}
WAIT_S = 120.0
Pieces = list[tuple[int, int, int]]


def pieces_of(shape: _bench.Shape) -> Pieces:
    """Return source offset, target offset and length of each page, in the order of the layers."""
    places = []
    for seed in (1, 2):
        pages = list(range(shape.pages))
        random.Random(seed).shuffle(pages)
        places.append(shape.places(pages))
    return [
        (src * shape.page_bytes, dst * shape.page_bytes, shape.page_bytes) for src, dst in zip(*places, strict=True)
    ]


def digest_at(memory: peers.Memory, places: list[int], length: int) -> str:
    """Hash pieces of memory in the order of their places."""
    view, found = memoryview(memory.array), hashlib.blake2b(digest_size=16)
    for place in places:
        found.update(view[place : place + length])
    return found.hexdigest()


def receiver(kind: str, shape: _bench.Shape, pipe: Connection) -> None:
    """Be written to: answer for the bytes, and say when a transfer was known to have landed."""
    memory, pieces = peers.Memory(shape.num_bytes), pieces_of(shape)
    places = [dst for _, dst, _ in pieces]
    agent: Any = None
    connection: socket.socket | None = None
    if kind == "socket":
        server = socket.create_server(("127.0.0.1", 0))
        pipe.send(server.getsockname())
        connection = server.accept()[0]
    elif kind.startswith("nixl"):
        agent = peers.nixl_agent("target", kind)
        agent.register_memory([(memory.address, shape.num_bytes, 0, "target")], "DRAM")
        pipe.send((agent.get_agent_metadata(), memory.address))
    else:
        engine = peers.mooncake_engine()
        if engine.register_memory(memory.address, shape.num_bytes) != 0:
            raise RuntimeError("Mooncake did not register the memory")
        pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", memory.address))
    view = memoryview(memory.array).cast("B")
    while (order := pipe.recv()) is not None:
        if order == "digest":
            pipe.send(digest_at(memory, places, shape.page_bytes))
            continue
        # A transfer is coming.
        pipe.send(None)
        if connection is not None:
            for place in places:
                connection.recv_into(view[place : place + shape.page_bytes], shape.page_bytes, socket.MSG_WAITALL)
        elif agent is not None:
            end = time.monotonic() + WAIT_S
            while not any(agent.get_new_notifs().values()):
                if time.monotonic() > end:
                    raise TimeoutError("no notification came")
        pipe.send(time.monotonic_ns())
    os._exit(0)  # peers leave threads behind that would keep the process


def sender(kind: str, memory: peers.Memory, where: Any, pieces: Pieces) -> Callable[[], None]:
    """Return what moves all pages; peers have been told of them."""
    if kind == "socket":
        connection, view = socket.create_connection(where), memoryview(memory.array).cast("B")

        def send() -> None:
            for src, _, size in pieces:
                connection.sendall(view[src : src + size])

        return send
    if kind.startswith("nixl"):
        start = peers.nixl_start(kind, memory, where)
        return lambda: peers.finish(start(pieces))
    start = peers.mooncake_start(memory, where)

    def by_chunks() -> None:
        # Its queue for TCP is full with more.
        for at in range(0, len(pieces), peers.PAGES):
            peers.finish(start(pieces[at : at + peers.PAGES]))

    return by_chunks


def peer(kind: str, shape: _bench.Shape, rounds: int) -> dict[str, Any]:
    """Time another contender, in this process and one that it starts."""
    if kind in peers.TRANSPORTS:
        os.environ["UCX_TLS"] = peers.TRANSPORTS[kind]
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receiver, args=(kind, shape, theirs), daemon=True)
    process.start()
    theirs.close()

    def answer() -> Any:
        if not pipe.poll(WAIT_S):
            raise TimeoutError(f"{kind}: the receiver has not answered")
        return pipe.recv()

    where, memory, pieces = answer(), peers.Memory(shape.num_bytes), pieces_of(shape)
    memory.array[:] = random.Random(3).randbytes(1 << 20) * (shape.num_bytes >> 20) + bytes(shape.num_bytes % (1 << 20))
    for number, (src, _, _) in enumerate(pieces):
        memory.array[src : src + 8] = number.to_bytes(8, "little")
    move, times = sender(kind, memory, where, pieces), []
    for number in range(rounds + 1):
        pipe.send("move")
        answer()
        begun = time.monotonic_ns()
        move()
        mine, known = time.monotonic_ns(), answer()
        times.append(((mine if kind.startswith("mooncake") else known) - begun) / 1e9)
        if number == 0:
            pipe.send("digest")
            if answer() != digest_at(memory, [src for src, _, _ in pieces], shape.page_bytes):
                raise RuntimeError(f"{kind}: bytes differ")
    pipe.send(None)
    process.join(10)
    process.kill()
    # The first round compares bytes, maps memory and prepares lists.
    return {"contender": kind, "seconds": statistics.median(times[1:]), "all_seconds": times[1:], "first_s": times[0]}


def peer_alone(kind: str, name: str, tokens: int, rounds: int, pipe: Connection) -> None:
    """Carry out `peer` in a process of its own, whose environment and threads end with it."""
    try:
        pipe.send(peer(kind, scaled(name, tokens), rounds))
    except Exception as error:
        pipe.send({"contender": kind, "error": f"{type(error).__name__}: {error}"})
    time.sleep(0.1)
    os._exit(0)


def scaled(name: str, tokens: int) -> _bench.Shape:
    """Return a shape for so many tokens."""
    return _bench.Shape(SHAPES[name].model, SHAPES[name].page_tokens, tokens)


def others(kinds: list[str], name: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Time the other contenders."""
    found, context = [], multiprocessing.get_context("spawn")
    for kind in kinds:
        ours, theirs = context.Pipe()
        process = context.Process(target=peer_alone, args=(kind, name, tokens, rounds, theirs))
        process.start()
        theirs.close()
        try:
            row = ours.recv() if ours.poll(2 * WAIT_S) else {"contender": kind, "error": "no answer"}
        except EOFError:
            row = {"contender": kind, "error": "its process has ended"}
        process.join(10)
        process.kill()
        found.append(row)
    return found


def main() -> None:
    """Measure all of it, and show a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--networks", type=lambda text: text.split(","), default=["host", "tcp"])
    parser.add_argument("--peers", type=lambda text: [kind for kind in text.split(",") if kind], default=[])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output_file", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"schema": "putget.kv_handover/1", "rows": []}
    found["machine"] = {"processors": os.cpu_count(), "load": os.getloadavg()[0], "system": platform.platform()}
    for name in options.models:
        shape = scaled(name, options.tokens)
        for network in options.networks:
            ours = _bench.transfers(network, name, shape, options.rounds)
            kinds = [kind for kind in ["socket", *options.peers] if NETWORK[kind] == network]
            rows = [
                {"contender": kind, "seconds": ours["seconds"][kind], "all_seconds": ours["all_seconds"][kind]}
                for kind in ("request", "paged", "memcpy")
            ]
            rows += others(kinds, name, options.tokens, options.rounds)
            for row in rows:
                row.update(network=network, model=name, num_bytes=shape.num_bytes, page_bytes=shape.page_bytes)
                found["rows"].append(row)
                said = f"{row['seconds'] * 1e3:9.1f} ms" if "seconds" in row else row["error"]
                share = f"{row['seconds'] / rows[0]['seconds']:6.2f}" if "seconds" in row else ""
                print(f"{name:12} {network:5} {row['contender']:13} {said} {share}", flush=True)
            if options.output_file:
                options.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
