"""FP8 in blocks of 128 x 128, as DeepSeek-V3's checkpoints have it."""

from __future__ import annotations

from typing import Any

BLOCK = 128
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


def _rounded_up(scales: Any) -> Any:
    """Return the least powers of two that are not below the scales, which are positive, within those of UE8M0."""
    import torch

    mantissa, exponent = torch.frexp(scales)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    return torch.ldexp(torch.ones_like(scales), exponent)


def _stored(scales: Any, scale: str) -> Any:
    """Return scales as they are stored."""
    import torch

    if scale == "float32":
        return scales
    exponent = torch.frexp(scales)[1] - 1 + 127
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def blocks(tensor: Any, scale: str = "float32") -> tuple[Any, Any]:
    """Return FP8 values and the scales of their blocks, both as float32 would have them: see `quantise`."""
    import torch

    if scale not in ("float32", "ue8m0"):
        raise ValueError(f"scale: {scale!r} came; 'float32' and 'ue8m0' are allowed")
    if tensor.dim() < 2 or not tensor.is_floating_point():
        shape = tuple(tensor.shape)
        raise ValueError(f"tensor: {tensor.dtype} {shape} came; floats of at least 2 dimensions are needed")
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
    if scale == "ue8m0":
        scales = _rounded_up(scales)
    scaled = (tiles / scales[..., :, None, :, None]).clamp_(-LARGEST, LARGEST)
    values = scaled.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]
    found = values.to(torch.float8_e4m3fn).view(torch.uint8)
    # The sign of a NaN depends on the device that converts it.
    found.masked_fill_(found == 0xFF, 0x7F)
    return found.view(torch.float8_e4m3fn), scales


def quantise(tensor: Any, *, scale: str = "float32") -> tuple[Any, Any]:
    """Round to FP8 (float8_e4m3fn) with a scale for each block of 128 x 128 of the last two dimensions.

    The scale is the block's largest finite magnitude over 448, in float32; with "ue8m0" the next power of two. The
    value is the element over the scale, rounded to the nearest, ties to even. CPU and GPU give the same bytes.

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
    values, scales = blocks(tensor, scale)
    return values, _stored(scales, scale)
