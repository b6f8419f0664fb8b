"""Expert-major rows, expand, activation and finalize: time against the number of slots, and against a device copy.

    python benchmarks/moe_kernels.py --output_file moe.json

One GPU stands for one rank of a larger group: `tokens` tokens a rank make tokens * top_k rows for its experts whatever
ep_size is, out of tokens * top_k * ep_size slots. So the time must not grow with ep_size. Every received row has two of
its experts here. Each figure is the median of replays of a CUDA graph, with the L2 cache flushed by reads in between;
the ceiling is a device copy that moves the same bytes in the same way; beside it stands plain traffic with the mix of
reads and writes that the operation has ("of mix"), because writes are slower. Results are checked before they are
timed. For comparison stand kernels with one block for each slot, which ends at once where the slot is empty (naive_*).
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import putget
from putget import moe, reference_moe
from putget.core.expert_major import ExpertMajor, FlatRows, Grouper
from putget.core.geometry import Geometry
from putget_bench import environment

HIDDEN, SCALES, INTERMEDIATE, TOP_K, LOCAL, NUM_EXPERTS = 7168, 56, 2048, 8, 2, 256
REPLAYS, WARMUP, BACK_TO_BACK = 31, 3, 10
MIX_BLOCKS = (1024, 2048, 4096)  # words; the fastest is the ceiling
BF16 = torch.bfloat16
Action = Callable[[], object]


@dataclass(frozen=True)
class Operation:
    """Something to time.

    Attributes:
        moved_bytes: What must be read and written at least: nothing counts twice.
        mix: Reads and writes of its large tensors, as small whole numbers.
        run: Enqueues it.
        check: Raises unless the last run was right.
    """

    name: str
    moved_bytes: int
    mix: tuple[int, int]
    run: Action
    check: Action


class Rank:
    """The rows of one rank of ep_size after a dispatch: `tokens` tokens per rank, random routing, random bytes."""

    def __init__(self, ep_size: int, tokens: int, device: torch.device, alignment: int) -> None:
        generator = torch.Generator(device).manual_seed(1000 * ep_size + tokens)
        self.ep_size, self.tokens, self.device, self.alignment = ep_size, tokens, device, alignment
        self.payloads = (putget.Payload((HIDDEN,), torch.uint8), putget.Payload((SCALES,), torch.float32))
        output = putget.Payload((HIDDEN,), BF16)
        geometry = Geometry.checked(ep_size, NUM_EXPERTS, TOP_K, tokens, self.payloads, output)
        experts_here = NUM_EXPERTS // ep_size
        table = (torch.arange(NUM_EXPERTS, dtype=torch.int32) // experts_here).to(device)
        self.num_received = tokens * TOP_K // LOCAL
        counts = [self.num_received // ep_size + (src < self.num_received % ep_size) for src in range(ep_size)]
        self.num_tokens = torch.tensor(counts, dtype=torch.int32, device=device)
        slots = tokens * ep_size
        # Rank 0's experts are the first ones. Two distinct ones of them stand at random places among others.
        first = torch.randint(experts_here, (slots,), generator=generator, device=device)
        step = torch.randint(1, max(experts_here, 2), (slots,), generator=generator, device=device)
        ids = torch.randint(experts_here, NUM_EXPERTS, (slots, TOP_K), generator=generator, device=device)
        places = torch.rand(slots, TOP_K, generator=generator, device=device).argsort(dim=1)[:, :LOCAL]
        ids.scatter_(1, places, torch.stack([first, (first + step) % experts_here], dim=1))
        slot = torch.arange(slots, device=device) // ep_size
        source = torch.arange(slots, device=device) % ep_size
        self.is_held = slot < self.num_tokens[source]
        self.ids = torch.where(self.is_held[:, None], ids, -1).int()
        self.weights = torch.rand(slots, TOP_K, generator=generator, device=device)
        held = (
            torch.randint(256, (slots, HIDDEN), generator=generator, device=device, dtype=torch.uint8),
            torch.rand(slots, SCALES, generator=generator, device=device),
        )
        self.flat = FlatRows(held, self.ids, self.weights)
        self.combine_input = torch.zeros(slots, HIDDEN, dtype=BF16, device=device)
        self.grouper = Grouper(geometry, 0, table, self.num_tokens)
        self.grouper.begin()
        self.memory = self.grouper.memory_for(alignment, tokens, None)
        self.places_memory = self.grouper.memory_for(alignment, tokens, None, copy_rows=False)
        self.num_rows = tokens * TOP_K

    def group(self) -> ExpertMajor:
        """received.expert_major()."""
        return self.grouper.group(self.flat, self.combine_input, self.memory)

    def place(self) -> ExpertMajor:
        """received.expert_major(copy_rows=False)."""
        return self.grouper.group(self.flat, self.combine_input, self.places_memory)

    def operations(self) -> list[Operation]:
        """All of them, on rows that are grouped once."""
        grouped = self.group()
        row_bytes = sum(payload.row_bytes for payload in self.payloads)
        looked_up = self.num_received * TOP_K * 12 + self.num_rows * 8
        moved = (self.num_received + self.num_rows) * row_bytes + looked_up
        made = [
            Operation("places_alone", looked_up, (1, 1), self.place, self.check_places),
            Operation("expert_major", moved, (1, LOCAL), self.group, self.check_group),
        ]
        made += self.expand(row_bytes)
        made += self.activation(grouped)
        made.append(self.finalize(grouped))
        return made

    def check_group(self) -> None:
        """The places, and the rows in them."""
        grouped = self.group()
        rows = self.require_places(grouped)
        valid = grouped.source_rows >= 0
        for payload, held in zip(grouped.payloads, self.flat.payloads, strict=True):
            require(torch.equal(payload[valid], held[rows]), "payload")

    def check_places(self) -> None:
        """The places alone."""
        self.require_places(self.place())

    def require_places(self, grouped: ExpertMajor) -> torch.Tensor:
        """Against a stable sort by expert of the choices in the order (source, slot, k), which it returns."""
        order = torch.arange(self.ids.shape[0], device=self.device).view(-1, self.ep_size).t().flatten()
        ids = self.ids[order]
        rows = order[:, None].expand_as(ids)[(ids >= 0) & (ids < NUM_EXPERTS // self.ep_size)]
        local = ids[(ids >= 0) & (ids < NUM_EXPERTS // self.ep_size)]
        by_expert = local.sort(stable=True)
        rows = rows[by_expert.indices]
        valid = grouped.source_rows >= 0
        require(torch.equal(grouped.source_rows[valid].long(), rows), "source_rows")
        require(grouped.num_rows.sum().item() == self.num_rows, "num_rows")
        counts = local.bincount(minlength=len(grouped.num_rows))
        require(torch.equal(grouped.num_rows.long(), counts), "num_rows")
        return rows

    def expand(self, row_bytes: int) -> list[Operation]:
        """Every row from another place: a permutation."""
        sources = [held[: self.num_rows] for held in self.flat.payloads]
        if len(sources[0]) < self.num_rows:  # fewer slots than rows: take random bytes anew
            sources = [
                torch.randint(256, (self.num_rows, HIDDEN), device=self.device, dtype=torch.uint8),
                torch.rand(self.num_rows, SCALES, device=self.device),
            ]
        index = torch.full((self.num_rows * self.ep_size,), -1, dtype=torch.int32, device=self.device)
        index[: self.num_rows] = torch.randperm(self.num_rows, device=self.device)
        count = torch.tensor([self.num_rows], dtype=torch.int32, device=self.device)
        outs = [
            torch.zeros(len(index), *source.shape[1:], dtype=source.dtype, device=self.device) for source in sources
        ]

        def check() -> None:
            for source, out in zip(sources, outs, strict=True):
                require(torch.equal(out[: self.num_rows], source[index[: self.num_rows].long()]), "expanded rows")
                out.zero_()

        moved = self.num_rows * (2 * row_bytes + 4)
        made = [
            Operation("expand", moved, (1, 1), lambda: moe.expand(sources, index, num_valid=count, out=outs), check)
        ]
        if self.device.type == "cuda":
            made.append(
                Operation("naive_expand", moved, (1, 1), lambda: naive.expand(sources, index, count, outs), check)
            )
        return made

    def activation(self, grouped: ExpertMajor) -> list[Operation]:
        """The activation of the grouped rows."""
        capacity = grouped.capacity
        x = torch.empty(capacity, 2 * INTERMEDIATE, dtype=BF16, device=self.device).normal_()
        out = torch.zeros(capacity, INTERMEDIATE, dtype=BF16, device=self.device)
        codes = torch.zeros(capacity, INTERMEDIATE, dtype=torch.float8_e4m3fn, device=self.device)
        scales = torch.zeros(capacity, INTERMEDIATE // 128, device=self.device)
        valid = grouped.source_rows >= 0
        count = grouped.num_rows.sum(dtype=torch.int32).reshape(1)

        def exact() -> torch.Tensor:
            return reference_moe.gated_activation(x[valid], "silu")

        def check() -> None:
            want = exact()
            require(bool(((out[valid].float() - want).abs() <= want.abs() * 2**-8 + 1e-6).all()), "activation")
            out.zero_()

        def check_codes() -> None:
            want = exact()
            got = codes[valid].float() * scales[valid].repeat_interleave(128, dim=1)
            step = scales[valid].repeat_interleave(128, dim=1) * 2**-9
            require(bool(((got - want).abs() <= want.abs() * 2**-3.9 + step).all()), "quantised activation")

        read = self.num_rows * 4 * INTERMEDIATE
        plain = read + self.num_rows * 2 * INTERMEDIATE
        quantised = read + self.num_rows * (INTERMEDIATE + INTERMEDIATE // 128 * 4)
        made = [
            Operation("activation", plain, (2, 1), lambda: moe.gated_activation(x, num_valid=grouped, out=out), check),
            Operation(
                "activation_fp8",
                quantised,
                (4, 1),
                lambda: moe.gated_activation(x, num_valid=grouped, quantise="fp8_block", out=codes, scales=scales),
                check_codes,
            ),
        ]
        if self.device.type == "cuda" and self.alignment == 1:
            made.append(Operation("naive_activation", plain, (2, 1), lambda: naive.activation(x, count, out), check))
        return made

    def finalize(self, grouped: ExpertMajor) -> Operation:
        """The last step of the grouped rows, into combine_input."""
        rows = torch.empty(grouped.capacity, HIDDEN, dtype=BF16, device=self.device).normal_()

        def check() -> None:
            held = self.is_held.nonzero()[:, 0]
            for some in held.split(1024):
                want = torch.zeros(len(some), HIDDEN, device=self.device)
                for k in range(TOP_K):
                    place = grouped.positions[some, k].long()
                    here = place >= 0
                    want[here] = want[here] + rows[place[here]].float() * self.weights[some[here], k, None]
                require(torch.equal(self.combine_input[some], want.to(BF16)), "finalized rows")
            self.combine_input.zero_()

        moved = (self.num_rows + self.num_received) * 2 * HIDDEN + self.num_received * TOP_K * 8
        return Operation("finalize", moved, (LOCAL, 1), lambda: self.grouper.finalize(rows, grouped), check)


def require(holds: bool, what: str) -> None:
    """Ends the run unless the result is right."""
    if not holds:
        sys.exit(f"wrong: {what}")


class Clock:
    """Times graphs, with the L2 cache full of other lines, none of them to be written back."""

    def __init__(self) -> None:
        self._other = torch.ones(1 << 27, dtype=torch.int32, device="cuda")
        self._sum = torch.zeros((), dtype=torch.int64, device="cuda")

    def microseconds(self, run: Action) -> float:
        """One run, cold."""
        return self._median(captured(run))

    def back_to_back(self, run: Action) -> float:
        """One of several in a row, warm: what it costs among other kernels."""

        def several() -> None:
            for _ in range(BACK_TO_BACK):
                run()

        return self._median(captured(several), flush=False) / BACK_TO_BACK

    def _median(self, graph: torch.cuda.CUDAGraph, flush: bool = True) -> float:
        times = []
        for index in range(WARMUP + REPLAYS):
            if flush:
                torch.sum(self._other, dim=0, out=self._sum)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if index >= WARMUP:
                times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)


def captured(run: Action) -> torch.cuda.CUDAGraph:
    """Runs once eagerly, then as a graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def copy_of(moved_bytes: int) -> Action:
    """A device copy that reads and writes so many bytes together."""
    words = max(moved_bytes // 8, 1)
    source, target = (torch.zeros(words, dtype=torch.int32, device="cuda") for _ in range(2))
    source.random_()
    return lambda: target.copy_(source)


def mix_of(moved_bytes: int, mix: tuple[int, int], block: int) -> Action:
    """Plain traffic of so many bytes together, in the given mix of reads and writes."""
    words = -(-moved_bytes // 4 // sum(mix) // naive.MIX_WORDS) * naive.MIX_WORDS
    source, target = (torch.zeros(streams, words, dtype=torch.int32, device="cuda") for streams in mix)
    source.random_()
    return lambda: naive.mix(source, target, block)


def fill_of(moved_bytes: int) -> Action:
    """As many bytes, all of them written."""
    target = torch.zeros(max(moved_bytes // 4, 1), dtype=torch.int32, device="cuda")
    return lambda: target.fill_(1)


def measure(
    ep_size: int, tokens: int, alignment: int, clock: Clock, ceilings: dict[Any, float]
) -> list[dict[str, Any]]:
    """All operations of one rank."""
    rows = []
    rank = Rank(ep_size, tokens, torch.device("cuda"), alignment)
    for operation in rank.operations():
        operation.run()
        operation.check()
        ceiling = ceilings.get(operation.moved_bytes)
        if ceiling is None:
            ceiling = ceilings[operation.moved_bytes] = clock.microseconds(copy_of(operation.moved_bytes))
        asked = (operation.moved_bytes, operation.mix)
        mixed = ceilings.get(asked)
        if mixed is None:
            mixed = ceilings[asked] = min(clock.microseconds(mix_of(*asked, block)) for block in MIX_BLOCKS)
        filled = None
        if operation.mix[1] > operation.mix[0]:  # mostly writes: how slow are they alone?
            filled = clock.microseconds(fill_of(operation.moved_bytes))
        us = clock.microseconds(operation.run)
        row = {
            "operation": operation.name,
            "tokens": tokens,
            "ep_size": ep_size,
            "valid_rows": rank.num_rows,
            "slots": rank.num_rows * ep_size,
            "moved_bytes": operation.moved_bytes,
            "us": us,
            "back_to_back_us": clock.back_to_back(operation.run),
            "copy_us": ceiling,
            "of_copy": ceiling / us,
            "mix_us": mixed,
            "of_mix": mixed / us,
            "fill_us": filled,
            "gb_per_s": operation.moved_bytes / us / 1e3,
        }
        rows.append(row)
    return rows


def check_on_cpu(ep_size: int, tokens: int, alignment: int) -> None:
    """The checks alone, without a GPU."""
    for operation in Rank(ep_size, tokens, torch.device("cpu"), alignment).operations():
        operation.run()
        operation.check()


def table(rows: list[dict[str, Any]]) -> str:
    """Time by ep_size, its spread, and the share of the ceiling."""
    sizes = sorted({row["ep_size"] for row in rows})
    lines = [
        "operation          tokens  "
        + "".join(f"{f'ep {size}':>9}" for size in sizes)
        + "   spread  of copy  of mix  b2b us"
    ]
    for tokens in sorted({row["tokens"] for row in rows}):
        for name in dict.fromkeys(row["operation"] for row in rows):
            found = {row["ep_size"]: row for row in rows if (row["operation"], row["tokens"]) == (name, tokens)}
            if not found:
                continue
            times = [found[size]["us"] for size in sizes if size in found]
            share = statistics.median(row["of_copy"] for row in found.values())
            of_mix = statistics.median(row["of_mix"] for row in found.values())
            warm = statistics.median(row["back_to_back_us"] for row in found.values())
            lines.append(
                f"{name:<18} {tokens:>6}  "
                + "".join(f"{found[size]['us']:>9.2f}" for size in sizes)
                + f"  {(max(times) / min(times) - 1) * 100:>6.1f}%  {share * 100:>6.1f}% {of_mix * 100:>6.1f}%"
                + f" {warm:>7.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Prints a table, and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep_sizes", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[12, 128, 2048])
    parser.add_argument("--alignment", type=int, default=1)
    parser.add_argument("--commit", help="of putget, where it is no checkout")
    parser.add_argument("--output_file", type=Path)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: checks the results, times nothing"
    )
    args = parser.parse_args()
    if args.device == "cpu":
        for tokens in args.tokens:
            for ep_size in args.ep_sizes:
                check_on_cpu(ep_size, tokens, args.alignment)
        print("correct")
        return
    clock = Clock()
    ceilings: dict[Any, float] = {}
    large = 1 << 30
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        **environment.describe(args.commit),
        "command": shlex.join(["python", *sys.argv]),
        "sizes": {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K, "alignment": args.alignment},
        "copy_gb_per_s": large / clock.microseconds(copy_of(large)) / 1e3,
        "results": rows,
    }
    for tokens in args.tokens:
        for ep_size in args.ep_sizes:
            rows += measure(ep_size, tokens, args.alignment, clock, ceilings)
            torch.cuda.empty_cache()
            if args.output_file:  # after each: a run that is ended keeps what it has
                args.output_file.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))
    print(f"device copy of 1 GiB moved: {document['copy_gb_per_s']:.0f} GB/s")


if __name__ == "__main__":
    if "cpu" not in sys.argv:
        import moe_kernels_naive as naive
    main()
