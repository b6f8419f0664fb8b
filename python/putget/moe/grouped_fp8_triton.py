"""Triton kernels of experts, block-scaled FP8 and BF16: ``putget.moe.grouped_fp8`` imports this at the first use."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from putget.moe.expert_rows import ExpertRows

_GROUP = 128
_BLOCK_BYTES = 128  # of a row, along k
_LARGEST = 448.0  # of E4M3
_SMALLEST = 1e-12
_GROUPS_EACH = 8  # groups of 128 values that one program quantises at a time
_PROGRAMS_PER_SM = 16  # of four warps, which fill it


class Tiles(NamedTuple):
    """How the product is cut.

    Attributes:
        rows: Of a tile.
        weights_first: Tiles are computed transposed: few rows fill the narrow side of the tensor cores.
        stages: Blocks of 128 along k that are on the way into shared memory.
        programs_per_sm: What shared memory and registers allow.
        columns: Of a tile: rows of the weights. It divides 128.
    """

    rows: int
    weights_first: bool
    stages: int
    programs_per_sm: int
    columns: int = 128


_WARPS = 4
# By the rows that an expert is expected to have, from the timings of benchmarks/grouped_fp8.py.
_BY_ROWS = ((4, Tiles(16, True, 5, 4, 64)), (8, Tiles(16, True, 5, 2)), (24, Tiles(32, True, 5, 2)))
_MANY_ROWS = Tiles(64, False, 4, 2)
_BF16_BY_ROWS = ((4, Tiles(16, True, 5, 4, 64)), (8, Tiles(16, True, 5, 2)), (24, Tiles(32, True, 3, 3)))
_BF16_MANY_ROWS = Tiles(64, False, 3, 3)


def tiles_for(expected_rows: int, scaled: bool = True) -> Tiles:
    """The tiles for experts of about so many rows; of bfloat16 where they have no scales."""
    by_rows, many = (_BY_ROWS, _MANY_ROWS) if scaled else (_BF16_BY_ROWS, _BF16_MANY_ROWS)
    return next((tiles for most, tiles in by_rows if expected_rows <= most), many)


@triton.jit
def grouped_kernel(
    rows,
    row_scales,
    weights,
    weight_scales,
    out,
    starts,
    counts,
    num_experts,
    n_size,
    k_size,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Persistent: each program takes every num_programs-th tile of the valid rows, whose number ``counts`` has.

    Grid: the programs that are resident together. Synchronisation: none. Shared memory: num_stages tiles of rows and of
    weights.

    Parameters: rows, a descriptor of [capacity, k] e4m3 with boxes [BLOCK_M, BLOCK_K]; row_scales [capacity, k / 128]
    float32; weights, a descriptor of [num_experts * n, k] e4m3 with boxes [BLOCK_N, BLOCK_K]; weight_scales
    [num_experts, n / 128, k / 128] float32; out [capacity, n] bfloat16; starts and counts [num_experts] int32; EXPERTS,
    a power of two from num_experts on; BLOCK_N divides 128, so that a tile has one weight scale for each block of k;
    BLOCK_K 128. Without SCALED rows and weights are bfloat16, scales are not read, and BLOCK_K is 64.
    """
    expert_range = tl.arange(0, EXPERTS)
    tiles_m = tl.cdiv(tl.load(counts + expert_range, mask=expert_range < num_experts, other=0), BLOCK_M)
    tiles_n = n_size // BLOCK_N
    ends = tl.cumsum(tiles_m, 0) * tiles_n
    num_tiles = tl.sum(tiles_m, 0) * tiles_n
    k_blocks = k_size // BLOCK_K
    m_range = tl.arange(0, BLOCK_M)
    n_range = tl.arange(0, BLOCK_N)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # Tiles of one expert follow each other, and of those the ones that read the same weights.
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        own_tiles_m = tl.sum(tl.where(expert_range == expert, tiles_m, 0), 0)
        tile_in_expert = tile - tl.sum(tl.where(expert_range < expert, tiles_m, 0), 0) * tiles_n
        tile_m = tile_in_expert % own_tiles_m
        tile_n = tile_in_expert // own_tiles_m
        first_row = tl.load(starts + expert) + tile_m * BLOCK_M
        rows_left = tl.load(counts + expert) - tile_m * BLOCK_M
        # A tile may hold rows of the next expert, or none at all, past its own: they are multiplied and never stored.
        row = (first_row + tl.minimum(m_range, rows_left - 1)).to(tl.int64)
        column = tile_n * BLOCK_N + n_range
        first_weight = expert * n_size + tile_n * BLOCK_N
        if SCALED:
            row_scale_at = row_scales + row * k_blocks
            weight_scale_at = weight_scales + (first_weight // BLOCK_K).to(tl.int64) * k_blocks
        if WEIGHTS_FIRST:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for block in range(k_blocks):
            left = rows.load([first_row, block * BLOCK_K])
            right = weights.load([first_weight, block * BLOCK_K])
            if SCALED:
                scale = tl.load(row_scale_at + block) * tl.load(weight_scale_at + block)
                if WEIGHTS_FIRST:
                    total += tl.dot(right, tl.trans(left)) * scale[None, :]
                else:
                    total += tl.dot(left, tl.trans(right)) * scale[:, None]
            elif WEIGHTS_FIRST:
                total = tl.dot(right, tl.trans(left), total)
            else:
                total = tl.dot(left, tl.trans(right), total)
        if WEIGHTS_FIRST:
            out_at = out + row[None, :] * n_size + column[:, None]
            tl.store(out_at, total.to(tl.bfloat16), mask=(m_range < rows_left)[None, :])
        else:
            out_at = out + row[:, None] * n_size + column[None, :]
            tl.store(out_at, total.to(tl.bfloat16), mask=(m_range < rows_left)[:, None])


# One compilation for all batch sizes: none is left for a size that comes while a peer waits.
@triton.jit(do_not_specialize=["num_groups", "num_rows", "groups_each_row"])
def quantise_kernel(
    x,
    out,
    scales,
    num_groups,
    num_rows,
    groups_each_row,
    HAS_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Each program quantises GROUPS groups, then those num_programs further. No shared memory, no synchronisation.

    Grid: any; ceil(num_groups / GROUPS) where all rows count, else what the GPU holds. Parameters: x, float rows as
    [num_groups, WIDTH]; out, the same of e4m3; scales [num_groups] float32; num_rows, with HAS_ROWS one int32: rows
    before it count, each of groups_each_row groups. Divisions are rounded as on the CPU, so both give the same bytes.
    """
    count = num_groups.to(tl.int64)
    if HAS_ROWS:
        count = tl.minimum(count, tl.load(num_rows).to(tl.int64) * groups_each_row)
    for first in range(tl.program_id(0).to(tl.int64) * GROUPS, count, tl.num_programs(0).to(tl.int64) * GROUPS):
        group = first + tl.arange(0, GROUPS)
        inside = group < count
        at = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        values = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), axis=1), SMALLEST), tl.full((GROUPS,), LARGEST, tl.float32))
        scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], (GROUPS, WIDTH)))
        tl.store(out + at, tl.clamp(scaled, -LARGEST, LARGEST).to(tl.float8e4nv), mask=inside[:, None])
        tl.store(scales + group, scale, mask=inside)


def grouped_mm(
    rows: ExpertRows,
    weights: Tensor,
    weight_scales: Tensor | None,
    out: Tensor,
    expected_rows: int,
    num_sms: int | None,
) -> None:
    """See ``putget.moe.grouped_fp8.grouped_fp8_mm``; writes into out. At least one row and one expert.

    Without scales rows and weights are bfloat16, k is a multiple of 64 and n one of 128.
    """
    launch(rows, weights, weight_scales, out, tiles_for(expected_rows, weight_scales is not None), num_sms)


def launch(
    rows: ExpertRows, weights: Tensor, weight_scales: Tensor | None, out: Tensor, tiles: Tiles, num_sms: int | None
) -> None:
    """The same, cut as the caller says; of bfloat16 rows and weights where there are no scales."""
    num_experts, n, k = weights.shape
    scaled = rows.scales is not None and weight_scales is not None
    block = _BLOCK_BYTES // weights.element_size()
    kernel: Any = grouped_kernel
    kernel[(_programs(out.device, num_sms) * tiles.programs_per_sm,)](
        TensorDescriptor.from_tensor(rows.codes, [tiles.rows, block]),
        rows.scales if scaled else out,
        TensorDescriptor.from_tensor(weights.view(num_experts * n, k), [tiles.columns, block]),
        weight_scales if scaled else out,
        out,
        rows.starts,
        rows.counts,
        num_experts,
        n,
        k,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=block,
        WEIGHTS_FIRST=tiles.weights_first,
        SCALED=scaled,
        num_warps=_WARPS,
        num_stages=tiles.stages,
    )


def quantise_rows(x: Tensor, out: Tensor, scales: Tensor, num_rows: Tensor | None) -> None:
    """See ``putget.moe.grouped_fp8.quantise_rows``; writes into out and scales."""
    num_groups = scales.numel()
    if not num_groups:
        return
    programs = triton.cdiv(num_groups, _GROUPS_EACH)
    if num_rows is not None:
        programs = min(programs, _programs(x.device, None) * _PROGRAMS_PER_SM)
    kernel: Any = quantise_kernel
    kernel[(programs,)](
        x,
        out,
        scales,
        num_groups,
        x if num_rows is None else num_rows,
        scales.shape[1],
        HAS_ROWS=num_rows is not None,
        GROUPS=_GROUPS_EACH,
        WIDTH=_GROUP,
        LARGEST=_LARGEST,
        SMALLEST=_SMALLEST,
    )


def _programs(device: torch.device, num_sms: int | None) -> int:
    """The SMs that may be used; one where kernels are interpreted, without a GPU."""
    if device.type != "cuda":
        return 1
    present: int = torch.cuda.get_device_properties(device).multi_processor_count
    return present if num_sms is None else min(present, num_sms)
