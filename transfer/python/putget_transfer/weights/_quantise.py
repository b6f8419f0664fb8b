"""FP8 in blocks of 128 x 128, as DeepSeek-V3's checkpoints have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from putget_transfer.weights import _kernel

BLOCK = 128
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
PIECE = 1 << 20
"""Elements that are rounded at a time without the kernel, in whole blocks."""
SCRATCH = 16
"""Bytes of temporary memory that each of them takes at most."""


def _rounded_up(scales: Any) -> Any:
    """Return the least powers of two that are not below the scales, which are positive, within those of UE8M0."""
    import torch

    mantissa, exponent = torch.frexp(scales)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    return torch.ldexp(torch.ones_like(scales), exponent)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def grid(shape: Sequence[int]) -> list[int]:
    """Return the shape of the scales of a tensor's blocks."""
    return [*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:])]


def scratch_bytes(shape: Sequence[int]) -> int:
    """Return the most temporary memory that rounding takes without the kernel."""
    elements = _padded(shape[-2]) * _padded(shape[-1])
    for size in shape[:-2]:
        elements *= size
    return SCRATCH * min(elements, PIECE)


def _pieces(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Cut a tensor into pieces of whole blocks and at most `PIECE` elements."""
    rows, columns = shape[-2:]
    if len(shape) == 2:
        wide = min(_padded(columns), PIECE // BLOCK // BLOCK * BLOCK)
        high = max(PIECE // max(wide, 1) // BLOCK, 1) * BLOCK
        for row in range(0, rows, high):
            for column in range(0, columns, wide):
                yield slice(row, min(row + high, rows)), slice(column, min(column + wide, columns))
        return
    inner = _padded(rows) * _padded(columns)
    for size in shape[1:-2]:
        inner *= size
    step = max(PIECE // max(inner, 1), 1)
    for first in range(0, shape[0], step):
        for rest in _pieces(shape[1:]):
            yield slice(first, min(first + step, shape[0])), *rest


def _rounded(tensor: Any, *, powers_of_two: bool) -> tuple[Any, Any]:
    """Return FP8 values as bytes, and the scales of their blocks as float32."""
    import torch

    rows, columns = tensor.shape[-2:]
    # Halves are exact as float32, and a GPU is bound by the bytes that each step reads and writes.
    source = tensor if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.float()
    if rows % BLOCK or columns % BLOCK:
        source = torch.nn.functional.pad(source, (0, -columns % BLOCK, 0, -rows % BLOCK))
    *outer, high, wide = source.shape
    tiles = source.reshape(*outer, high // BLOCK, BLOCK, wide // BLOCK, BLOCK)
    largest = tiles.abs().nan_to_num_(0.0, 0.0, 0.0).amax((-3, -1)).float()
    # By a tensor: a GPU multiplies by the rounded inverse of a number.
    quotient = largest / torch.full_like(largest, LARGEST)
    scales = torch.where(largest > 0, quotient, torch.ones_like(largest))
    # The quotient of the smallest numbers is 0 or imprecise; the least normal number scales them as well.
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    if powers_of_two:
        scales = _rounded_up(scales)
    scaled = (tiles / scales[..., :, None, :, None]).clamp_(-LARGEST, LARGEST)
    values = scaled.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]
    found = values.to(torch.float8_e4m3fn).view(torch.uint8)
    # The sign of a NaN depends on the device that converts it.
    return found.masked_fill_(found == 0xFF, 0x7F), scales


def _store(to: Any, scales: Any) -> None:
    """Store float32 scales, or the exponents of powers of two."""
    import torch

    if to.dtype == torch.float32:
        to.copy_(scales)
    else:
        to.view(torch.uint8).copy_(torch.frexp(scales)[1] - 1 + 127)


def blocks_into(
    tensor: Any, values: Any, window: tuple[int, int, int, int], scales: Any, *, powers_of_two: bool
) -> None:
    """Round a tensor's blocks into memory, in one pass of a kernel where a GPU has it.

    Args:
        tensor: (..., rows, columns); it begins at the beginning of a block.
        values: FP8 values of the window, contiguous; None: they are not wanted.
        window: First row, first column, rows and columns that have values.
        scales: Scales of all blocks, contiguous, float32 or float8_e8m0fnu; None: they are not wanted.
        powers_of_two: Scales are powers of two.
    """
    import torch

    tensor = tensor.detach()
    there = all(memory is None or memory.device == tensor.device for memory in (values, scales))
    if there and _kernel.takes(tensor):
        found = _kernel.matrices(tensor)
        if found is not None:
            _kernel.launch(found, values, window, scales, powers_of_two=powers_of_two)
            return
        # Without the kernel it would take memory that nobody has counted.
        for number, part in enumerate(tensor):
            own = (None if memory is None else memory[number] for memory in (values, scales))
            blocks_into(part, next(own), window, next(own), powers_of_two=powers_of_two)
        return
    flat = None if values is None else values.view(torch.uint8)
    for piece in _pieces(tensor.shape):
        made, own = _rounded(tensor[piece], powers_of_two=powers_of_two)
        if scales is not None:
            own_blocks = (slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in piece[-2:])
            at = (*piece[:-2], *own_blocks)
            _store(scales[at], own)
        if flat is not None:
            inside, to = [], []
            for edge, first, count in zip(piece[-2:], window[:2], window[2:], strict=True):
                low = max(edge.start, first)
                high = max(min(edge.stop, first + count), low)
                inside.append(slice(low - edge.start, high - edge.start))
                to.append(slice(low - first, high - first))
            at = (*piece[:-2], *to)
            own_window = (..., *inside)
            flat[at].copy_(made[own_window])


def quantise(tensor: Any, *, scale: str = "float32") -> tuple[Any, Any]:
    """Round to FP8 (float8_e4m3fn) with a scale for each block of 128 x 128 of the last two dimensions.

    The scale is the block's largest finite magnitude over 448, in float32; with "ue8m0" the next power of two. The
    value is the element over the scale, rounded to the nearest, ties to even. CPU and GPU give the same bytes. On a GPU
    one kernel makes them of BF16 and float32.

    | input | what comes |
    | --- | --- |
    | NaN | NaN (0x7F); its block's scale comes from the other elements |
    | infinite | 448 or -448, times the scale of the block's finite elements |
    | a block of zeros | zeros, scale 1 |
    | sizes that are no multiple of 128 | the last blocks are smaller |
    | magnitudes below 448 * 2**-126 | the scale is 2**-126 |

    Args:
        tensor: Floats, of at least two dimensions.
        scale: "float32", or "ue8m0": powers of two, stored as float8_e8m0fnu.

    Returns:
        Values of the same shape, and scales of the grid of blocks: times their scales, values are about the input.

    Raises:
        ValueError: Another scale, another type, or too few dimensions.
    """
    import torch

    if scale not in ("float32", "ue8m0"):
        raise ValueError(f"scale: {scale!r} came; 'float32' and 'ue8m0' are allowed")
    if tensor.dim() < 2 or not tensor.is_floating_point():
        shape = tuple(tensor.shape)
        raise ValueError(f"tensor: {tensor.dtype} {shape} came; floats of at least 2 dimensions are needed")
    values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn, device=tensor.device)
    stored = torch.float32 if scale == "float32" else torch.float8_e8m0fnu
    scales = torch.empty(grid(tensor.shape), dtype=stored, device=tensor.device)
    blocks_into(tensor, values, (0, 0, *tensor.shape[-2:]), scales, powers_of_two=scale == "ue8m0")
    return values, scales
