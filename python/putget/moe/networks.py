"""Both products of experts over few rows of block-scaled FP8, and the activation between them, in one kernel.

With few rows a layer takes as long as its weights take to read. A kernel for each product begins and ends without
reading; one for both reads the second's weights while the first ends.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from putget import _abi, _abi_moe
from putget._arguments import check_tensor
from putget.memory.workspace import current_stream
from putget.moe import grouped_fp8
from putget.moe.expert_rows import ExpertRows
from putget.moe.kernels import GATES, Gate

MOST_EXPERTS = 256  # of a rank
FEWEST_UNITS = 112  # of the first product, 128 columns of one expert each: with fewer, too many SMs have none
MOST_ROWS = 136  # of an expert on average: most have one tile then (benchmarks/grouped_fp8.py)
_MOST_ROWS_OF_TWO = 255  # likewise: most have two
_FILLING_TWO = 176  # likewise: both are well filled. With fewer rows these are experts enough for the SMs not to idle:
_MANY_EXPERTS = 16
MOST_SCATTERED = 16  # of an expert: more rows are faster copied into order first
_TILE_ROWS = 16  # no tile is made for fewer


def takes(down: Tensor, expected_rows: int) -> bool:
    """Whether the kernel takes experts of these sizes, and is the fastest way.

    Args:
        down: [num_experts, hidden_size, intermediate_size] float8_e4m3fn.
        expected_rows: Rows of an expert on average.
    """
    num_experts, hidden_size, intermediate_size = down.shape
    fills_two = num_experts >= _MANY_EXPERTS or expected_rows >= _FILLING_TWO
    return (
        num_experts <= MOST_EXPERTS
        and num_experts * intermediate_size // grouped_fp8.GROUP >= FEWEST_UNITS
        and (expected_rows <= MOST_ROWS or (fills_two and expected_rows <= _MOST_ROWS_OF_TWO))
        and num_experts * max(hidden_size, 2 * intermediate_size) < 1 << 31
        and grouped_fp8.is_native(down.device)
    )


def _check(
    rows: ExpertRows,
    source_rows: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    gate: str,
    progress: Tensor,
    capacity: int,
) -> None:
    """Raises ValueError where an argument of ``run`` is wrong."""
    gate_up, gate_up_scales, down, down_scales = weights
    num_experts, hidden, intermediate = down.shape
    if gate not in GATES:
        raise ValueError(f"gate is {gate!r}, allowed are {' and '.join(map(repr, GATES))}")
    grouped_fp8.check_multiple("intermediate_size", intermediate)
    check_tensor("gate_up", gate_up, (num_experts, 2 * intermediate, hidden), (torch.float8_e4m3fn,), down.device)
    grouped_fp8.check_rows(rows, gate_up, gate_up_scales)
    blocks = (num_experts, hidden // grouped_fp8.GROUP, intermediate // grouped_fp8.GROUP)
    check_tensor("down", down, (num_experts, hidden, intermediate), (torch.float8_e4m3fn,), down.device)
    check_tensor("down_scales", down_scales, blocks, (torch.float32,), down.device)
    if source_rows is not None:
        check_tensor("source_rows", source_rows, (capacity,), (torch.int32,), down.device)
    words = 2 + num_experts + capacity // _TILE_ROWS
    if progress.numel() < words:
        raise ValueError(f"progress has {progress.numel()} words, expected {words} or more")
    check_tensor("progress", progress, (progress.numel(),), (torch.int32,), down.device)


def run(
    rows: ExpertRows,
    source_rows: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    gate: Gate,
    progress: Tensor,
    num_sms: int | None = None,
) -> Tensor:
    """Each expert's network over its rows: [capacity, hidden_size] bfloat16; rows of no expert are undefined.

    Args:
        rows: With source_rows as they arrived, [num_rows, hidden_size]; else by expert, [capacity, hidden_size].
        source_rows: [capacity] int32: which of `rows` an expert's row is; or None.
        weights: gate_up, its scales, down and its scales, as ``putget.moe.experts.Fp8Experts`` has them.
        gate: "silu" or "gelu".
        progress: See ``putget.ExpertMajor``.
        num_sms: Most SMs that are used; None: all.

    Raises:
        ValueError: An argument has another shape, dtype, device or layout; nothing has happened.
    """
    gate_up, gate_up_scales, down, down_scales = weights
    num_experts, hidden, intermediate = down.shape
    device = down.device
    capacity = rows.capacity if source_rows is None else len(source_rows)
    _check(rows, source_rows, weights, gate, progress, capacity)
    out = torch.empty((capacity, hidden), dtype=torch.bfloat16, device=device)
    between = torch.empty((capacity, intermediate), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((capacity, intermediate // grouped_fp8.GROUP), device=device)
    assert rows.scales is not None  # they are checked
    args = _abi_moe.MoeNetworksArgs(
        device=_abi.DEVICE_CUDA,
        ordinal=device.index or 0,
        rows=rows.codes.data_ptr(),
        row_scales=rows.scales.data_ptr(),
        source_rows=None if source_rows is None else source_rows.data_ptr(),
        gate_up=gate_up.data_ptr(),
        gate_up_scales=gate_up_scales.data_ptr(),
        down=down.data_ptr(),
        down_scales=down_scales.data_ptr(),
        between=between.data_ptr(),
        between_scales=scales.data_ptr(),
        out=out.data_ptr(),
        starts=rows.starts.data_ptr(),
        counts=rows.counts.data_ptr(),
        progress=progress.data_ptr(),
        num_experts=num_experts,
        num_rows=len(rows.codes),
        capacity=capacity,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_sms=num_sms or 0,
        gate=GATES[gate],
        stream=current_stream(device),
    )
    _abi.call("putget_moe_networks", ctypes.byref(args))
    return out
