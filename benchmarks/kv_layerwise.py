"""Measures requests that leave layer by layer from inside a captured CUDA graph; two processes share a GPU.

    python benchmarks/kv_layerwise.py --rounds 20 --output_file layerwise.json

A step writes the pages of each layer and multiplies matrices; one graph replays it. By turns in each round: a graph
without `layer_done`; one with it, while nobody has asked; the same while a decode process has asked, so that pages
leave during the step; and the same request sent after the step. All bytes are compared in the first round. The floor of
what is left after the last layer is the time of its bytes at the engine's rate for all pages, plus a notification.

Needs `putget_transfer`, torch and a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import putget_transfer as pt
from putget_transfer import kv

WAIT_S = 60.0
TOKENS, WIDE = 64, 1152  # tokens of a page, bytes of a token: DeepSeek-V3
PAGED_IMM, WORD_IMM = 77, 78


class Side:
    """An engine, and a cache on the GPU."""

    def __init__(self, layers: int, pages: int) -> None:
        torch.cuda.set_device(0)
        self.layers, self.pages = layers, pages
        self.memory = torch.zeros(layers, 2 * pages, TOKENS, WIDE, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.engine = pt.Engine.builder().group(pt.DeviceGroup.nvlink(0)).build()
        shape = {"layout": "LBNC", "page_tokens": TOKENS, "num_kv_heads": 1, "packed": False}
        self.cache = kv.KvCache(self.engine, {"model": self.memory}, **shape)  # type: ignore[arg-type]

    def numbers(self, seed: int) -> list[int]:
        """Return the pages of a request."""
        return random.Random(seed).sample(range(2 * self.pages), self.pages)

    def places(self, seed: int) -> list[int]:
        """Return the place of each page of each layer in the memory."""
        return [layer * 2 * self.pages + page for layer in range(self.layers) for page in self.numbers(seed)]

    def content(self) -> torch.Tensor:
        """Return what pages have before a layer's and a step's number are added."""
        made = torch.Generator(device="cuda").manual_seed(5)
        size = (self.pages, TOKENS, WIDE)
        return torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=made)


def decode(pipe: Connection, layers: int, pages: int) -> None:
    """Ask for requests, and say when they had arrived."""
    side = Side(layers, pages)
    decoder = kv.Decoder(side.cache)
    address, source = pipe.recv()
    desc = side.engine.desc_for(side.cache.handles[0], pt.NetAddr.from_bytes(address))
    _, word = side.engine.alloc_mr(4096)
    pipe.send((desc.to_bytes(), word.to_bytes()))
    sources = decoder.sources([source])
    content, numbers = side.content(), side.numbers(2)
    while (order := pipe.recv()) is not None:
        if order[0] == "request":
            tokens = pages * TOKENS
            receive = decoder.request(
                sources, order[1], [numbers], tokens=tokens, segment_tokens=tokens, deadline_s=WAIT_S
            )
            while receive.state == "asked":
                time.sleep(0.0005)
            pipe.send(None)
            receive.wait(WAIT_S)
            pipe.send(time.monotonic_ns())
        elif order[0] == "expect":
            known = side.engine.expect_imm_count(order[1], 1, take=True, deadline_s=WAIT_S)
            pipe.send(None)
            known.wait(WAIT_S)
            pipe.send(time.monotonic_ns())
        elif order[0] == "check":
            for layer in range(layers):
                if not torch.equal(side.memory[layer, numbers], content + (order[1] + layer) % 256):
                    raise RuntimeError(f"pages of layer {layer} differ")
            side.memory.zero_()
            torch.cuda.synchronize()
            pipe.send(None)
    side.engine.close()


class Model:
    """A step: each layer writes its pages and multiplies matrices."""

    def __init__(self, side: Side, products: int) -> None:
        self.side, self.products = side, products
        self.hidden = torch.randn(4096, 7168, dtype=torch.bfloat16, device="cuda")
        self.weight = torch.randn(7168, 7168, dtype=torch.bfloat16, device="cuda") / 85
        self.content = side.content()
        self.index = torch.tensor(side.numbers(1), device="cuda")
        self.step = torch.zeros((), dtype=torch.uint8, device="cuda")

    def forward(self, layer_done: Callable[[int], None] | None) -> None:
        """Compute a step."""
        out = self.hidden
        for layer in range(self.side.layers):
            self.side.memory[layer].index_copy_(0, self.index, self.content + (self.step + layer))
            for _ in range(self.products):
                out = out @ self.weight
            if layer_done is not None:
                layer_done(layer)

    def captured(self, layer_done: Callable[[int], None] | None) -> torch.cuda.CUDAGraph:
        """Return a graph of it."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.forward(None)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self.forward(layer_done)
        torch.cuda.synchronize()
        return graph


class Bench:
    """The prefill process."""

    def __init__(self, options: argparse.Namespace) -> None:
        layers, pages = options.layers, options.pages
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=decode, args=(theirs, layers, pages), daemon=True)
        self.process.start()
        self.side = Side(layers, pages)
        self.prefiller = kv.Prefiller(self.side.cache, lease_s=WAIT_S)
        self.pipe.send((self.side.engine.main_address().to_bytes(), self.prefiller.source()))
        self.pages_desc, self.word_desc = map(pt.MrDesc.from_bytes, self.answer())
        self.model = Model(self.side, options.products)
        self.plain = self.model.captured(None)
        stream = torch.cuda.current_stream
        self.graph = self.model.captured(lambda layer: self.prefiller.layer_done(layer, stream()))
        self.own_words, _ = self.side.engine.alloc_mr(4096)
        self.number = 0

    def answer(self) -> Any:
        """Return what the decode process says.

        Raises:
            RuntimeError: It is silent.
        """
        if not self.pipe.poll(WAIT_S):
            raise RuntimeError("the decode process has not answered")
        return self.pipe.recv()

    def timed(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the milliseconds of a replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def begin(self, name: str) -> int:
        """Begin a step that computes a request; return the value that the word will have."""
        self.number += 1
        self.model.step.fill_(self.number % 256)
        work = [(name, self.side.pages * TOKENS, [self.side.numbers(1)])]
        self.prefiller.begin_step(self.number, work, torch.cuda.current_stream())
        return self.number << 16 | self.side.layers

    def finish(self, name: str) -> None:
        """End a request."""
        self.prefiller.finish(name)
        end = time.monotonic() + WAIT_S
        while name not in {found for found, _ in self.prefiller.poll()}:
            if time.monotonic() > end:
                raise RuntimeError(f"{name} has not come back")

    def layerwise(self) -> tuple[float, float]:
        """Send a request during a step; return the step's milliseconds, and from its end to the decoder's knowledge."""
        name = f"layers {self.number}"
        self.pipe.send(("request", name))
        self.answer()
        wanted = self.begin(name)
        word = ctypes.c_uint64.from_address(self.prefiller.word)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        self.graph.replay()
        end.record()
        while word.value != wanted:
            pass
        done = time.monotonic_ns()
        arrived = self.answer()
        end.synchronize()
        self.finish(name)
        return float(begin.elapsed_time(end)), (arrived - done) / 1e6

    def after(self) -> float:
        """Send a request after its step; return the milliseconds from its Request to the decoder's knowledge."""
        name = f"after {self.number}"
        wanted = self.begin(name)
        self.graph.replay()
        torch.cuda.synchronize()
        if ctypes.c_uint64.from_address(self.prefiller.word).value != wanted:
            raise RuntimeError("the word differs")
        begun = time.monotonic_ns()
        self.pipe.send(("request", name))
        self.answer()
        arrived = self.answer()
        self.finish(name)
        return (arrived - begun) / 1e6

    def paged(self, layers: int) -> float:
        """Return the milliseconds in which the engine's own paged write moves the pages of some layers."""
        self.pipe.send(("expect", PAGED_IMM))
        self.answer()
        size, count = TOKENS * WIDE, layers * self.side.pages
        pages = [pt.Pages(self.side.places(seed)[:count], size) for seed in (1, 2)]
        begun = time.monotonic_ns()
        self.side.engine.submit_paged_writes(
            size, PAGED_IMM, (self.side.cache.handles[0], pages[0]), (self.pages_desc, pages[1]), deadline_s=WAIT_S
        )
        return (self.answer() - begun) / 1e6

    def notification(self) -> float:
        """Return the milliseconds from an empty write's submission to the decode process's knowledge."""
        self.pipe.send(("expect", WORD_IMM))
        self.answer()
        time.sleep(0.002)
        begun = time.monotonic_ns()
        self.side.engine.submit_single_write(8, WORD_IMM, (self.own_words, 0), (self.word_desc, 0), deadline_s=WAIT_S)
        return (self.answer() - begun) / 1e6

    def run(self, rounds: int) -> dict[str, Any]:
        """Measure all of it by turns."""
        names = ("plain", "unasked", "layerwise", "left", "after", "paged", "one_layer", "notification")
        found: dict[str, list[float]] = {name: [] for name in names}
        for at in range(rounds + 2):
            row: dict[str, float] = {}
            # In another order each time: the GPU's clock follows what ran before.
            for kind in random.sample(("plain", "unasked", "layerwise"), 3):
                if kind == "layerwise":
                    row["layerwise"], row["left"] = self.layerwise()
                else:
                    row[kind] = self.timed(self.plain if kind == "plain" else self.graph)
            if at == 0:
                self.pipe.send(("check", self.number))
                self.answer()
            row["after"] = self.after()
            if at == 0:
                self.pipe.send(("check", self.number))
                self.answer()
            row["paged"], row["one_layer"] = self.paged(self.side.layers), self.paged(1)
            row["notification"] = self.notification()
            for name, value in row.items():
                if at > 1:
                    found[name].append(value)
        self.pipe.send(None)
        self.process.join(WAIT_S)
        medians = {name: statistics.median(values) for name, values in found.items()}
        floor = medians["paged"] / self.side.layers + medians["notification"]
        return {
            "schema": "putget.kv_layerwise/1",
            "gpu": torch.cuda.get_device_name(),
            "num_bytes": self.side.layers * self.side.pages * TOKENS * WIDE,
            "median_ms": medians,
            "all_ms": found,
            "slowed": medians["layerwise"] / medians["plain"] - 1,
            "floor_ms": floor,
            "left_of_floor": medians["left"] / floor,
        }


def main() -> None:
    """Measure, and show what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--products", type=int, default=3, help="products of matrices in each layer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output_file", type=Path)
    options = parser.parse_args()
    report = Bench(options).run(options.rounds)
    for name, value in report["median_ms"].items():
        print(f"{name:14} {value:9.3f} ms")
    print(
        f"slowed {report['slowed']:.2%}, left {report['left_of_floor']:.2f} of a floor of {report['floor_ms']:.3f} ms"
    )
    if options.output_file:
        options.output_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
