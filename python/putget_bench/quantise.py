"""The quantisation recipes that the bench feeds to dispatch, and their inverse. putget itself carries opaque bytes."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

from putget_bench.profiles import FP8_GROUP, NVFP4_GROUP

_E4M3_MAX = 448.0
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX = _E2M1_VALUES[-1]
_SMALLEST_SCALE = 2.0**-9  # the smallest positive e4m3 value: a group of zeros must not divide by zero


def quantise(quant: str, rows: Tensor, row_dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Turns float rows into the payloads of a recipe.

    Args:
        quant: a recipe of `profiles.payloads`.
        rows: [num_tokens, hidden_size] float32.
        row_dtype: element type of unquantised rows.

    Returns:
        One tensor [num_tokens, *shape] per payload.
    """
    if quant == "fp8":
        return _to_fp8(rows)
    if quant == "nvfp4":
        return _to_nvfp4(rows)
    return (rows.to(row_dtype),)


def dequantise(quant: str, carried: tuple[Tensor, ...], hidden_size: int) -> Tensor:
    """The float32 rows [..., hidden_size] that the payloads [..., *shape] of a recipe stand for."""
    if quant == "fp8":
        scales = carried[1].repeat_interleave(FP8_GROUP, dim=-1)[..., :hidden_size]
        return carried[0].float() * scales
    if quant == "nvfp4":
        codes = torch.stack([carried[0] & 0xF, carried[0] >> 4], dim=-1).flatten(-2).long()
        table = torch.tensor(
            [*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)], dtype=torch.float32, device=codes.device
        )
        return table[codes] * carried[1].float().repeat_interleave(NVFP4_GROUP, dim=-1)
    return carried[0].float()


def _to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, hidden_size = rows.shape
    num_groups = -(-hidden_size // FP8_GROUP)
    groups = pad(rows, (0, -hidden_size % FP8_GROUP)).view(num_tokens, num_groups, FP8_GROUP)
    scales = groups.abs().amax(dim=2).clamp(min=1e-12) / _E4M3_MAX
    # The CPU cast turns an overflow into NaN where CUDA saturates: clamp, so that both give the same bytes.
    scaled = (groups / scales[:, :, None]).clamp(-_E4M3_MAX, _E4M3_MAX).flatten(1)
    return scaled[:, :hidden_size].to(torch.float8_e4m3fn).contiguous(), scales


def _to_nvfp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, hidden_size = rows.shape
    groups = rows.view(num_tokens, hidden_size // NVFP4_GROUP, NVFP4_GROUP)
    scales = (groups.abs().amax(dim=2) / _E2M1_MAX).clamp(_SMALLEST_SCALE, _E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = groups / scales.float()[:, :, None]
    midpoints = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(_E2M1_VALUES)], device=rows.device)
    codes = torch.bucketize(scaled.abs(), midpoints).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    pairs = codes.view(num_tokens, hidden_size // 2, 2)
    return pairs[:, :, 0] | (pairs[:, :, 1] << 4), scales
