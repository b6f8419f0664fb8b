"""Grouped FP8 products on one GPU: Triton's with every kind of tiles, the library's, and torch._grouped_mm in BF16.

    python benchmarks/grouped_fp8.py

Rows fall on experts at random. Results are checked before they are timed. The weights are larger than the L2 cache, so
each run reads them from memory: GB/s counts the weights of experts that have rows. Medians over graphs of some runs.
putget.moe.grouped_fp8_triton takes its choice of tiles from this table, putget.moe.networks the rows that it is for
from the last one: both products and the activation apart, and in one kernel, over rows by expert and as they arrived.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from putget.moe import grouped_fp8, grouped_fp8_triton, networks
from putget.moe.expert_rows import ExpertRows
from putget.moe.grouped_fp8_triton import Tiles
from putget.moe.kernels import gated_activation
from putget_bench.timing import capture

SHAPES = ((4096, 7168), (7168, 2048))  # (n, k) of the two products of DeepSeek-V3's experts
_FLOOR_BYTES_A_US = 4.3e6  # at which large products read their weights
TILES = (
    Tiles(16, True, 5, 4, 64),
    Tiles(16, True, 5, 2),
    Tiles(32, True, 5, 2),
    Tiles(64, True, 4, 2),
    Tiles(64, False, 4, 2),
    Tiles(128, False, 3, 2),
)
_RUNS_IN_A_GRAPH = 5
_TOLERANCE = 2.0**-8  # rounded to BF16 once


def main() -> None:
    """Prints a row for every shape and number of rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_experts", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    given = parser.parse_args()
    names = [_name(tiles) for tiles in TILES]
    print("| n | k | rows | chosen | " + " | ".join(names) + " | library | GB/s | TFLOPS | BF16 |")
    print("|---" * (len(TILES) + 8) + "|")
    for n, k in SHAPES:
        weights, scales = _weights(given.num_experts, n, k)
        dense = weights.to(torch.bfloat16).transpose(1, 2)
        for count in given.rows:
            _row(n, k, count, weights, scales, dense)
        del dense
        if (n, k) == SHAPES[0]:
            first = [_first_row(count, weights, scales) for count in given.rows]
    print("\nThe first product of a layer, us: the product and its activation, apart and in one.\n")
    print("| rows | product | activation | gated |")
    print("|---" * 4 + "|")
    for cells in first:
        print("| " + " | ".join(cells) + " |", flush=True)
    del weights, scales
    print("\nBoth products and the activation of DeepSeek-V3's experts, us; the floor is that of their weights.\n")
    print("| rows | apart | in one | in one, as they arrived | floor |")
    print("|---" * 5 + "|")
    (n, k), (hidden, intermediate) = SHAPES
    both = (*_weights(given.num_experts, n, k), *_weights(given.num_experts, hidden, intermediate))
    for count in given.rows:
        print("| " + " | ".join(_network_row(count, both)) + " |", flush=True)


def _name(tiles: Tiles) -> str:
    return f"{'transposed ' if tiles.weights_first else ''}{tiles.rows} x {tiles.columns}"


def _row(n: int, k: int, count: int, weights: Tensor, scales: Tensor, dense: Tensor) -> None:
    num_experts = len(weights)
    expert = torch.randint(num_experts, (count,), device="cuda")
    counts = torch.bincount(expert, minlength=num_experts).to(torch.int32)
    starts = (counts.cumsum(0) - counts).to(torch.int32)
    x = torch.randn(count, k, device="cuda").bfloat16()
    rows, row_scales = grouped_fp8.quantise_rows(x)
    out = torch.empty(count, n, dtype=torch.bfloat16, device="cuda")
    sorted_expert = expert.sort().values

    given = ExpertRows(rows, row_scales, starts, counts)

    def run(tiles: Tiles) -> Callable[[], None]:
        return lambda: grouped_fp8_triton.launch(given, weights, scales, out, tiles, num_sms=None)

    times = []
    ways: dict[str, Callable[[], None]] = {str(tiles): run(tiles) for tiles in TILES}
    ways["library"] = lambda: grouped_fp8._native_product(
        given, weights, scales, out, None, "silu", -(-count // num_experts), None
    )
    for name, way in ways.items():
        out.fill_(float("nan"))
        way()
        for row in range(0, count, max(1, count // 8)):
            index = int(sorted_expert[row])
            want = grouped_fp8.dequantise_blocks(weights[index], scales[index]) @ grouped_fp8.dequantise_rows(
                rows[row], row_scales[row]
            )
            error = float((out[row].float() - want).norm() / want.norm())
            if not error <= _TOLERANCE:
                raise SystemExit(f"{name}: row {row} is wrong by {error}")
        times.append(_microseconds(way))
    ends = counts.cumsum(0).to(torch.int32)
    bf16 = _microseconds(lambda: torch._grouped_mm(x, dense, offs=ends))
    best = min(times)
    chosen = grouped_fp8_triton.tiles_for(-(-count // num_experts))
    used = int((counts > 0).sum())
    cells = [str(value) for value in (n, k, count)]
    cells += [_name(chosen), *(f"{time:.1f}" for time in times)]
    cells += [f"{used * n * k / best / 1e3:.0f}", f"{2 * count * n * k / best / 1e6:.0f}", f"{bf16:.1f}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def _first_row(count: int, weights: Tensor, scales: Tensor) -> list[str]:
    """Cells: the first product and its activation, apart and in one kernel. Checked."""
    num_experts, _, k = weights.shape
    counts = torch.bincount(torch.randint(num_experts, (count,), device="cuda"), minlength=num_experts).to(torch.int32)
    starts = (counts.cumsum(0) - counts).to(torch.int32)
    rows = ExpertRows(*grouped_fp8.quantise_rows(torch.randn(count, k, device="cuda").bfloat16()), starts, counts)
    each = -(-count // num_experts)

    def product() -> Tensor:
        return grouped_fp8.grouped_fp8_mm(rows, weights, scales, expected_rows=each)

    def gated() -> tuple[Tensor, Tensor]:
        return grouped_fp8.gated_fp8_mm(rows, weights, scales, "silu", expected_rows=each)

    between = product()

    def activation() -> tuple[Tensor, Tensor]:
        return gated_activation(between, num_valid=(starts, counts), quantise="fp8_block")

    for got, want in zip(gated(), activation(), strict=True):
        if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
            raise SystemExit(f"{count} rows: the gated product is not the product and its activation")
    return [str(count), *(f"{_microseconds(way):.1f}" for way in (product, activation, gated))]


def _network_row(count: int, weights: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[str]:
    """Cells: both products and the activation in three kernels and in one. Checked: they have the same bits."""
    gate_up, gate_up_scales, down, down_scales = weights
    num_experts, hidden, _ = down.shape
    counts = torch.bincount(torch.randint(num_experts, (count,), device="cuda"), minlength=num_experts).to(torch.int32)
    starts = (counts.cumsum(0) - counts).to(torch.int32)
    source_rows = torch.randperm(2 * count, device="cuda")[:count].to(torch.int32)
    codes, scales = grouped_fp8.quantise_rows(torch.randn(2 * count, hidden, device="cuda").bfloat16())
    by_expert = codes.view(torch.uint8)[source_rows.long()].view(codes.dtype)
    ordered = ExpertRows(by_expert, scales[source_rows.long()], starts, counts)
    arrived = ExpertRows(codes, scales, starts, counts)
    progress = torch.zeros(2 + num_experts + count // 16, dtype=torch.int32, device="cuda")
    each = -(-count // num_experts)

    def apart() -> Tensor:
        between = grouped_fp8.gated_fp8_mm(ordered, gate_up, gate_up_scales, "silu", expected_rows=each)
        active = ExpertRows(*between, starts, counts)
        return grouped_fp8.grouped_fp8_mm(active, down, down_scales, expected_rows=each)

    def in_one() -> Tensor:
        return networks.run(ordered, None, weights, "silu", progress)

    def scattered() -> Tensor:
        return networks.run(arrived, source_rows, weights, "silu", progress)

    want = apart().view(torch.int16)
    for name, way in (("in one", in_one), ("in one, as they arrived", scattered)):
        if not torch.equal(way().view(torch.int16), want):
            raise SystemExit(f"{count} rows: {name} has other bits than apart")
    floor = int((counts > 0).sum()) * 3 * hidden * down.shape[2] / _FLOOR_BYTES_A_US
    return [str(count), *(f"{_microseconds(way):.1f}" for way in (apart, in_one, scattered)), f"{floor:.1f}"]


def _weights(num_experts: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    weights = torch.empty(num_experts, n, k, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty(num_experts, n // grouped_fp8.GROUP, k // grouped_fp8.GROUP, device="cuda")
    for index in range(num_experts):
        codes, scales[index] = grouped_fp8.quantise_blocks(torch.randn(n, k, device="cuda"))
        weights[index].copy_(codes)
    return weights, scales


def _microseconds(run: Callable[[], object]) -> float:
    run()
    replay = capture(lambda: [run() for _ in range(_RUNS_IN_A_GRAPH)])
    taken = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / _RUNS_IN_A_GRAPH)
    return sorted(taken)[len(taken) // 2]


if __name__ == "__main__":
    main()
