"""Kernels that moe_kernels.py compares with (Triton).

One block for each slot, which ends at once where the slot is empty; and memory traffic with another mix of reads and
writes than a copy has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _expand_slot(source, scales, source_rows, count, out, out_scales, words: tl.constexpr, scale_words: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    if slot < tl.load(count):
        row = tl.load(source_rows + slot).to(tl.int64)
        at = tl.arange(0, triton.next_power_of_2(words))
        tl.store(out + slot * words + at, tl.load(source + row * words + at, mask=at < words), mask=at < words)
        at = tl.arange(0, triton.next_power_of_2(scale_words))
        value = tl.load(scales + row * scale_words + at, mask=at < scale_words)
        tl.store(out_scales + slot * scale_words + at, value, mask=at < scale_words)


@triton.jit
def _activate_slot(x, count, out, n: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    if slot < tl.load(count):
        at = tl.arange(0, n)
        gate = tl.load(x + slot * 2 * n + at).to(tl.float32)
        up = tl.load(x + slot * 2 * n + n + at).to(tl.float32)
        tl.store(out + slot * n + at, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16))


@triton.jit
def _mix(source, target, words, reads: tl.constexpr, writes: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(source + at, mask=at < words)
    for stream in tl.static_range(1, reads):
        value += tl.load(source + stream * words + at, mask=at < words)
    for stream in tl.static_range(writes):
        tl.store(target + stream * words + at, value, mask=at < words)


# Words that the number of words of a stream is a multiple of: 16-byte accesses have aligned addresses in all of them.
MIX_WORDS = 64


def mix(source: torch.Tensor, target: torch.Tensor, block: int) -> None:
    """Reads all of source [reads, words] and writes all of target [writes, words], int32, all streams side by side."""
    words = source.shape[1]
    assert words % MIX_WORDS == 0
    _mix[(triton.cdiv(words, block),)](source, target, words, source.shape[0], target.shape[0], block, num_warps=8)


def expand(sources: list[torch.Tensor], index: torch.Tensor, count: torch.Tensor, outs: list[torch.Tensor]) -> None:
    """As putget.moe.expand, of bytes and their float32 scales."""
    rows, scales = sources[0].view(torch.int32), sources[1]
    _expand_slot[(len(index),)](
        rows, scales, index, count, outs[0].view(torch.int32), outs[1], rows.shape[1], scales.shape[1], num_warps=8
    )


def activation(x: torch.Tensor, count: torch.Tensor, out: torch.Tensor) -> None:
    """As putget.moe.gated_activation with silu, of bfloat16 rows whose width is a power of two."""
    _activate_slot[(x.shape[0],)](x, count, out, out.shape[1], num_warps=8)
