"""Rows in FP8 as DeepEP quantises them, in torch: what its low-latency dispatch must send."""

from __future__ import annotations

import torch

_FP8_GROUP = 128
_FP8_MAX = 448.0


def to_fp8(x: torch.Tensor, *, round_scale: bool = False, use_ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn with one scale for 128 values: [n, hidden], [n, hidden // 128].

    Args:
        x: [n, hidden].
        round_scale: Scales are powers of two, not below the exact ones.
        use_ue8m0: Such scales as their exponents, biased by 127, in one byte each: [n, hidden // 512] int32.

    Raises:
        ValueError: hidden is not a multiple of 128, or of 512 with use_ue8m0, which needs round_scale.
    """
    num_tokens, hidden = x.shape
    multiple = 4 * _FP8_GROUP if use_ue8m0 else _FP8_GROUP
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 is True, round_scale is False: expected both, such scales are powers of two")
    if hidden % multiple:
        raise ValueError(f"x has rows of {hidden}, FP8 needs a multiple of {multiple}; use_fp8=False sends bfloat16")
    groups = x.view(num_tokens, hidden // _FP8_GROUP, _FP8_GROUP).float()
    scales = groups.abs().amax(2).clamp(min=1e-4) / _FP8_MAX
    exponents = (scales.view(torch.int32) + 0x7FFFFF) >> 23
    if round_scale:
        scales = (exponents << 23).view(torch.float32)
    # A cast that overflows gives NaN on the CPU and saturates on CUDA: clamp, so that both give the same bytes.
    values = (groups / scales[:, :, None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    if use_ue8m0:
        scales = exponents.to(torch.uint8).view(torch.int32)
    return values.view(num_tokens, hidden), scales
